"""The checks of an exported head: a sound one passes, every planted fault is found by the check meant for it."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from eagle3.chat import Chat
from eagle3.errors import InputError
from eagle3.features.datamodule import share_of_prompt
from eagle3.features.store import FeatureStore
from eagle3.head.draft_head import DraftHead, HeadConfig
from eagle3.head.from_target import head_facts
from eagle3.serving.acceptance import Decoding, Judge, check_head
from eagle3.serving.check import Finding, TargetFacts, require_no_errors, run_checks, table, target_facts
from eagle3.serving.checkpoint import read_files
from eagle3.serving.export import TrainedHead, check_export, export_head
from eagle3.serving.measured_prompts import prompt_source, validation_prompts
from eagle3.storage import write_json, write_jsonl
from eagle3.target import Target, load_target

ROOT = Path(__file__).parent.parent
LAYERS = [2, 4, 5]
FINGERPRINT = {"name": "tiny", "config_hash": "c", "tokenizer_hash": "t", "template_hash": "m", "weights_hash": "w"}
IDS = "eagle_aux_hidden_state_layer_ids"


@pytest.fixture(scope="module")
def facts(tiny_path: Path) -> TargetFacts:
    config = AutoConfig.from_pretrained(tiny_path)
    return TargetFacts(head_facts(config, config.vocab_size), "bfloat16", FINGERPRINT)


@pytest.fixture(scope="module")
def target(tiny_path: Path) -> Target:
    settings = {"revision": None, "dtype": "float32", "device": "cpu", "attention": None, "trust_remote_code": False}
    return load_target(path=str(tiny_path), **settings)


def random_head(facts: TargetFacts, fingerprint: dict, **changes: object) -> TrainedHead:
    """A head that fits the tiny target; its draft vocabulary is every third token from id 10 and the last."""
    settings = {key: facts.config[key] for key in HeadConfig.__dataclass_fields__ if key in facts.config}
    options = {"draft_vocab_size": 64, "fc_norm": False, "norm_output": False, "intermediate_size": 64}
    torch.manual_seed(0)
    draft_ids = torch.cat([torch.arange(10, 42), torch.arange(100, 196, 3)])
    head = DraftHead(HeadConfig(**settings | options | changes), draft_ids)
    origin = {
        "capture_layers": LAYERS,
        "target": fingerprint,
        "target_config": {**facts.config, "dtype": facts.dtype},
        "path": "/nowhere/features",
        "hash": "h",
        "val_fraction": 0.5,
    }
    simulated = {"val/accept_length": 1.0}
    stated = {
        "head_config": head.config.to_dict(),
        "num_steps": 7,
        "accept_length": simulated,
        "origin": origin,
    }
    return TrainedHead(Path("best.ckpt"), head, stated)


class Editable:
    """An exported head whose files can be spoilt."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = json.loads((path / "config.json").read_text())
        self.training = json.loads((path / "training.json").read_text())
        self.tensors = load_file(path / "model.safetensors")

    def save(self) -> None:
        write_json(self.path / "config.json", self.config)
        write_json(self.path / "training.json", self.training)
        save_file(self.tensors, self.path / "model.safetensors")


@pytest.fixture
def exported(facts: TargetFacts, tmp_path: Path) -> Editable:
    export_head(random_head(facts, FINGERPRINT), tmp_path / "head", versions={})
    return Editable(tmp_path / "head")


def errors(findings: list[Finding]) -> dict[str, str]:
    return {finding.check: finding.message for finding in findings if finding.level == "error"}


@pytest.mark.parametrize("options", [{}, {"fc_norm": True, "norm_output": True}], ids=["eagle3", "eagle3.1"])
def test_a_sound_export_passes_every_check(options: dict, facts: TargetFacts, tmp_path: Path) -> None:
    export_head(random_head(facts, FINGERPRINT, **options), tmp_path / "head", versions={})
    assert {finding.level for finding in run_checks(read_files(tmp_path / "head"), facts)} == {"ok"}


