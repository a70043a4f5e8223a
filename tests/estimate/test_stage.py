"""The estimate of a run, and the run: the same prompts through the real stages on the bundled target."""

import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig
from stores import ASSETS, CONF

from eagle3.answers.store import read_responses
from eagle3.errors import InputError
from eagle3.estimate.build import estimate_run
from eagle3.settings.check import check_settings
from eagle3.storage.folder import LocalFolder
from eagle3.storage.records import sealed_bytes
from precompute import clean_prompts, run_stages

PROMPTS, DTYPES = 80, ("bfloat16", "fp8")


def composed(out_dir: Path, *overrides: str) -> DictConfig:
    settings = (
        f"target.path={ASSETS / 'tiny'}", f"prompts.path={out_dir.parent}/prompts.jsonl", f"out_dir={out_dir}",
        "prompts/privacy=patterns", "prompts.processes=1", "responses.max_new_tokens=24", "features.shard_mb=1",
    )  # fmt: skip
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose("precompute", [*settings, *overrides])
    check_settings(config, "precompute")
    return config


def estimated(out_dir: Path, *overrides: str) -> dict[str, Any]:
    estimate_run(composed(out_dir, *overrides))
    return json.loads((out_dir / "estimate.json").read_text())


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """DIR after the stage `prompts`."""
    root = tmp_path_factory.mktemp("estimate")
    lines = (ASSETS / "prompts" / "train.jsonl").read_text().splitlines(keepends=True)[:PROMPTS]
    (root / "prompts.jsonl").write_text("".join(lines))
    clean_prompts(composed(root / "before").prompts, root / "before", keep_answers=False)
    return root / "before"


@pytest.fixture(scope="module")
def made(prompts: Path) -> Path:
    """DIR after all stages; features in DIR/fp8 as well."""
    out_dir = Path(shutil.copytree(prompts, prompts.parent / "made"))
    run_stages(composed(out_dir, "features.dtype=bfloat16"), ["responses", "features"])
    run_stages(composed(out_dir, "features.dtype=fp8", f"features.path={out_dir}/fp8"), ["features"])
    return out_dir


def manifest(made: Path, dtype: str) -> dict[str, Any]:
    return json.loads((made / {"bfloat16": "features", "fp8": "fp8"}[dtype] / "manifest.json").read_text())


def require_close(found: dict[str, Any], made: Path, *, within: float) -> None:
    for key in ("samples", "tokens", "answer_tokens"):
        assert found[key] == pytest.approx(manifest(made, "bfloat16")[key], rel=within), key
    for dtype in DTYPES:
        real, size = manifest(made, dtype), found["features"][dtype]
        assert size["bytes"] == pytest.approx(real["bytes"], rel=within), dtype
        assert abs(size["shards"] - len(real["shards"])) <= 1
        storage = LocalFolder(made / {"bfloat16": "features", "fp8": "fp8"}[dtype])
        names = [name for name in storage.names("*") if not name.endswith(".lock")]
        assert abs(size["objects"] - len(names)) <= 2
        beside = sum(storage.size(name) for name in names if not name.endswith(".tar"))
        assert size["beside"] == pytest.approx(beside, rel=0.15)


def test_before_any_answer_a_run_takes_what_the_estimate_says_of_answers_of_that_length(
    prompts: Path, made: Path
) -> None:
    found = estimated(prompts)
    assert found["answers"] == "of 24 tokens each (responses.max_new_tokens)"
    require_close(found, made, within=0.15)


def test_with_all_answers_there_bytes_are_exact_but_for_the_ends_of_tars(made: Path) -> None:
    found = estimated(made)
    assert found["answers"] == f"those of {PROMPTS} prompts in {made}/responses"
    require_close(found, made, within=0.005)
    for dtype in DTYPES:
        shards = len(manifest(made, dtype)["shards"])
        assert abs(found["features"][dtype]["bytes"] - manifest(made, dtype)["bytes"]) <= 10_240 * shards


@pytest.mark.parametrize("overrides", [[], ["estimate.prompts=40"]])
def test_a_third_of_the_answers_tells_of_all(prompts: Path, made: Path, tmp_path: Path, overrides: list[str]) -> None:
    out_dir = tmp_path / "killed"
    shutil.copytree(prompts, out_dir)
    shutil.copytree(made / "responses", out_dir / "responses")
    interrupt(out_dir / "responses", keep=30)
    found = estimated(out_dir, *overrides)
    assert found["answers"] == f"those of 30 prompts in {out_dir}/responses"
    require_close(found, made, within=0.25 if overrides else 0.15)


