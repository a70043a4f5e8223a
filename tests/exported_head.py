"""An exported head of random weights for the bundled target, and its files to spoil: what tests of the checks share."""

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from chats import SETTINGS
from safetensors.torch import load_file, save_file
from stores import ASSETS
from torch import nn
from transformers import AutoConfig

from eagle3.answers.chat import Chat
from eagle3.head.draft_head import DraftHead, HeadConfig
from eagle3.head_files.finding import Finding, TargetFacts
from eagle3.head_files.record import HeadRecord, MeasuredAcceptLength, Origin
from eagle3.serving.head.export import SIMULATED, TrainedHead, require_replaceable, write_head
from eagle3.settings.precomputing import ChatSettings
from eagle3.storage.files import sha256_file, write_json
from eagle3.storage.records import read_sealed_json, write_sealed_json
from eagle3.storage.replace import replacing
from eagle3.target.facts import TargetConfig, target_config
from eagle3.target.identity import TargetIdentity
from eagle3.target.model import Target, load_target
from eagle3.training.checkpoint import AtomicCheckpointIO

LAYERS = [2, 4, 5]
FINGERPRINT = TargetIdentity(
    name="tiny", revision=None, config_hash="c", tokenizer_hash="t", template_hash="m", weights_hash="w",
    precision="bfloat16",
)  # fmt: skip
DRAFT_IDS = torch.cat([torch.arange(10, 42), torch.arange(100, 196, 3)])
IDS = "eagle_aux_hidden_state_layer_ids"


@cache
def tiny_target() -> Target:
    """The bundled target, loaded once: tests do not change it."""
    return load_target(path=str(ASSETS / "tiny"), dtype="float32", device="cpu")


def tiny_chat(**changes: Any) -> Chat:
    """Its chat format."""
    target = tiny_target()
    return Chat(target.tokenizer, ChatSettings(**SETTINGS | changes), stop_ids=target.stop_ids)


def tiny_facts(target: Target) -> TargetFacts:
    config = AutoConfig.from_pretrained(ASSETS / "tiny")
    facts = target_config(config, config.vocab_size, "bfloat16")
    return TargetFacts(config=facts, dtype="bfloat16", identity=FINGERPRINT, embedding=target.embedding)


def random_head(
    facts: TargetFacts, fingerprint: TargetIdentity, draft_ids: torch.Tensor = DRAFT_IDS, **changes: object
) -> TrainedHead:
    """A head that fits the tiny target."""
    settings = {
        key: getattr(facts.config, key) for key in HeadConfig.__dataclass_fields__ if hasattr(facts.config, key)
    }
    options = {
        "num_captured_layers": 3,
        "draft_vocab_size": len(draft_ids),
        "fc_norm": False,
        "norm_output": False,
        "intermediate_size": 64,
    }
    torch.manual_seed(0)
    head = DraftHead(HeadConfig(**settings | options | changes), draft_ids)
    return TrainedHead(head, make_head_record(head, fingerprint, replace(facts.config, dtype=facts.dtype)))


def export_head(trained: TrainedHead, directory: Path, *, versions: dict[str, str]) -> None:
    """Write a head as `action=export` does, without its checks."""
    require_replaceable(directory)
    with replacing(directory) as new:
        write_head(trained, new, versions=versions)


def make_origin(target: TargetIdentity, target_config: TargetConfig, **changes: Any) -> Origin:
    store = {"path": "/nowhere/features", "hash": "h", "val_fraction": 0.5}
    facts: dict[str, Any] = {"target": target, "target_config": target_config, "capture_layers": LAYERS}
    return Origin(**facts | store | changes)


def make_head_record(head: DraftHead, target: TargetIdentity, target_config: TargetConfig) -> HeadRecord:
    return HeadRecord(
        format_version=HeadRecord.FORMAT_VERSION,
        kind=head.kind,
        ttt_steps=7,
        simulated_accept_length={7: 1.0},
        accept_length=None,
        origin=make_origin(target, target_config),
        checkpoint="/nowhere/best.ckpt",
        started_from={},
        versions={},
        files={},
    )


def measured(**changes: Any) -> MeasuredAcceptLength:
    """An accept length of 2 with a standard error of 0.04, by a chain of 2 on validation prompts, in float32."""
    result = MeasuredAcceptLength(
        accept_length=2.0,
        standard_error=0.04,
        accept_length_kept=2.0,
        per_depth=[0.6, 0.4],
        lossless=1.0,
        tokens=18,
        verifications=9,
        seconds=1.0,
        prompts=9,
        prompts_from="here",
        from_validation=True,
        prompts_hash="h",
        left_out={},
        dtype="float32",
        max_new_tokens=6,
        temperature=0.0,
        seed=0,
        steps=2,
        topk=1,
        draft_tokens=None,
    )
    return replace(result, **changes)