def absolute_ids(head: Editable) -> None:
    head.tensors["d2t"] = head.tensors["d2t"] + torch.arange(64)


def absolute_ids_without_t2d(head: Editable) -> None:
    absolute_ids(head)
    del head.tensors["t2d"]


def unsorted_ids(head: Editable) -> None:
    ids = (head.tensors["d2t"] + torch.arange(64)).flip(0)
    head.tensors["d2t"] = ids - torch.arange(64)


def bias(head: Editable) -> None:
    head.tensors["midlayer.self_attn.q_proj.bias"] = torch.zeros(192, dtype=torch.bfloat16)


def key_norm(head: Editable) -> None:
    head.tensors["midlayer.self_attn.k_norm.weight"] = torch.ones(64, dtype=torch.bfloat16)


def rename(head: Editable) -> None:
    head.tensors["decoder.norm.weight"] = head.tensors.pop("norm.weight")


def in_float32(head: Editable) -> None:
    head.tensors["fc.weight"] = head.tensors["fc.weight"].float()


def layer_ids(ids: list[int] | None) -> Callable[[Editable], None]:
    return lambda head: head.config["eagle_config"].update({IDS: ids})


def without_rope(head: Editable) -> None:
    for key in ("rope_theta", "rope_scaling", "rope_parameters"):
        del head.config[key]


def setting(**values: object) -> Callable[[Editable], None]:
    return lambda head: head.config.update(values)


def offset(position: int, value: int) -> Callable[[Editable], None]:
    return lambda head: head.tensors["d2t"].__setitem__(position, value)


FAULTS: list[tuple[Callable[[Editable], object], str, str]] = [
    (rename, "tensors", "norm.weight is missing: SGLang would leave it uninitialised"),
    (rename, "tensors", "decoder.norm.weight is unknown: SGLang would drop it"),
    (lambda head: head.tensors.pop("lm_head.weight"), "tensors", "lm_head.weight is missing"),
    (setting(intermediate_size=65), "tensors", "has shape (64, 192), config.json makes it (65, 192)"),
    (setting(fc_norm=True), "tensors", "fc_norm.0.weight is missing"),
    (bias, "tensors", "q_proj.bias is unknown: SGLang would drop it without a word; train without it"),
    (key_norm, "tensors", "k_norm.weight is unknown: SGLang would drop it without a word; train without it"),
    (setting(attention_bias=True), "attention", "attention_bias=true"),
    (absolute_ids, "d2t", "d2t holds target ids"),
    (absolute_ids_without_t2d, "d2t", "d2t holds target ids"),
    (unsorted_ids, "d2t", "does not ascend"),
    (offset(63, 4096), "d2t", "to 4159, outside 0 to 4095"),
    (offset(0, -1), "d2t", "from -1 to"),
    (lambda head: head.tensors.pop("d2t"), "d2t", "d2t is missing"),
    (lambda head: head.tensors.update(d2t=head.tensors["d2t"].int()), "d2t", "instead of int64"),
    (lambda head: head.tensors["t2d"].__setitem__(10, False), "t2d", "does not mark the 64 tokens"),
    (layer_ids([2, 4, 5]), "layer_ids", "[2, 4, 5] are not those of the training, [1, 3, 4] (those are inputs"),
    (layer_ids([1, 3, 5]), "layer_ids", "[1, 3, 5] are not those of the training, [1, 3, 4]; set"),
    (layer_ids([4, 3, 1]), "layer_ids", "do not ascend"),
    (layer_ids([1, 3, 7]), "layer_ids", "must lie between 0 and 6 for 8 layers"),
    (layer_ids(None), "layer_ids", "servers take a default of their own"),
    (without_rope, "rope", "lacks rope_theta"),
    (setting(rope_parameters={"rope_type": "default", "rope_theta": 5e5}), "rope", "is not that of the training"),
    (setting(rope_theta=5e5), "rope", "make them agree"),
    (setting(max_position_embeddings=2048), "context", "2048 is less than the target's 4096"),
    (in_float32, "dtype", "tensors are bfloat16, float32, the target is bfloat16"),
    (setting(dtype="float16"), "dtype", "config.json says float16"),
    (lambda head: head.config.pop("draft_vocab_size"), "draft_vocab_size", "set it to 64"),
    (setting(draft_vocab_size=5000), "draft_vocab_size", "exceeds the target's 4096 tokens"),
    (setting(hidden_size=256), "model", "hidden_size=256, this target needs 192"),
    (setting(num_attention_heads=5), "model", "num_attention_heads in config.json must divide hidden_size"),
    (setting(vocab_size=5000), "model", "vocab_size=5000, this target needs 4096"),
    (setting(architectures=["LlamaForCausalLM"]), "model", "this target needs ['LlamaForCausalLMEagle3']"),
    (setting(tie_word_embeddings=True), "model", "tie_word_embeddings=True"),
    (setting(num_hidden_layers=2), "model", "num_hidden_layers of config.json"),
    (lambda head: head.training["target"].update(weights_hash="other"), "target", "weights: the head was trained on"),
]