def interrupt(responses: Path, *, keep: int) -> None:
    """Leave what a stage has written that is killed after so many rows."""
    ended = read_responses(responses)
    (responses / "manifest.json").write_bytes(sealed_bytes(replace(ended, complete=False, counts=None, files=None)))
    lines = (responses / "responses.jsonl").read_bytes().splitlines(keepends=True)
    (responses / "responses.jsonl").write_bytes(b"".join(lines[:keep]) + lines[keep][:50])


def test_a_sample_of_the_prompts_stands_for_all(prompts: Path) -> None:
    whole = estimated(prompts, "estimate.answer_tokens=16")
    part = estimated(prompts, "estimate.answer_tokens=16", "estimate.prompts=40")
    assert part["looked_at"] < 60 and part["prompts"] == whole["prompts"] == PROMPTS
    assert part["samples"] == pytest.approx(whole["samples"], rel=0.15)
    assert part["features"]["fp8"]["bytes"] == pytest.approx(whole["features"]["fp8"]["bytes"], rel=0.15)


def test_the_mean_of_answers_is_what_each_turn_gets(prompts: Path) -> None:
    """An answer shorter than the limit ends by itself, so that later turns are asked."""
    found = estimated(prompts, "estimate.answer_tokens=16")
    lines = (prompts / "prompts" / "prompts.jsonl").read_text().splitlines()
    turns = sum(message["role"] == "user" for line in lines for message in json.loads(line)["messages"])
    assert turns > PROMPTS and found["answer_tokens"] == 16 * turns and found["samples"] == PROMPTS


def test_the_table_and_the_file_say_the_same(prompts: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        found = estimated(prompts, "estimate.workers=4")
    for dtype, size in found["features"].items():
        line = next(record.message for record in caplog.records if record.message.startswith(dtype))
        assert line.split()[3:5] == [str(size["shards"]), str(size["objects"])]
    assert "4 x NVIDIA H200" in caplog.text and "answers: of 24 tokens each" in caplog.text
    assert found["hours"] == {stage: hours / 4 for stage, hours in found["gpu_hours"].items()}


def test_no_weights_are_needed(prompts: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    shutil.copytree(ASSETS / "tiny", target, ignore=shutil.ignore_patterns("*.safetensors"))
    assert estimated(prompts, f"target.path={target}")["samples"] == PROMPTS


def test_imported_answers_are_counted_as_they_came(tmp_path: Path) -> None:
    rows = [
        {"id": f"c{number}", "license": "MIT", "messages": [
            {"role": "user", "content": f"What is {number} plus {number}?"},
            {"role": "assistant", "content": f"It is {2 * number}."},
        ]} for number in range(20)
    ]  # fmt: skip
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = composed(tmp_path / "dir", "answers=imported")
    clean_prompts(config.prompts, tmp_path / "dir", keep_answers=True)
    found = estimated(tmp_path / "dir", "answers=imported")
    assert found["answers"] == "imported" and found["gpu_hours"]["responses"] == 0
    run_stages(config, ["responses", "features"])
    require_same(found, json.loads((tmp_path / "dir" / "features" / "manifest.json").read_text()))


def require_same(found: dict[str, Any], real: dict[str, Any]) -> None:
    assert [found[key] for key in ("samples", "tokens", "answer_tokens")] == [
        real[key] for key in ("samples", "tokens", "answer_tokens")
    ]


def test_without_prompts_the_line_says_how_to_make_them(tmp_path: Path) -> None:
    (tmp_path / "empty" / "prompts").mkdir(parents=True)
    (tmp_path / "empty" / "prompts" / "prompts.jsonl").touch()
    for out_dir in (tmp_path / "nothing", tmp_path / "empty"):
        with pytest.raises(InputError, match=r"prompts\.jsonl does not exist or is empty.*stages=\[prompts\]"):
            estimated(out_dir)


def test_answers_of_another_target_are_refused(made: Path, tmp_path: Path) -> None:
    target = Path(shutil.copytree(ASSETS / "tiny", tmp_path / "target"))
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    with pytest.raises(InputError, match="they differ in config"):
        estimated(made, f"target.path={target}")


def test_prompts_that_leave_nothing_are_named(prompts: Path) -> None:
    with pytest.raises(InputError, match="none gives a sample"):
        estimated(prompts, "features.max_length=2")
