"""SGLang's command line: what is given, what overrides what, and that SGLang knows every flag."""

import shlex
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from serving_fixtures import launch_settings

from eagle3.engine.command import Draft, launch_command, require_windowed_attention, shell_line
from eagle3.errors import InputError
from eagle3.settings.engine import LaunchSettings

CHAIN: dict[str, Any] = {"head": "/heads/mine", "steps": 3, "topk": 1, "draft_tokens": None}
# Of sglang/srt/server_args.py, version 0.5.17.
KNOWN = {
    "--model-path", "--revision", "--host", "--port", "--dtype", "--tp-size", "--mem-fraction-static",
    "--max-running-requests", "--cuda-graph-max-bs-decode", "--disable-overlap-schedule", "--trust-remote-code",
    "--speculative-algorithm", "--speculative-draft-model-path", "--speculative-draft-model-quantization",
    "--speculative-num-steps", "--speculative-eagle-topk", "--speculative-num-draft-tokens",
    "--speculative-draft-window-size",
}  # fmt: skip


@pytest.fixture
def settings(tmp_path: Path) -> LaunchSettings:
    return launch_settings(tmp_path)


def served(path: str, revision: str | None = None) -> Any:
    return SimpleNamespace(path=path, revision=revision)


def command(settings: LaunchSettings, **draft: Any) -> dict[str, list[str]]:
    """Flag → its values."""
    words = launch_command(settings, served("/models/mine"), Draft(**CHAIN | draft))
    assert words[:3] == [settings.interpreter, "-m", "sglang.launch_server"]
    flags: dict[str, list[str]] = {}
    for word in words[3:]:
        if word.startswith("--"):
            assert word not in flags, "each flag once"
            flags[word] = []
        else:
            flags[list(flags)[-1]].append(word)
    return flags


def test_every_flag_is_one_that_sglang_knows_and_given_only_when_the_user_says_so(tmp_path):
    every = launch_settings(tmp_path, mem_fraction_static=0.5, overlap_schedule=False, trust_remote_code=True)
    words = launch_command(every, served("t", revision="main"), Draft(**CHAIN, draft_window=512))
    assert {word for word in words if word.startswith("--")} == KNOWN
    assert words[words.index("--speculative-draft-window-size") + 1] == "512"
    given = {"--mem-fraction-static", "--disable-overlap-schedule", "--trust-remote-code", "--revision",
             "--speculative-draft-window-size"}  # fmt: skip
    assert command(launch_settings(tmp_path, mem_fraction_static=None)).keys() == KNOWN - given


@pytest.mark.parametrize(("shape", "tokens"), [((3, 1, None), "4"), ((5, 4, 16), "16")])
def test_a_draft_names_all_three_numbers(shape, tokens, settings):
    steps, topk, draft_tokens = shape
    flags = command(settings, steps=steps, topk=topk, draft_tokens=draft_tokens)
    assert flags["--speculative-algorithm"] == ["EAGLE3"]
    assert flags["--speculative-draft-model-path"] == ["/heads/mine"]
    numbers = [flags[f"--speculative-{name}"] for name in ("num-steps", "eagle-topk", "num-draft-tokens")]
    assert numbers == [[str(steps)], [str(topk)], [tokens]]


@pytest.mark.parametrize("wrong", [{"topk": 0}, {"draft_tokens": 5}, {"topk": 2}, {"topk": 2, "draft_tokens": 12}])
def test_a_draft_that_sglang_would_change_or_refuse_is_refused_here(wrong):
    with pytest.raises(InputError, match=r"steps=.* topk=.* draft_tokens="):
        Draft(**CHAIN | wrong)


def test_extra_flags_override_ours_in_either_spelling(tmp_path):
    extra = {"mem_fraction_static": 0.2, "--dtype": "bfloat16", "tp-size": None, "skip-server-warmup": True}
    extra |= {"cuda-graph-bs-decode": [1, 2], "json-model-override-args": {"a": 1}}
    flags = command(launch_settings(tmp_path, mem_fraction_static=0.9, extra_flags=extra))
    assert "--tp-size" not in flags
    names = ("mem-fraction-static", "dtype", "skip-server-warmup", "cuda-graph-bs-decode", "json-model-override-args")
    assert [flags[f"--{name}"] for name in names] == [["0.2"], ["bfloat16"], [], ["1", "2"], ['{"a": 1}']]


@pytest.mark.parametrize("backend", ["attention-backend", "speculative_draft_attention_backend"])
def test_a_window_is_refused_with_attention_that_has_none(tmp_path, backend):
    settings, windowed = launch_settings(tmp_path, extra_flags={backend: "triton"}), Draft(**CHAIN, draft_window=512)
    message = rf"draft_window=512: .* a window and {backend.replace('_', '-')}=triton; name another"
    with pytest.raises(InputError, match=message):
        require_windowed_attention(settings, windowed)
    require_windowed_attention(settings, Draft(**CHAIN))
    other = {"attention-backend": "triton", "speculative-draft-attention-backend": "fa3"}
    require_windowed_attention(replace(settings, extra_flags=other), windowed)


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("--host", r"launch\.host"), ("api_key", "EAGLE3_API_KEY"),
        ("model", r"target\.path"), ("tp", r"launch\.tp_size"), ("speculative_num_steps", "steps"),
    ],
)  # fmt: skip
def test_what_would_keep_us_from_reaching_the_server_or_make_results_wrong_is_refused(tmp_path, name, instead):
    message = rf"launch\.extra_flags holds {name.removeprefix('--').replace('_', '-')}: .*{instead}"
    with pytest.raises(InputError, match=message):
        command(launch_settings(tmp_path, extra_flags={name: "1"}))


def test_our_python_path_reaches_the_server_only_when_asked_for(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/ours")
    monkeypatch.setenv("HTTPS_PROXY", "/kept")
    assert "PYTHONPATH" not in launch_settings(tmp_path, env=None).environment
    asked = launch_settings(tmp_path, env={"PYTHONPATH": "/theirs", "NUMBER": 1}).environment
    assert (asked["PYTHONPATH"], asked["NUMBER"], asked["HTTPS_PROXY"]) == ("/theirs", "1", "/kept")


def test_the_printed_line_can_be_pasted_into_a_shell(tmp_path):
    settings = launch_settings(tmp_path, python="/my env/python", env={"A": "b c"})
    words = launch_command(settings, served("/my model ü"), None)
    line = shell_line(settings, words)
    assert shlex.split(line) == ["A=b c", *words]
    assert launch_settings(tmp_path).interpreter == sys.executable


def test_what_the_caller_needs_comes_after_our_flags_and_before_extra_flags(settings):
    given = replace(settings, extra_flags={"b": 3, "speculative-algorithm": "NGRAM"})
    flags = {"dtype": "own", "a": 1, "b": 2, "speculative-algorithm": "EAGLE3"}
    words = launch_command(given, served("t"), None, flags)
    assert [words[words.index(flag) + 1] for flag in ("--dtype", "--a", "--b", "--speculative-algorithm")] == [
        "own", "1", "3", "EAGLE3",
    ]  # fmt: skip