def with_record(head: Any, **changes: Any) -> Any:
    """A TrainedHead or HeadFiles with changes in its record."""
    return replace(head, record=replace(head.record, **changes))


def with_origin(head: Any, **changes: Any) -> Any:
    return with_record(head, origin=replace(head.record.origin, **changes))


def save_checkpoint(path: Path, trained: TrainedHead) -> Path:
    """As Lightning and HeadTraining write it."""
    record = trained.record
    simulated = {f"{SIMULATED}{steps}": value for steps, value in record.simulated_accept_length.items()}
    facts = {
        "format_version": 1,
        "kind": record.kind,
        "head_config": asdict(trained.head.config),
        "ttt_steps": record.ttt_steps,
        "settings": {},
        "accept_length": {"val/accept_length": 2.5, **simulated},
        "origin": asdict(record.origin),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    weights = nn.ModuleDict({"head": trained.head}).state_dict()
    AtomicCheckpointIO(copies=None).save_checkpoint({"state_dict": weights, "eagle3": facts, "global_step": 1}, path)
    return path


class Editable:
    """An exported head whose files can be spoilt."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config: dict[str, Any] = json.loads((path / "config.json").read_text())
        record = path / "training.json"
        self.training = read_sealed_json(record, made_by="") if record.exists() else None
        self.tensors = load_file(path / "model.safetensors")

    def save(self) -> None:
        write_json(self.path / "config.json", self.config)
        replace_file(self.tensors, self.path / "model.safetensors")
        if self.training is None:
            (self.path / "training.json").unlink(missing_ok=True)
        else:
            files = {name: sha256_file(self.path / name) for name in ("config.json", "model.safetensors")}
            write_sealed_json(self.path / "training.json", self.training | {"files": files})


def edit_json(path: Path, *unset: str, **changes: object) -> None:
    content = json.loads(path.read_text()) | changes
    write_json(path, {key: value for key, value in content.items() if key not in unset})


def edit_tensors(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(path)
    change(tensors)
    replace_file(tensors, path)


Change = Callable[[Editable], object]


def setting(**values: object) -> Change:
    return lambda head: head.config.update(values)


def added(name: str, *shape: int) -> Change:
    return lambda head: head.tensors.update({name: torch.ones(shape, dtype=torch.bfloat16)})


def replace_file(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Write a new file: safetensors < 0.8 writes into the old one, which tensors that were read from it still map."""
    path.unlink()
    save_file(tensors, path)


def name_layers(config: dict[str, Any], outputs: list[int], *, twice: bool = True) -> None:
    """Name outputs of layers in `eagle_config`, and their `hidden_states` indices at the top level unless not `twice`,
    as heads were written before and other trainers write them."""
    config["eagle_config"] = {"use_aux_hidden_state": True, IDS: outputs}
    config.pop(IDS, None)
    if twice:
        config[IDS] = [layer + 1 for layer in outputs]


def in_another_order(head: Editable) -> None:
    """Draft ids and their rows of lm_head shuffled, as where a trainer sorts tokens by frequency."""
    size = len(head.tensors["d2t"])
    order = torch.randperm(size, generator=torch.Generator().manual_seed(0))
    head.tensors["d2t"] = (head.tensors["d2t"] + torch.arange(size))[order] - torch.arange(size)
    head.tensors["lm_head.weight"] = head.tensors["lm_head.weight"][order]


def as_specforge(head: Editable) -> None:
    """SpecForge's layout: no layer ids where they are the default, RoPE in the older keys, no head_dim, float16."""
    head.training = None
    for key in ("eagle_config", IDS, "rope_parameters", "dtype", "mlp_bias"):
        del head.config[key]
    head.config |= {"pad_token_id": 0, "use_cache": True, "transformers_version": "4.53.2"}


def as_speculators(head: Editable, embedding: torch.Tensor) -> None:
    """The layout of vLLM's speculators: the layer's keys nested, layers counted by their inputs, embeddings stored."""
    head.training = None
    config = head.config
    elsewhere = ("architectures", "draft_vocab_size", "dtype", "eagle_config", IDS)
    layer = {key: value for key, value in config.items() if key not in elsewhere}
    head.config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "some/tiny", "architectures": []}},
        "transformer_layer_config": layer | {"tie_word_embeddings": True},
        "draft_vocab_size": config["draft_vocab_size"],
        "dtype": config["dtype"],
        "norm_before_residual": False,
        "target_hidden_size": None,
        IDS: config[IDS],
    }
    head.tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in head.tensors.items()}
    head.tensors["embed_tokens.weight"] = embedding.to(torch.bfloat16)


def errors(findings: list[Finding]) -> dict[str, str]:
    return {finding.check: finding.message for finding in findings if finding.level == "error"}
