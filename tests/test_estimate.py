"""The estimate against a run on the bundled target, and its rates against the measured ones."""

import json
import re
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from omegaconf import OmegaConf
from stores import ASSETS, CONF, ROOT
from transformers import DeepseekV3Config, GptOssConfig, LlamaConfig

from eagle3.answers.store import read_answers
from eagle3.commands.precompute import precompute
from eagle3.compose import compose_run
from eagle3.errors import InputError
from eagle3.estimate import Rates, Tokens, active_parameters, estimate_run, gpu_hours, head_parameters, store_bytes
from eagle3.features.conversation import read_conversations
from eagle3.progress import duration
from eagle3.settings.precomputing import Engine, PrecomputeRun, RelativeSpeed
from eagle3.storage.records import sealed_bytes
from eagle3.target.facts import target_config
from eagle3.target.files import TargetFiles

MEASURED = RelativeSpeed(compute=1, bandwidth=1)


@pytest.fixture
def rates() -> Rates:
    return Rates(**OmegaConf.to_container(OmegaConf.load(CONF / "estimate" / "h200.yaml"))["rates"])  # type: ignore


def measured(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "benchmarks" / "results" / name).read_text())


def test_rates_of_answers_and_features_are_the_measured_ones(rates):
    """Both benchmarks gave prompts of 128 tokens answers of 256."""
    plain, engine = measured("llama8b_cost.json"), measured("engine_rates.json")
    found: dict[Engine, tuple[float, float]] = {
        "huggingface": (plain["features"]["tokens_per_s"], plain["answers"]["answer_tokens_per_s"]),
        "sglang": (engine["features"]["tokens_per_s"]["captured"], engine["answers"]["tokens_per_s"]["client"]),
    }
    for name, (features, answers) in found.items():
        assert rates.features[name] == pytest.approx(features, abs=1)
        assert rates.answers[name] == pytest.approx(1 / (1 / answers - 0.5 / features), abs=1)
    assert rates.head_parameters == plain["head_parameters"]


def test_rates_of_training_fit_the_measured_packs_and_an_epoch(rates):
    rows = [row for row in measured("train_step.json")["rows"] if row["tokens"] == 16384]
    speed = np.array([[row["tokens_per_s"]] for row in rows])
    shares = np.array([[1, row["trained_rows"] / row["tokens"]] for row in rows])
    of_all, more = np.linalg.lstsq(speed * shares, np.ones(len(rows)), rcond=None)[0]
    assert rates.training["prompts"] == pytest.approx(1 / of_all, rel=1e-4)
    assert rates.training["answers"] == pytest.approx(1 / (of_all + more), rel=1e-3)
    run = measured("end_to_end.json")["runs"][0]
    tokens = some_tokens(tokens=run["tokens_per_s"], answer_tokens=run["anchors_per_s"])
    hours = gpu_hours(tokens, rates, MEASURED, answered_by=None, extracted_by="sglang", target=1, head=1)
    assert hours["training_epoch"] * 3600 == pytest.approx(1, rel=0.1)


def test_what_an_h100_took_is_near_its_scaled_rates(rates):
    run = measured("time_to_head.json")["on_h100"]
    tokens = some_tokens(tokens=100_000 * 384, answer_tokens=100_000 * 256)
    speed = compose_run("precompute", "out_dir=DIR", "estimate=h100").estimate.relative
    hours = gpu_hours(tokens, rates, speed, answered_by="sglang", extracted_by="sglang", target=1, head=1)
    for stage, key in (
        ("answers", "answers_hours"),
        ("features", "features_hours"),
        ("training_epoch", "training_hours"),
    ):
        assert hours[stage] == pytest.approx(run["for_100000"][key], rel=0.25)


def test_the_sizes_of_long_conversations_on_the_page_of_questions_are_those_of_the_rule():
    page = (ROOT / "docs/start/questions.md").read_text()
    rows = re.findall(r"^\| ([\d,]+) \| ([\d,]+) \| ([\d.]+) GB \| ([\d.]+) GB \|$", page, flags=re.MULTILINE)
    assert len(rows) == 4
    for hidden_size, answers, fp8, bfloat16 in rows:
        tokens = some_tokens(tokens=65536, answer_tokens=int(answers.replace(",", "")))
        facts = replace(target_config(LLAMA_8B, 0, None), hidden_size=int(hidden_size.replace(",", "")))
        sizes = store_bytes(tokens, facts, 3, teachers="answers", tied=False)
        assert f"{sizes['fp8'] / 1e9:.2f}" == fp8 and f"{sizes['bfloat16'] / 1e9:.2f}" == bfloat16


