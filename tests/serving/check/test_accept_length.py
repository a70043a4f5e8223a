"""Accept length as a check: against the least useful one, the export's own, and what training simulated."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from exported_head import (
    Editable,
    errors,
    random_head,
    tiny_facts,
    tiny_target,
    with_simulated,
)
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig
from stores import ROOT

from eagle3 import cli
from eagle3.answers.chat import Chat
from eagle3.data.datamodule import split_fraction
from eagle3.decoding.speculate import Decoded, Measurement
from eagle3.errors import InputError
from eagle3.features.store import FeatureStore
from eagle3.serving.check import accept_length as acceptance
from eagle3.serving.check.accept_length import Judge
from eagle3.serving.check.checks import check_head
from eagle3.serving.check.finding import Finding
from eagle3.serving.check.prompts import prompt_source, validation_prompts
from eagle3.serving.check.settings import Decoding
from eagle3.serving.head.export import TrainedHead, check_export, export_head
from eagle3.serving.head.files import read_files
from eagle3.storage import write_jsonl
from eagle3.target.model import Target
from serve import export_head as export_action
from serve import require_limit


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target()


@pytest.fixture
def make_judge(target: Target) -> Callable[..., Judge]:
    def make(**changes: object) -> Judge:
        settings = {
            "source": None,
            "limit": 2,
            "questions": ["What is a list?", "What is a tuple?"],
            "min_accept_length": 1.0,
            "max_difference": 0.05,
        }
        chat = Chat(target.tokenizer, template=None, template_kwargs={}, date="2026-01-01", stop_ids=target.stop_ids)
        decoding = Decoding(steps=2, topk=1, draft_tokens=None, max_new_tokens=6, temperature=0.0, seed=0)
        return Judge(target=target, chat=chat, decoding=decoding, **settings | changes)

    return make


@pytest.fixture
def trained_on_tiny(target: Target) -> TrainedHead:
    return random_head(tiny_facts(target), target.fingerprint)


def test_a_head_that_accepts_nothing_is_an_error_when_served_and_a_warning_when_its_training_said_so(
    trained_on_tiny: TrainedHead, make_judge: Callable[..., Judge], tmp_path: Path
) -> None:
    judge, head = make_judge(min_accept_length=3.5), tmp_path / "head"  # more than two steps can give
    export_head(trained_on_tiny, head, versions={})
    at_export = check_export(trained_on_tiny, head, judge)
    assert [(item.check, item.level) for item in at_export if item.level != "ok"] == [("accept_length", "warning")]
    recorded = json.loads((head / "training.json").read_text())["accept_length"]
    assert recorded["lossless"] == 1.0
    assert recorded["prompts_from"] == "check.questions"  # its store is nowhere
    assert recorded["from_validation"] is False
    assert recorded["standard_error"] >= 0
    later = check_head(read_files(head), judge)
    assert "min_accept_length is 3.5; if the other checks are well, the head is of another target" in str(errors(later))


@pytest.mark.parametrize(("factor", "fails"), [(0.9, True), (0.96, False), (1.04, False), (1.1, True)])
def test_more_than_5_percent_off_the_exports_own_measurement_is_an_error(
    factor: float, fails: bool, trained_on_tiny: TrainedHead, make_judge: Callable[..., Judge], tmp_path: Path
) -> None:
    judge, head = make_judge(), tmp_path / "head"
    export_head(trained_on_tiny, head, versions={})
    assert errors(check_export(trained_on_tiny, head, judge)) == {}
    files = read_files(head)
    assert files.training is not None
    files.training["accept_length"]["accept_length"] *= factor
    found = errors(check_head(files, judge))
    assert bool(found) is fails
    if fails:
        assert "the export measured" in found["accept_length"]
        assert "check.max_difference=0.05: a file of the head or the target has changed, export again" in str(found)
    files.training["accept_length"]["prompts_hash"] = "other prompts"
    assert errors(check_head(files, judge)) == {}


@pytest.mark.parametrize(
    ("then", "now", "fails"),
    [("float32", "float32", True), ("bfloat16", "bfloat16", False), ("bfloat16", "float32", False)],
)
def test_two_standard_errors_are_allowed_where_near_ties_may_have_flipped(
    then: str, now: str, fails: bool, make_judge: Callable[..., Judge]
) -> None:
    training = {"accept_length": measurement(dtype=then, accept_length=2.16)}  # 8 % more, two errors are 4 %
    finding = make_judge().judged(measurement(dtype=now), training)
    assert finding.level == ("error" if fails else "ok")
    assert "the export measured 2.160 on the same" in finding.message
    training["accept_length"]["accept_length"] = 2.4
    assert make_judge().judged(measurement(dtype=now), training).level == "error"


def test_one_answer_that_holds_all_verifications_has_an_accept_length_and_no_error(
    trained_on_tiny: TrainedHead, make_judge: Callable[..., Judge], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export_head(trained_on_tiny, tmp_path / "head", versions={})
    long, short = Decoded([5] * 40, 20, [12, 8], 0, "stop"), Decoded([2], 0, [0, 0], 0, "stop")
    monkeypatch.setattr(acceptance, "measure", lambda *given, **settings: Measurement([long, short, short], 1.0, 1.0))
    judge = make_judge()
    result = judge.measured(tmp_path / "head", judge.prompts(None))
    assert (result["accept_length"], result["standard_error"], result["dtype"]) == (2.0, None, "float32")


def measurement(**changes: object) -> dict:
    same = {"steps": 2, "topk": 1, "draft_tokens": None, "max_new_tokens": 6, "temperature": 0.0, "seed": 0}
    result = {
        "accept_length": 2.0,
        "standard_error": 0.04,
        "prompts": 9,
        "prompts_from": "here",
        "from_validation": True,
    }
    same["dtype"] = "float32"
    return {"prompts_hash": "h", **same, **result, **changes}


@pytest.mark.parametrize(
    ("simulated", "changes", "compared", "fails"),
    [
        (2.15, {}, True, False),  # 7 % less, but 3 % are within two standard errors
        (2.25, {}, True, True),
        (2.25, {"standard_error": 0.2}, True, False),
        (2.25, {"standard_error": None}, True, False),
        (1.5, {}, True, False),
        (2.25, {"from_validation": False}, False, False),
        (2.25, {"topk": 4}, False, False),
        (2.25, {"temperature": 0.7}, False, False),
        (2.25, {"steps": 4}, False, False),
    ],
)
def test_the_simulated_accept_length_is_the_bar_where_it_is_comparable(
    simulated: float, changes: dict, compared: bool, fails: bool, make_judge: Callable[..., Judge]
) -> None:
    training = {"accept_length": None, "simulated_accept_length": {"2": simulated}}
    finding = make_judge().judged(measurement(**changes), training)
    assert ("validation during training simulated" in finding.message) is compared
    assert finding.level == ("error" if fails else "ok")
    assert ("more than two standard errors" in finding.message) is fails


def test_an_export_is_compared_with_what_its_training_simulated_on_the_same_prompts(
    trained_on_tiny: TrainedHead, make_judge: Callable[..., Judge], store_path: Path, tmp_path: Path
) -> None:
    trained, head = with_simulated(trained_on_tiny, steps_2=2.9), tmp_path / "head"
    trained.origin.update(path=str(store_path), hash=FeatureStore(store_path).fingerprint)
    export_head(trained, head, versions={})
    found = errors(check_export(trained, head, make_judge()))
    assert f"(validation prompts of {store_path}); validation during training simulated 2.900" in found["accept_length"]


def test_without_the_target_an_export_says_what_it_skipped(trained_on_tiny: TrainedHead, tmp_path: Path) -> None:
    export_head(trained_on_tiny, tmp_path / "head", versions={})
    findings = check_export(trained_on_tiny, tmp_path / "head", "target.path=/gone does not exist")
    skipped = {item.check: item.message for item in findings if item.level == "skipped"}
    assert skipped == {"target": "the target was not at hand", "accept_length": "target.path=/gone does not exist"}


# --- prompts ---------------------------------------------------------------------------------------------------------


def test_validation_prompts_are_the_prompt_parts_of_the_lowest_shares(store_path: Path) -> None:
    features = FeatureStore(store_path)
    samples = [features.read(ref) for ref in features.samples]
    samples = sorted(
        (sample for sample in samples if sample.turns[0] == 0), key=lambda sample: split_fraction(sample.id)
    )
    expected = [sample.input_ids[: sample.turns.tolist().index(1)].tolist() for sample in samples]
    below = sum(split_fraction(sample.id) < 0.5 for sample in samples)
    store = {"path": str(store_path), "hash": features.fingerprint, "val_fraction": 0.5}
    assert validation_prompts(store, limit=3, max_length=99).prompts == expected[:3]
    assert validation_prompts(store, limit=3, max_length=99).from_validation
    assert validation_prompts(store, limit=None, max_length=99).prompts == expected[:below]
    with pytest.raises(InputError, match="is no longer the store of the training"):
        validation_prompts(store | {"hash": "other"}, limit=3, max_length=99)


def test_prompts_of_every_shape_are_measured_up_to_the_first_user_turn(
    make_judge: Callable[..., Judge], tmp_path: Path
) -> None:
    rows = [
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]},
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]},
        {"turns": ["Hi", "And then?"]},
        {"prompt": "Hi"},
        {"messages": [{"role": "tool", "content": "Hi"}]},
        {"prompt": "word " * 4096},
    ]
    write_jsonl(tmp_path / "rows.jsonl", rows)
    source = prompt_source(path=str(tmp_path / "rows.jsonl"), split="train")
    judge = make_judge(source=source, limit=None)
    found = judge.prompts(None)
    assert found.prompts == [judge.chat.prompt_ids([{"role": "user", "content": "Hi"}])] * 4
    assert sorted(found.left_out.values()) == [1, 1]
    assert "tool turn" in found.left_out


# --- the commands ----------------------------------------------------------------------------------------------------


def serve(*settings: str, cwd: Path) -> subprocess.CompletedProcess:
    command = [sys.executable, str(ROOT / "serve.py"), *settings]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True)


def save_run(folder: Path, trained: TrainedHead, *, target: str) -> None:
    """A finished training, whose features were made from `target`."""
    trained.facts["origin"]["target"] = trained.facts["origin"]["target"] | {"name": target, "revision": None}
    (folder / "checkpoints").mkdir(parents=True)
    weights = torch.nn.ModuleDict({"head": trained.head}).state_dict()
    torch.save({"state_dict": weights, "eagle3": trained.facts}, folder / "checkpoints/best.ckpt")


def serve_config(*overrides: str) -> DictConfig:
    with initialize_config_dir(cli.CONF, version_base="1.3"):
        return compose("serve", overrides=[*overrides])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (["prompts.path=/no/such.jsonl"], r"prompts\.path=/no/such\.jsonl"),
        (["target.dtype=flaot16"], r"target\.dtype=flaot16"),
        (["chat.template=/no/such.jinja"], r"chat\.template=/no/such\.jinja cannot be read"),
        (["topk=4"], "such a tree"),
        (["topk=100", "draft_tokens=8"], "topk=100: the head can draft no more than its 64 tokens"),
        (["temperature=-1"], r"temperature=-1 must be 0"),
    ],
)
def test_a_wrong_option_of_an_export_is_an_error_and_no_reason_to_skip_the_measurement(
    wrong: list[str], message: str, trained_on_tiny: TrainedHead, tiny_path: Path, tmp_path: Path
) -> None:
    save_run(tmp_path / "run", trained_on_tiny, target=str(tiny_path))
    config = serve_config("action=export", f"run={tmp_path}/run", f"head={tmp_path}/head", *wrong)
    with pytest.raises(InputError, match=message):
        export_action(config)


@pytest.mark.parametrize("limit", [0, -1, 2.5])
def test_a_number_of_prompts_starts_at_1(limit: float) -> None:
    with pytest.raises(InputError, match=rf"limit={limit} must be a whole number of prompts from 1 up"):
        require_limit(limit)
    require_limit(None)


def test_one_limit_is_for_every_action_and_its_default_for_each() -> None:
    assert [serve_config(f"action={action}").limit for action in ("check", "bench", "tune")] == [16, 80, 64]
    assert [serve_config(f"action={action}", "limit=3").limit for action in ("check", "bench", "tune")] == [3, 3, 3]


def test_export_writes_the_best_head_of_a_run_without_its_target(trained_on_tiny: TrainedHead, tmp_path: Path) -> None:
    save_run(tmp_path / "run", trained_on_tiny, target="./gone/target")
    done = serve("action=export", "run=run", "head=head", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "skipped  accept_length     target.path=./gone/target does not exist" in done.stdout
    assert read_files(tmp_path / "head").layer_ids == [1, 3, 4]


def test_decode_prints_one_json_line(trained_on_tiny: TrainedHead, tiny_path: Path, tmp_path: Path) -> None:
    export_head(trained_on_tiny, tmp_path / "head", versions={})
    write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "Hi"}])
    done = serve(
        "action=decode", f"target.path={tiny_path}", "head=head", "prompts.path=rows.jsonl", "steps=2",
        "max_new_tokens=4", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert done.stdout.count("\n") == 1
    assert result["lossless"] == 1.0
    assert result["standard_error"] is None  # of one prompt
    assert result["accept_length"] == pytest.approx(1 + sum(result["per_depth"]))
    assert 1 <= result["accept_length_kept"] <= result["accept_length"]
    assert len(result["per_depth"]) == 2


def test_check_exits_with_status_1_and_the_reason_and_writes_the_table_as_json(
    trained_on_tiny: TrainedHead, tiny_path: Path, tmp_path: Path
) -> None:
    export_head(trained_on_tiny, tmp_path / "head", versions={})
    head = Editable(tmp_path / "head")
    head.tensors["d2t"] = head.tensors["d2t"] + torch.arange(64)
    head.save()
    done = serve("action=check", f"target.path={tiny_path}", "head=head", "findings=found.json", cwd=tmp_path)
    assert done.returncode == 1
    assert "error    d2t" in done.stdout
    assert "d2t holds target ids" in done.stdout
    assert done.stderr.splitlines()[-1] == (
        "error: head=head must not be served: d2t, t2d: see the errors in the table above"
    )
    found = [Finding(**row) for row in json.loads((tmp_path / "found.json").read_text())]
    assert errors(found).keys() == {"d2t", "t2d"}
    assert [item.level for item in found if item.check == "accept_length"] == ["skipped"]
