"""A head that fits a target: sizes and RoPE from the target unless configured, draft vocabulary from the answers."""

import math
from typing import Any

import torch
from transformers import PretrainedConfig

from eagle3.errors import InputError
from eagle3.features.joined import Store
from eagle3.head.draft_head import DraftHead, HeadConfig
from eagle3.head.draft_vocab import most_frequent

ROPE_TYPES = ("default", "linear", "llama3", "yarn")  # those that SGLang computes as transformers does


def head_facts(config: PretrainedConfig, vocab_size: int) -> dict[str, Any]:
    """What a head needs to know of its target's text config, as plain values for the feature store's manifest."""
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    # Multi-head latent attention (DeepSeek) has no key/value heads of a plain size, and a Llama layer cannot have
    # heads that do not divide the hidden size (GLM-4.5-Air: 96 heads, 4096): heads of 128 channels in groups of 8.
    if getattr(config, "kv_lora_rank", None) is not None or config.hidden_size % heads:
        heads, head_dim = max(1, config.hidden_size // 128), 128
        kv_heads = heads // 8 if heads % 8 == 0 else heads
    rope = plain_rope(config)
    # What SGLang makes of the length is kept where the head's RoPE does not have the target's factor.
    stretch = max(1.0, context_factor(getattr(config, "rope_parameters", None) or {}) / context_factor(rope))
    return {
        "model_type": config.model_type,
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "vocab_size": vocab_size,
        "intermediate_size": config.intermediate_size,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": getattr(config, "rms_norm_eps", 1e-5),
        "rope_parameters": rope,
        "max_position_embeddings": int(config.max_position_embeddings * stretch),
    }


def plain_rope(config: PretrainedConfig) -> dict[str, Any]:
    """The target's RoPE of full-attention layers; a kind that SGLang's Llama may compute differently becomes plain."""
    rope = dict(getattr(config, "rope_parameters", None) or {"rope_type": "default", "rope_theta": 10000.0})
    rope = dict(rope.get("full_attention", rope))
    rope.pop("partial_rotary_factor", None)  # the head rotates all channels
    rope.pop("attention_factor", None)  # SGLang takes its own from yarn's other settings
    if rope.get("rope_type", "default") not in ROPE_TYPES:
        rope = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
    return {key: value for key, value in rope.items() if value is not None}


def context_factor(rope: dict[str, Any]) -> float:
    """By which SGLang lengthens max_position_embeddings: get_context_length of 0.5.17's hf_transformers/common.py."""
    factor = rope.get("factor")
    counts = "original_max_position_embeddings" not in rope and rope.get("rope_type") != "llama3"
    return factor if counts and isinstance(factor, int | float) and factor > 0 else 1


def build_head(
    *,
    store: Store,
    num_heads: int | None,
    num_kv_heads: int | None,
    head_dim: int | None,
    intermediate_size: int | None,
    rope_parameters: dict[str, Any] | None,
    draft_vocab_size: int | None,
    default_draft_vocab_size: int,
    lm_head_from_target: bool,
    fc_norm: bool,
    norm_output: bool,
) -> DraftHead:
    """A freshly initialised head; None takes the target's value."""
    facts = store.manifest["target_config"]
    rope_type = (rope_parameters or {}).get("rope_type", "default")
    if rope_type not in ROPE_TYPES:
        raise InputError(
            f"model.rope_parameters.rope_type={rope_type} is none of {', '.join(ROPE_TYPES)}, which SGLang computes"
        )
    draft_ids = most_frequent(store.answer_counts, draft_vocab_size, default_draft_vocab_size)
    chosen: dict[str, Any] = {
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "intermediate_size": intermediate_size,
        "rope_parameters": rope_parameters,
    }
    config = HeadConfig(
        hidden_size=facts["hidden_size"],
        vocab_size=facts["vocab_size"],
        draft_vocab_size=len(draft_ids),
        rms_norm_eps=facts["rms_norm_eps"],
        max_position_embeddings=facts["max_position_embeddings"],
        **{key: facts[key] if value is None else value for key, value in chosen.items()},
        fc_norm=fc_norm,
        norm_output=norm_output,
    )
    head = DraftHead(config, draft_ids)
    initialise(head, store, lm_head_from_target=lm_head_from_target)
    return head


def initialise(head: DraftHead, store: Store, *, lm_head_from_target: bool) -> None:
    """Normal weights of standard deviation 1/√(fan-in); lm_head from the target's rows saves it the first epochs."""
    for module in head.modules():
        if isinstance(module, torch.nn.Linear):
            torch.nn.init.normal_(module.weight, std=1 / math.sqrt(module.in_features))
    if lm_head_from_target:
        _, lm_head = store.target_weights()
        head.lm_head.weight.data.copy_(lm_head[head.draft_ids])