def test_imported_answers_take_no_time(rates):
    tokens = some_tokens(tokens=3 * 10**9, answer_tokens=10**9)
    own = gpu_hours(tokens, rates, MEASURED, answered_by="sglang", extracted_by="sglang", target=1, head=1)
    imported = gpu_hours(tokens, rates, MEASURED, answered_by=None, extracted_by="sglang", target=1, head=1)
    assert own["answers"] == pytest.approx((1e9 / 20771 + 2e9 / 39321) / 3600) and imported["answers"] == 0
    assert own["features"] == imported["features"] == pytest.approx(3e9 / 39321 / 3600)
    twice = gpu_hours(tokens, rates, MEASURED, answered_by="sglang", extracted_by="sglang", target=2, head=2)
    assert twice == {stage: pytest.approx(2 * hours) for stage, hours in own.items()}


def some_tokens(**counts: int) -> Tokens:
    return Tokens(samples=1, left_out={}, answers="", **counts)


LLAMA_8B = LlamaConfig(
    vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
    num_key_value_heads=8,
)  # fmt: skip


@pytest.mark.parametrize(
    ("config", "published"),
    [(GptOssConfig(), 5.13e9), (DeepseekV3Config(), 37e9)],  # their model cards: 5.1 B and 37 B active
)
def test_known_mixtures_have_the_active_parameters_that_their_makers_name(config, published):
    assert active_parameters(of_config(config)) == pytest.approx(published, rel=0.02)


def test_the_rates_are_for_the_parameters_of_an_8b_and_its_head(rates):
    assert active_parameters(of_config(LLAMA_8B)) == rates.target_parameters
    assert head_parameters(target_config(LLAMA_8B, 128256, None), 3, 32000) == rates.head_parameters


def of_config(config: Any) -> TargetFiles:
    return TargetFiles(
        path="x", revision=None, folder=Path(), config=config, config_dict={}, checkpoint_dtype=None, tokenizer=None,  # type: ignore
        stop_ids=frozenset(), trust_remote_code=False,
    )  # fmt: skip


# A run


def compose_precompute(out_dir: Path, *overrides: str) -> PrecomputeRun:
    settings = (
        f"target.path={ASSETS / 'tiny'}", f"prompts.path={out_dir.parent}/prompts.jsonl", f"out_dir={out_dir}",
        "prompts/privacy=off", "prompts.processes=1", "sampling.max_new_tokens=24", "features.dtype=bfloat16",
    )  # fmt: skip
    return compose_run("precompute", *settings, *overrides)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """DIR after all stages, on 40 prompts of which some have several turns."""
    root = tmp_path_factory.mktemp("estimate")
    lines = (ASSETS / "prompts" / "train.jsonl").read_text().splitlines(keepends=True)[:40]
    (root / "prompts.jsonl").write_text("".join(lines))
    precompute(compose_precompute(root / "dir"))
    return root / "dir"


def test_with_answers_tokens_are_exact_and_bytes_are_those_of_the_hidden_states(made):
    found, real = estimate_run(compose_precompute(made)), json.loads((made / "features" / "manifest.json").read_text())
    assert all(found[key] == real[key] for key in ("samples", "tokens", "answer_tokens"))
    stored = sum(path.stat().st_size for path in (made / "features").iterdir() if path.suffix != ".index")
    assert 0.75 * stored < found["bytes"]["bfloat16"] <= stored
    embedding = 4096 * 192 * 2  # bytes, bfloat16 in either store
    assert 2 * (found["bytes"]["fp8"] - embedding) == found["bytes"]["bfloat16"] - embedding
    assert json.loads((made / "estimate.json").read_text()) == found


def test_the_last_line_is_the_total_with_all_epochs(made, caplog):
    caplog.set_level("INFO", "eagle3.estimate")
    found = estimate_run(compose_precompute(made, "estimate=a100", "estimate.epochs=3"))["gpu_hours"]
    assert found["total"] == pytest.approx(found["answers"] + found["features"] + 3 * found["training_epoch"])
    last = caplog.messages[-1]
    assert "total, 3 epochs" in last and "NVIDIA A100 80 GB" in last and duration(3600 * found["total"]) in last


