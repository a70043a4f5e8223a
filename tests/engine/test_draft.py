"""The file of steps by load: what SGLang takes is read, and what it would refuse is refused here."""

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
        ([1], "it is not of the form"),
        ({"ema_alpha": 0.2}, "it is not of the form"),
        ({"4": {"candidate_steps": [1]}, "8": {"candidate_steps": []}}, "its entry 8 is not of the form"),
        *(({"4": {"candidate_steps": wrong}}, "its entry 4 is not") for wrong in ([1, -1], [True], 3)),
        ({"4": [3]}, "its entry 4 is not"),
        ({"²": {"candidate_steps": [3]}}, "it is not of the form"),
        ({"1": {"candidate_steps": [0]}}, "0 steps for every number of requests: serve the target without a head"),
    ],
)
def test_what_sglang_would_refuse_or_not_draft_with_is_an_error(tmp_path: Path, given: Any, words: str) -> None:
    (tmp_path / "steps.json").write_text(json.dumps(given))
    with pytest.raises(InputError, match=words):
        read_adaptive(str(tmp_path / "steps.json"))


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"adaptive=/none\.json cannot be read \(FileNotFoundError\); make one with"):
        read_adaptive("/none.json")
    (tmp_path / "steps.json").write_text("{")
    with pytest.raises(InputError, match="cannot be read"):
        read_adaptive(str(tmp_path / "steps.json"))


def test_a_server_must_say_that_it_adapts() -> None:
    require_adaptive({"speculative_adaptive": True}, name="the server")
    with pytest.raises(InputError, match="the server does not draft adaptively"):
        require_adaptive({"speculative_adaptive": False}, name="the server")
