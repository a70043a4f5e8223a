"""The facts about a target that a head depends on, read from the target's text config."""

from dataclasses import dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor
from transformers import PretrainedConfig

from eagle3.errors import InputError
from eagle3.storage.records import Record

# The types that SGLang computes as transformers does, and what each reads besides rope_theta. What a target keeps there
# for other tokens (mrope_section: positions of images in three axes, which are one and the same in a text) is left out.
# So is attention_factor: SGLang takes its own from yarn's other settings.
ROPE_TYPES = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (
        *("factor", "original_max_position_embeddings", "beta_fast", "beta_slow"),
        *("mscale", "mscale_all_dim", "truncate"),
    ),
}


MAIN_LAYERS = ("full_attention", "main")  # whose RoPE a head has, where those of other layers differ


@dataclass(frozen=True, kw_only=True)
class LogitTransform(Record):
    """Turns `lm_head` times the last hidden state into the target's logits: a factor, then a soft cap.

    Neither changes which token comes first."""

    scale: float = 1.0
    soft_cap: float | None = None

    def __call__(self, product: Float[Tensor, "rows tokens"]) -> Float[Tensor, "rows tokens"]:
        if self.scale != 1:
            product = product * self.scale
        return product if self.soft_cap is None else (product / self.soft_cap).tanh() * self.soft_cap


PLAIN = LogitTransform()
SCALES = ("logit_scale", "logits_scaling", "lm_head_multiplier", "output_multiplier")
SOFT_CAPS = ("final_logit_softcapping", "logits_soft_cap", "softcap")


@dataclass(frozen=True, kw_only=True)
class TargetConfig(Record):
    """Dimensions and RoPE that a Llama-style draft layer inherits from the target; its dtype as served; its logit
    transform."""

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
    logit_transform: LogitTransform = PLAIN


def context_length(text_config: PretrainedConfig) -> int | None:
    """Return the most tokens that a target reads at once, None where its config does not say."""
    return getattr(text_config, "max_position_embeddings", None)


def layer_count(text_config: PretrainedConfig) -> int:
    """Return the number of decoder layers. LongCat-Flash counts the two attentions of each as num_hidden_layers."""
    return getattr(text_config, "num_layers", text_config.num_hidden_layers)


def require_sizes(config: PretrainedConfig, path: str) -> None:
    """Raise InputError for a text config without the numbers that the size of a head follows, as of a Mamba."""
    for key in ("num_attention_heads", "hidden_size", "num_hidden_layers", "max_position_embeddings"):
        if not isinstance(value := getattr(config, key, None), int):
            raise InputError(
                f"target.path={path}: {key}={value} in its config.json (model_type={config.model_type}) must be a "
                f"whole number, as the size of a head follows it; choose another target"
            )


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
        num_layers=layer_count(config),
        hidden_size=config.hidden_size,
        vocab_size=vocab_size,
        # Some families do not state it by this name (OPT, Falcon), others have experts alone (Qwen3.5 MoE).
        intermediate_size=getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=getattr(config, "rms_norm_eps", 1e-5),
        rope_parameters=rope,
        max_position_embeddings=int(config.max_position_embeddings * stretch),
        dtype=dtype,
    )


def plain_rope(config: PretrainedConfig) -> dict[str, Any]:
    """Return the target's RoPE of full-attention layers; types that SGLang's Llama may compute differently fall
    back to plain."""
    rope = dict(getattr(config, "rope_parameters", None) or {"rope_type": "default", "rope_theta": 10000.0})
    # Some families have one for each kind of layer, or none for one kind.
    of_layers = [each for each in (*map(rope.get, MAIN_LAYERS), *rope.values()) if isinstance(each, dict)]
    rope = of_layers[0] if of_layers and "rope_type" not in rope else rope
    kind = rope.get("rope_type", "default")
    kind = kind if kind in ROPE_TYPES else "default"
    # The head rotates all channels, so a partial_rotary_factor is left out, too.
    read = {key: rope.get(key) for key in ("rope_theta", *ROPE_TYPES[kind])}
    return {"rope_type": kind, **{key: value for key, value in read.items() if value is not None}}


def logit_transforms(config: PretrainedConfig) -> list[LogitTransform]:
    """Return what the config may mean, the plain product first: HyperCLOVA X multiplies by what Granite divides by."""
    stated = {key: getattr(config, key, None) for key in (*SCALES, *SOFT_CAPS)}
    numbers = {key: float(value) for key, value in stated.items() if isinstance(value, int | float) and value > 0}
    factors = {factor for key in SCALES if key in numbers for factor in (numbers[key], 1 / numbers[key])} - {1.0}
    caps = sorted({numbers[key] for key in SOFT_CAPS if key in numbers})
    return [LogitTransform(scale=scale, soft_cap=cap) for scale in (1.0, *sorted(factors)) for cap in (None, *caps)]


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