@pytest.mark.parametrize("too_long", ["drop", "truncate"])
def test_answers_that_are_too_long_are_dropped_or_cut_as_the_features_stage_does(made, too_long):
    left_out: Counter[str] = Counter()
    kept = [*read_conversations(made / "answers", max_length=50, too_long=too_long, left_out=left_out)]
    found = estimate_run(compose_precompute(made, "features.max_length=50", f"features.too_long={too_long}"))
    assert (found["samples"], found["tokens"]) == (len(kept), sum(len(each.input_ids) for each in kept))
    assert found["answer_tokens"] == sum(int((each.turns > 0).sum()) for each in kept)
    dropped = left_out[f"longer than features.max_length=50: {too_long}"]
    assert 0 < dropped < 40
    assert found["left_out"].get("longer than features.max_length", 0) == (dropped if too_long == "drop" else 0)


def test_an_answers_stage_that_was_stopped_stands_for_the_whole_run(made, tmp_path):
    whole = estimate_run(compose_precompute(made))
    shutil.copytree(made, tmp_path / "dir", ignore=shutil.ignore_patterns("features"))
    answers = tmp_path / "dir" / "answers"
    (answers / "manifest.json").write_bytes(
        sealed_bytes(replace(read_answers(answers), complete=False, counts=None, files=None))
    )
    lines = (answers / "answers.jsonl").read_bytes().splitlines(keepends=True)
    (answers / "answers.jsonl").write_bytes(b"".join(lines[:20]))
    found = estimate_run(compose_precompute(tmp_path / "dir"))
    assert found["tokens"] == pytest.approx(whole["tokens"], rel=0.3) and found["tokens"] != whole["tokens"]


@pytest.mark.parametrize("looked_at", [1000, 20])
def test_without_answers_and_weights_every_turn_counts_with_the_longest_answer(
    made, without_weights, tmp_path, looked_at
):
    shutil.copytree(made / "prompts", tmp_path / "dir" / "prompts")
    found = estimate_run(
        compose_precompute(tmp_path / "dir", f"target.path={without_weights}", f"estimate.prompts={looked_at}")
    )
    assert found["answers"] == "at most 24 tokens each (sampling.max_new_tokens)"
    real = json.loads((made / "features" / "manifest.json").read_text())
    if looked_at == 1000:
        lines = (made / "prompts" / "prompts.jsonl").read_text().splitlines()
        turns = sum(message["role"] == "user" for line in lines for message in json.loads(line)["messages"])
        assert found["answer_tokens"] == 24 * turns >= real["answer_tokens"]
    assert found["samples"] == len((made / "prompts" / "prompts.jsonl").read_text().splitlines())
    assert found["tokens"] == pytest.approx(real["tokens"], rel=0.3)
    short = estimate_run(
        compose_precompute(tmp_path / "dir", "sampling.max_prompt_tokens=30", f"estimate.prompts={looked_at}")
    )
    assert short["samples"] + sum(short["left_out"].values()) == found["samples"] > short["samples"], short["left_out"]


@pytest.mark.parametrize(
    ("overrides", "error"),
    [
        ([], r"prompts\.jsonl does not exist or is empty.*stages=\[prompts\]"),
        (["answers=imported"], r"has no imported answers to count; run stages=\[answers\]"),
    ],
)
def test_what_is_missing_is_named_with_the_stage_that_makes_it(tmp_path, overrides, error):
    with pytest.raises(InputError, match=error):
        estimate_run(compose_precompute(tmp_path / "dir", *overrides))


def test_prompts_that_leave_nothing_are_refused(made, tmp_path):
    with pytest.raises(InputError, match="no prompt gives a sample"):
        estimate_run(compose_precompute(made, "features.max_length=2"))
    shutil.copytree(made / "prompts", tmp_path / "dir" / "prompts")
    with pytest.raises(InputError, match=r"no prompt gives a sample.*leaves no room for sampling\.max_new_tokens"):
        estimate_run(compose_precompute(tmp_path / "dir", "sampling.max_new_tokens=4090"))
