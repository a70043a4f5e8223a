"""The file of steps by load: what SGLang takes is read, anything else refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from eagle3.engine.draft import read_adaptive, require_adaptive
from eagle3.errors import InputError


def test_files_of_others_may_hold_several_candidates_and_sglangs_other_keys(tmp_path: Path) -> None:
    given = {"ema_alpha": 0.2, "8": {"candidate_steps": [0, 1, 3], "up_hysteresis": 0.0}, "1": {"candidate_steps": [0]}}
    (tmp_path / "steps.json").write_text(json.dumps(given))
    steps = read_adaptive(str(tmp_path / "steps.json"))
    assert steps == {1: [0], 8: [0, 1, 3]}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"4": [3]}, r"as a file like .* \(TypeError\); make one with"),
        ({"ema_alpha": 0.2, "1": {"candidate_steps": [0]}}, "no steps for any number of requests: serve the target"),
    ],
)
def test_a_file_without_steps_is_refused(tmp_path: Path, given: Any, words: str) -> None:
    (tmp_path / "steps.json").write_text(json.dumps(given))
    with pytest.raises(InputError, match=words):
        read_adaptive(str(tmp_path / "steps.json"))


def test_a_server_must_say_that_it_adapts() -> None:
    require_adaptive({"speculative_adaptive": True}, name="the server")
    with pytest.raises(InputError, match="the server does not draft adaptively"):
        require_adaptive({"speculative_adaptive": False}, name="the server")
