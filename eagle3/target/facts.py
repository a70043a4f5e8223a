"""What a head must know of its target, read from the target's text config."""

from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig

from eagle3.storage import Record

ROPE_TYPES = ("default", "linear", "llama3", "yarn")  # those that SGLang computes as transformers does


@dataclass(frozen=True, kw_only=True)
class TargetConfig(Record):
    """Sizes and RoPE of a target, as a Llama layer beside it would have them; the dtype it is served in."""

    model_type: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_parameters: dict[str, Any]
    max_position_embeddings: int
    dtype: str | None


def target_config(config: PretrainedConfig, vocab_size: int, dtype: str | None) -> TargetConfig:
    """Read the facts of a target's text config; `vocab_size` is that of its `lm_head`."""
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
    return TargetConfig(
        model_type=config.model_type,
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        vocab_size=vocab_size,
        intermediate_size=config.intermediate_size,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=getattr(config, "rms_norm_eps", 1e-5),
        rope_parameters=rope,
        max_position_embeddings=int(config.max_position_embeddings * stretch),
        dtype=dtype,
    )


def plain_rope(config: PretrainedConfig) -> dict[str, Any]:
    """Return the target's RoPE of full-attention layers; a kind that SGLang's Llama may compute differently becomes
    plain."""
    rope = dict(getattr(config, "rope_parameters", None) or {"rope_type": "default", "rope_theta": 10000.0})
    rope = dict(rope.get("full_attention", rope))
    rope.pop("partial_rotary_factor", None)  # the head rotates all channels
    rope.pop("attention_factor", None)  # SGLang takes its own from yarn's other settings
    if rope.get("rope_type", "default") not in ROPE_TYPES:
        rope = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
    return {key: value for key, value in rope.items() if value is not None}


def context_factor(rope: dict[str, Any]) -> float:
    """Return by how much SGLang lengthens max_position_embeddings: get_context_length in its 0.5.17's
    hf_transformers/common.py."""
    factor = rope.get("factor")
    counts = "original_max_position_embeddings" not in rope and rope.get("rope_type") != "llama3"
    return factor if counts and isinstance(factor, int | float) and factor > 0 else 1


def rope_depends_on_length(config: PretrainedConfig) -> bool:
    """Tell whether the longest row of a batch sets how all rows encode positions: such rows must run one at a time."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]  # one for each kind of layer
    return any(rope.get("rope_type") in ("longrope", "dynamic") for rope in (parameters, *nested))
