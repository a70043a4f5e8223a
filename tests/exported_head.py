"""An exported head of random weights for the bundled target, and its files to spoil: what tests of the checks share."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from stores import ASSETS
from transformers import AutoConfig

from eagle3.head.draft_head import DraftHead, HeadConfig
from eagle3.serving.check.finding import Finding, TargetFacts
from eagle3.serving.head.export import TrainedHead
from eagle3.storage import write_json
from eagle3.target.facts import head_facts
from eagle3.target.model import Target, load_target

LAYERS = [2, 4, 5]
FINGERPRINT = {"name": "tiny", "config_hash": "c", "tokenizer_hash": "t", "template_hash": "m", "weights_hash": "w"}
DRAFT_IDS = torch.cat([torch.arange(10, 42), torch.arange(100, 196, 3)])
IDS = "eagle_aux_hidden_state_layer_ids"


def tiny_target() -> Target:
    settings = {"revision": None, "dtype": "float32", "device": "cpu", "attention": None, "trust_remote_code": False}
    return load_target(path=str(ASSETS / "tiny"), **settings)


def tiny_facts(target: Target) -> TargetFacts:
    config = AutoConfig.from_pretrained(ASSETS / "tiny")
    facts = head_facts(config, config.vocab_size)
    return TargetFacts(config=facts, dtype="bfloat16", fingerprint=FINGERPRINT, embedding=target.embedding)


def random_head(
    facts: TargetFacts, fingerprint: dict, draft_ids: torch.Tensor = DRAFT_IDS, **changes: object
) -> TrainedHead:
    """A head that fits the tiny target."""
    settings = {key: facts.config[key] for key in HeadConfig.__dataclass_fields__ if key in facts.config}
    options = {
        "num_captured_layers": 3,
        "draft_vocab_size": len(draft_ids),
        "fc_norm": False,
        "norm_output": False,
        "intermediate_size": 64,
    }
    torch.manual_seed(0)
    head = DraftHead(HeadConfig(**settings | options | changes), draft_ids)
    origin = {
        "capture_layers": LAYERS,
        "target": fingerprint,
        "target_config": {**facts.config, "dtype": facts.dtype},
        "path": "/nowhere/features",
        "hash": "h",
        "val_fraction": 0.5,
    }
    stated = {
        "head_config": asdict(head.config),
        "ttt_steps": 7,
        "accept_length": {"val/served_accept_length_7": 1.0},
        "origin": origin,
    }
    return TrainedHead(Path("best.ckpt"), head, stated)


def with_simulated(trained: TrainedHead, **accept_lengths: float) -> TrainedHead:
    """`steps_3=1.5`: validation simulated that accept length at 3 steps."""
    values = {f"val/served_accept_length_{key.removeprefix('steps_')}": value for key, value in accept_lengths.items()}
    return replace(trained, facts=trained.facts | {"accept_length": values})


class Editable:
    """An exported head whose files can be spoilt."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config: dict[str, Any] = json.loads((path / "config.json").read_text())
        self.training: dict[str, Any] | None = json.loads((path / "training.json").read_text())
        self.tensors = load_file(path / "model.safetensors")

    def save(self) -> None:
        write_json(self.path / "config.json", self.config)
        save_file(self.tensors, self.path / "model.safetensors")
        if self.training is None:
            (self.path / "training.json").unlink(missing_ok=True)
        else:
            write_json(self.path / "training.json", self.training)


def in_another_order(head: Editable) -> None:
    """Draft ids and their rows of lm_head shuffled, as where a trainer sorts tokens by frequency."""
    size = len(head.tensors["d2t"])
    order = torch.randperm(size, generator=torch.Generator().manual_seed(0))
    head.tensors["d2t"] = (head.tensors["d2t"] + torch.arange(size))[order] - torch.arange(size)
    head.tensors["lm_head.weight"] = head.tensors["lm_head.weight"][order]


def as_specforge(head: Editable) -> None:
    """SpecForge's layout: no layer ids where they are the default, RoPE in the older keys, no head_dim, float16."""
    head.training = None
    for key in ("eagle_config", "rope_parameters", "dtype", "mlp_bias"):
        del head.config[key]
    head.config |= {"pad_token_id": 0, "use_cache": True, "transformers_version": "4.53.2"}


def as_speculators(head: Editable, embedding: torch.Tensor) -> None:
    """The layout of vLLM's speculators: the layer's keys nested, layers counted by their inputs, embeddings stored."""
    head.training = None
    config = head.config
    layer = {key: value for key, value in config.items() if key not in ("architectures", "draft_vocab_size", "dtype")}
    ids = [layer_id + 1 for layer_id in layer.pop("eagle_config")[IDS]]
    head.config = {
        "architectures": ["Eagle3Speculator"],
        "model_type": "speculator_model",
        "speculators_model_type": "eagle3",
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "some/tiny", "architectures": []}},
        "transformer_layer_config": layer | {"tie_word_embeddings": True},
        "draft_vocab_size": config["draft_vocab_size"],
        "dtype": config["dtype"],
        "norm_before_residual": False,
        "target_hidden_size": None,
        IDS: ids,
    }
    head.tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in head.tensors.items()}
    head.tensors["embed_tokens.weight"] = embedding.to(torch.bfloat16)


def errors(findings: list[Finding]) -> dict[str, str]:
    return {finding.check: finding.message for finding in findings if finding.level == "error"}
