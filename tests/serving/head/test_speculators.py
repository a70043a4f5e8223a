"""The layout of vLLM's speculators: a head is read back as it was written, by this project and by the speculators."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from exported_head import FINGERPRINT, IDS, LAYERS, errors, random_head, record_of, tiny_facts, tiny_target, with_record
from safetensors.torch import load_file, save_file
from stores import TARGET_CONFIG
from transformers import LlamaConfig

from eagle3.engine.draft import Draft
from eagle3.errors import InputError
from eagle3.head.draft_head import DraftHead
from eagle3.head.eagle3 import EAGLE3
from eagle3.head_files.format import is_exported_head, load_head, save_head
from eagle3.head_files.record import write_record
from eagle3.serving.check.export import check_export, check_reload
from eagle3.serving.head.export import TrainedHead, export_head
from eagle3.serving.head.speculators import require_in_layout, save_speculators

OPTIONS: dict[str, dict[str, Any]] = {
    "EAGLE-3": {},
    "EAGLE-3.1": {"fc_norm": True, "norm_output": True},
    "norm_before_fc": {"norm_before_fc": True},
    "four layers": {"num_captured_layers": 4},
    "a rope of Llama 3": {
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
        }
    },
}  # fmt: skip
DRAFT = Draft(head="heads/first", steps=5, topk=1, draft_tokens=None)
# The keys of config.json when speculators 0.9.0 saves a head; auto_map and transformers_version come from transformers.
SAVED_BY_SPECULATORS = {
    "architectures", "auto_map", "draft_vocab_size", "dtype", "eagle_aux_hidden_state_layer_ids", "embed_requires_grad",
    "fc_norm", "norm_before_fc", "norm_before_residual", "norm_output", "speculators_config", "speculators_model_type",
    "speculators_version", "target_hidden_size", "transformer_layer_config", "transformers_version",
}  # fmt: skip


@pytest.fixture(params=OPTIONS)
def saved(
    request: pytest.FixtureRequest, make_head: Callable[..., DraftHead], tmp_path: Path
) -> tuple[DraftHead, Path]:
    """A head and the folder that it was written into."""
    head = make_head(**OPTIONS[request.param]).float()
    layers = [1, *LAYERS] if head.config.num_captured_layers == 4 else LAYERS
    save_speculators(tmp_path, head, layers, "float32", target="org/target", steps=5)
    return head, tmp_path


def stated(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def test_a_head_is_read_as_it_was_written(saved: tuple[DraftHead, Path]) -> None:
    head, folder = saved
    loaded = load_head(folder)
    assert loaded.head.config == head.config
    torch.testing.assert_close(loaded.head.state_dict(), head.state_dict(), rtol=0, atol=0)
    assert loaded.capture_layers == stated(folder)["eagle_aux_hidden_state_layer_ids"]


def test_the_keys_are_those_that_vllm_asks_for_and_that_speculators_writes_too(saved: tuple[DraftHead, Path]) -> None:
    config = stated(saved[1])
    # get_config_parser in vLLM's transformers_utils/config.py knows the layout by these two.
    assert "model_type" not in config and "speculators_config" in config
    assert config.keys() <= SAVED_BY_SPECULATORS
    assert config["speculators_model_type"] == config["speculators_config"]["algorithm"] == "eagle3"
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 5
    assert config["speculators_config"]["verifier"]["name_or_path"] == "org/target"
    assert config["norm_before_residual"] is False  # it takes true where the key is missing
    assert config["transformer_layer_config"]["model_type"] == "llama"
    assert (
        len(config["eagle_aux_hidden_state_layer_ids"]) * 16
        == load_file(saved[1] / "model.safetensors")["fc.weight"].shape[1]
    )


def test_tensors_go_by_the_speculators_names(saved: tuple[DraftHead, Path]) -> None:
    head, folder = saved
    tensors = load_file(folder / "model.safetensors")
    assert "layers.0.self_attn.q_proj.weight" in tensors and not any(name.startswith("midlayer") for name in tensors)
    assert torch.equal(tensors["d2t"] + torch.arange(30), head.draft_ids)
    assert "embed_tokens.weight" not in tensors  # both take the target's


@pytest.mark.parametrize("layout", ["sglang", "speculators"])
def test_a_whole_vocabulary_has_no_map_since_vllm_stops_at_one(
    layout: str, make_head: Callable[..., DraftHead], tmp_path: Path
) -> None:
    head = make_head(draft_vocab_size=50).float()
    if layout == "speculators":
        save_speculators(tmp_path, head, LAYERS, "float32", target="org/target", steps=5)
    else:
        save_head(tmp_path, head, LAYERS, "float32")
    assert not {"d2t", "t2d"} & load_file(tmp_path / "model.safetensors").keys()
    assert torch.equal(load_head(tmp_path).head.draft_ids, head.draft_ids)


def test_a_target_on_this_disk_is_not_named(make_head: Callable[..., DraftHead], tmp_path: Path) -> None:
    save_speculators(tmp_path, make_head(), LAYERS, "float32", target="/disk/of/anna/model", steps=5)
    assert stated(tmp_path)["speculators_config"]["verifier"]["name_or_path"] is None
    assert "anna" not in (tmp_path / "config.json").read_text()


@pytest.mark.parametrize(
    ("kind", "draft", "message"),
    [
        ("two_layers", DRAFT, r"format=speculators: vLLM reads no heads of kind two_layers in this layout; export it"),
        (
            "eagle3",
            replace(DRAFT, topk=4, draft_tokens=16),
            r"topk=4 with format=speculators: .* set topk=1, or export",
        ),
    ],
)
def test_what_the_layout_cannot_say_is_refused(kind: str, draft: Draft, message: str) -> None:
    with pytest.raises(InputError, match=message):
        require_in_layout(kind, draft)


# --- as an export ----------------------------------------------------------------------------------------------------


@pytest.fixture
def trained(make_head: Callable[..., DraftHead]) -> TrainedHead:
    head = make_head().float()
    return TrainedHead(head, record_of(head, FINGERPRINT), replace(TARGET_CONFIG, dtype="bfloat16"))


def test_an_export_takes_the_place_of_one_in_either_format(trained: TrainedHead, tmp_path: Path) -> None:
    for tokens in (3, None, 3, 5):
        export_head(trained, tmp_path / "head", versions={}, speculative_tokens=tokens)
        assert is_exported_head(tmp_path / "head") and check_reload(trained, tmp_path / "head").level == "ok"
        assert ("speculators_config" in stated(tmp_path / "head")) is (tokens is not None)


def test_an_export_passes_the_checks_of_what_vllm_reads(tmp_path: Path) -> None:
    head = random_head(tiny_facts(tiny_target()), FINGERPRINT, fc_norm=True)
    trained = with_record(head, capture_layers=[1, 3, 6])  # not SGLang's default
    export_head(trained, tmp_path / "head", versions={}, speculative_tokens=3)
    findings = check_export(trained, tmp_path / "head", "no target here")
    assert {finding.level for finding in findings} == {"ok", "skipped"}
    spoilt = with_record(trained, capture_layers=[2, 4, 7])
    export_head(spoilt, tmp_path / "head", versions={}, speculative_tokens=3)
    config = stated(tmp_path / "head")
    (tmp_path / "head/config.json").write_text(json.dumps(config | {IDS: [1, 3, 6]}))
    write_record(tmp_path / "head", spoilt.record)
    found = errors(check_export(spoilt, tmp_path / "head", "no target here"))
    assert f"{IDS}=[1, 3, 6] are not those of the training; set it to [2, 4, 7]: vLLM counts inputs" in found.values()


# --- by the speculators' own code ------------------------------------------------------------------------------------

NEEDS = "needs speculators and its imports without their requirements: SPECULATORS in the Makefile"


def test_speculators_writes_the_head_back_with_the_same_keys_and_values(
    saved: tuple[DraftHead, Path], tmp_path_factory: pytest.TempPathFactory
) -> None:
    speculators = pytest.importorskip("speculators", reason=NEEDS)
    ours, folder = stated(saved[1]), tmp_path_factory.mktemp("theirs")
    config = speculators.SpeculatorModelConfig.from_pretrained(saved[1])
    config.save_pretrained(folder)
    assert stated(folder).keys() == SAVED_BY_SPECULATORS
    assert contained(ours, config.to_dict() | {"dtype": stated(folder)["dtype"]})


def contained(given: Any, whole: Any) -> bool:
    """Whether `whole` has all values of `given`; speculators adds defaults to objects."""
    if isinstance(given, dict):
        return all(key in whole and contained(value, whole[key]) for key, value in given.items())
    if isinstance(given, list):
        return len(given) == len(whole) and all(map(contained, given, whole))
    return given == whole


def save_verifier(folder: Path, embedding: torch.Tensor) -> None:
    """What the speculators read of a target: its sizes, embedding, final norm and lm_head."""
    vocab_size, hidden_size = embedding.shape
    LlamaConfig(
        vocab_size=vocab_size, hidden_size=hidden_size, num_hidden_layers=8, num_attention_heads=4
    ).save_pretrained(folder)
    weights = {"model.embed_tokens.weight": embedding, "model.norm.weight": torch.ones(hidden_size)}
    save_file(weights | {"lm_head.weight": torch.zeros_like(embedding)}, folder / "model.safetensors")


@pytest.fixture
def theirs(saved: tuple[DraftHead, Path], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The head as the speculators load it, beside a target of random embeddings."""
    pytest.importorskip("speculators", reason=NEEDS)
    from speculators import SpeculatorModel, SpeculatorModelConfig

    folder, target = saved[1], tmp_path_factory.mktemp("target")
    save_verifier(target, torch.randn(50, 16, generator=torch.Generator().manual_seed(0)))
    config = stated(folder)
    config["speculators_config"]["verifier"]["name_or_path"] = str(target)  # theirs loads it, and by name from the Hub
    (folder / "config.json").write_text(json.dumps(config))
    settings = SpeculatorModelConfig.from_pretrained(folder)
    settings.transformer_layer_config._attn_implementation = "eager"  # flex attention is for GPUs
    return SpeculatorModel.from_pretrained(folder, config=settings).eval()


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")  # their call of transformers
@torch.no_grad()
def test_the_speculators_draft_with_the_same_logits(saved: tuple[DraftHead, Path], theirs: Any) -> None:
    """Two steps of their Eagle3DraftModel on random features: every tensor and option has a part in the second."""
    head, rows, generator = saved[0], 6, torch.Generator().manual_seed(1)
    aux = torch.randn(rows, head.fc.in_features, generator=generator)
    tokens = torch.randint(1, 50, (rows,), generator=generator)
    assert type(theirs).__name__ == "Eagle3DraftModel"
    assert torch.equal(theirs.t2d.nonzero().squeeze(1), head.draft_ids)
    seen: list[torch.Tensor] = []
    theirs.lm_head.register_forward_hook(lambda module, given, logits: seen.append(logits[0, -1:]))
    theirs(aux[None], tokens[None], torch.zeros(1, rows, dtype=torch.long), ttt_steps=2)

    cached = EAGLE3.cached(head, theirs.embed_tokens.weight, rows)
    first = cached.confirm(aux, tokens.tolist())
    second, _ = cached.step(first, torch.tensor([0]), cached.root())  # theirs pads the last row with token 0
    torch.testing.assert_close(torch.cat(seen), torch.cat([head.logits(first), head.logits(second)]))