@pytest.mark.parametrize(("spoil", "check", "message"), FAULTS, ids=[f"{fault[1]}: {fault[2]}" for fault in FAULTS])
def test_a_planted_fault_is_found(
    spoil: Callable[[Editable], object], check: str, message: str, exported: Editable, facts: TargetFacts
) -> None:
    spoil(exported)
    exported.save()
    findings = run_checks(read_files(exported.path), facts)
    assert any(item.level == "error" and item.check == check and message in item.message for item in findings), findings
    with pytest.raises(InputError, match=f"head=HEAD must not be served: .*{check}: "):
        require_no_errors(findings, "HEAD")


def test_other_trainers_heads_pass_with_warnings(exported: Editable, facts: TargetFacts) -> None:
    exported.tensors["embed_tokens.weight"] = torch.zeros(4096, 192, dtype=torch.bfloat16)
    del exported.tensors["t2d"]
    exported.save()
    (exported.path / "training.json").unlink()
    findings = {finding.check: finding.level for finding in run_checks(read_files(exported.path), facts)}
    assert findings.pop("tensors") == findings.pop("layer_ids") == "warning"
    assert findings.pop("t2d") == findings.pop("target") == "skipped"
    assert set(findings.values()) == {"ok"}


def test_another_chat_template_is_a_warning(exported: Editable, facts: TargetFacts) -> None:
    served = replace(facts, fingerprint={**FINGERPRINT, "template_hash": "other"})
    [finding] = [item for item in run_checks(read_files(exported.path), served) if item.level != "ok"]
    assert (finding.check, finding.level) == ("target", "warning")
    assert "chat.template" in finding.message


def test_the_table_has_a_line_for_each_finding() -> None:
    lines = table([Finding("d2t", "ok", "fine"), Finding("layer_ids", "error", "wrong")]).splitlines()
    assert lines == ["ok       d2t        fine", "error    layer_ids  wrong"]


# --- accept length ---------------------------------------------------------------------------------------------------


@pytest.fixture
def make_judge(target: Target) -> Callable[..., Judge]:
    def make(**changes: object) -> Judge:
        settings = {
            "source": None, "limit": 2, "questions": ["What is a list?"], "min_accept_length": 1.0, "max_drop": 0.1,
        }  # fmt: skip
        chat = Chat(target.tokenizer, template=None, template_kwargs={}, date="2026-01-01", stop_ids=target.stop_ids)
        decoding = Decoding(steps=2, topk=1, draft_tokens=None, max_new_tokens=6, temperature=0.0, seed=0)
        return Judge(target=target, chat=chat, decoding=decoding, **settings | changes)

    return make


@pytest.fixture
def trained_on_tiny(target: Target, facts: TargetFacts) -> TrainedHead:
    return random_head(facts, target.fingerprint)


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
    later = check_head(read_files(head), judge)
    assert "min_accept_length is 3.5" in errors(later)["accept_length"]


def test_a_lower_accept_length_than_the_export_measured_is_an_error(
    trained_on_tiny: TrainedHead, make_judge: Callable[..., Judge], tmp_path: Path
) -> None:
    judge, head = make_judge(), tmp_path / "head"
    export_head(trained_on_tiny, head, versions={})
    assert errors(check_export(trained_on_tiny, head, judge)) == {}
    files = read_files(head)
    assert errors(check_head(files, judge)) == {}
    assert files.training is not None
    files.training["accept_length"]["accept_length"] *= 1.2
    assert "the export measured" in errors(check_head(files, judge))["accept_length"]
    files.training["accept_length"]["prompts_hash"] = "other prompts"
    assert errors(check_head(files, judge)) == {}


def test_without_the_target_an_export_says_what_it_skipped(trained_on_tiny: TrainedHead, tmp_path: Path) -> None:
    export_head(trained_on_tiny, tmp_path / "head", versions={})
    findings = check_export(trained_on_tiny, tmp_path / "head", "target.path=/gone does not exist")
    skipped = {item.check: item.message for item in findings if item.level == "skipped"}
    assert skipped == {"target": "the target was not at hand", "accept_length": "target.path=/gone does not exist"}


def test_facts_of_a_target_are_those_of_its_files(target: Target, facts: TargetFacts) -> None:
    assert target.embedding.dtype == torch.float32  # loaded so; stored and served in bfloat16
    assert target_facts(target, "m").config == facts.config
    assert target_facts(target, "m").dtype == "bfloat16"


def test_validation_prompts_are_the_prompt_parts_of_the_lowest_shares(store_path: Path) -> None:
    features = FeatureStore(store_path)
    samples = [features.read(ref) for ref in features.samples]
    samples = sorted(
        (sample for sample in samples if sample.turns[0] == 0), key=lambda sample: share_of_prompt(sample.id)
    )
    expected = [sample.input_ids[: sample.turns.tolist().index(1)].tolist() for sample in samples]
    below = sum(share_of_prompt(sample.id) < 0.5 for sample in samples)
    store = {"path": str(store_path), "hash": features.fingerprint, "val_fraction": 0.5}
    assert validation_prompts(store, limit=3, max_length=99).prompts == expected[:3]
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


def test_export_writes_the_best_head_of_a_run_without_its_target(trained_on_tiny: TrainedHead, tmp_path: Path) -> None:
    facts = trained_on_tiny.facts
    facts["origin"]["target"] = {**FINGERPRINT, "name": "./gone/target", "revision": None}
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    weights = torch.nn.ModuleDict({"head": trained_on_tiny.head}).state_dict()
    torch.save({"state_dict": weights, "eagle3": facts}, tmp_path / "run/checkpoints/best.ckpt")
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
    assert result["accept_length"] == pytest.approx(1 + sum(result["per_depth"]))
    assert 1 <= result["accept_length_kept"] <= result["accept_length"]
    assert len(result["per_depth"]) == 2


def test_check_exits_with_status_1_and_the_reason(
    trained_on_tiny: TrainedHead, tiny_path: Path, tmp_path: Path
) -> None:
    export_head(trained_on_tiny, tmp_path / "head", versions={})
    head = Editable(tmp_path / "head")
    absolute_ids(head)
    head.save()
    done = serve("action=check", f"target.path={tiny_path}", "head=head", cwd=tmp_path)
    assert done.returncode == 1
    assert "error    d2t" in done.stdout
    assert done.stderr.splitlines()[-1].startswith("error: head=head must not be served: d2t: d2t holds target ids")
