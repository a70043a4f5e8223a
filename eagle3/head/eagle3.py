"""EAGLE-3 (arXiv:2503.01840) and EAGLE-3.1 (arXiv:2605.09992): how a head trains, decodes and reads config.json.

Shapes: R anchors, H hidden size, V target and D draft vocabulary.
"""

from typing import Any

from jaxtyping import Float, Int
from torch import Tensor

from eagle3.head.batch import TttBatch
from eagle3.head.draft_head import DraftHead, HeadConfig
from eagle3.head.kernels import KernelPlan
from eagle3.head.kind import Kind
from eagle3.head.kv_cache import CachedHead
from eagle3.head.unroll import unroll
from eagle3.target.facts import TargetConfig

# Of config.json, left out where they are off.
OPTIONS = ("fc_norm", "norm_before_fc", "norm_output", "norm_before_residual")


class Eagle3(Kind):
    """One Llama layer over fused captured states, trained by the training-time test. Also a base of other kinds."""

    config_type: type[HeadConfig] = HeadConfig

    def new_config(self, target: TargetConfig, **settings: Any) -> HeadConfig:
        """Set EAGLE-3.1's norms where they are missing or None."""
        norms = {"fc_norm": not settings.get("norm_before_fc"), "norm_output": True}
        missing = {key: value for key, value in norms.items() if settings.get(key) is None}
        return super().new_config(target, **settings | missing)

    def new_head(self, config: HeadConfig, draft_ids: Int[Tensor, " D"]) -> DraftHead:
        return DraftHead(config, draft_ids)

    def unroll(
        self, head: DraftHead, embedding: Float[Tensor, "V H"], batch: TttBatch, ttt_steps: int, kernels: KernelPlan
    ) -> list[Float[Tensor, "R H"]]:
        return unroll(head, embedding, batch, ttt_steps, kernels.attention, kernels.layer)

    def cached(
        self, head: DraftHead, embedding: Float[Tensor, "V H"], room: int, *, window: int | None = None
    ) -> CachedHead:
        return CachedHead(head, embedding, room, window=window)

    def to_json(self, config: HeadConfig) -> dict[str, Any]:
        rope = {"rope_type": "default", **config.rope_parameters}
        scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
        options: dict[str, Any] = {key: True for key in OPTIONS if getattr(config, key)}
        return {
            "model_type": "llama",
            "hidden_size": config.hidden_size,
            "intermediate_size": config.intermediate_size,
            "num_attention_heads": config.num_heads,
            "num_key_value_heads": config.num_kv_heads,
            "head_dim": config.head_dim,
            "num_hidden_layers": 1,
            "vocab_size": config.vocab_size,
            "draft_vocab_size": config.draft_vocab_size,
            "rms_norm_eps": config.rms_norm_eps,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": False,
            # The same twice: transformers 5 reads rope_parameters, servers on transformers 4 the other two.
            "rope_theta": rope["rope_theta"],
            "rope_scaling": None if rope["rope_type"] == "default" else scaling,
            "rope_parameters": rope,
            "max_position_embeddings": config.max_position_embeddings,
            **options,
        }

    def from_json(self, config: dict[str, Any]) -> HeadConfig:
        heads = config["num_attention_heads"]
        return self.config_type(
            num_captured_layers=config.get("num_aux_hidden_states") or 3,
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            num_heads=heads,
            num_kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            vocab_size=config["vocab_size"],
            draft_vocab_size=config.get("draft_vocab_size") or config["vocab_size"],
            rms_norm_eps=config["rms_norm_eps"],
            rope_parameters=read_rope(config) or {"rope_type": "default", "rope_theta": 10000.0},  # as servers assume
            max_position_embeddings=config["max_position_embeddings"],
            fc_norm=has_fc_norm(config),
            norm_before_fc=has_norm_before_fc(config),
            norm_output=bool(config.get("norm_output")),
            norm_before_residual=bool(config.get("norm_before_residual")),
        )


def has_fc_norm(config: dict[str, Any]) -> bool:
    """Say whether config.json asks for a norm of each captured layer, under either of SGLang's two names."""
    return bool(config.get("fc_norm") or config.get("use_aux_norm"))


def has_norm_before_fc(config: dict[str, Any]) -> bool:
    """Say whether config.json asks for one norm of all captured layers: `eagle_config`, where NVIDIA's heads say it,
    counts before the top level, where the speculators' do, as in SGLang."""
    stated = config | (config.get("eagle_config") or {})
    return bool(stated.get("norm_before_fc"))


def read_rope(config: dict[str, Any]) -> dict[str, Any] | None:
    """Return RoPE in transformers 5's notation: rope_parameters, else rope_theta and rope_scaling; None if absent."""
    rope = config.get("rope_parameters") or {}
    if not rope and config.get("rope_theta"):
        rope = {**(config.get("rope_scaling") or {}), "rope_theta": config["rope_theta"]}
    if "rope_theta" not in rope:
        return None
    kind = rope.get("rope_type", rope.get("type", "default"))
    return {"rope_type": kind} | {key: value for key, value in rope.items() if key not in ("type", "rope_type")}


class _Served(Eagle3):
    """The kind itself, which servers know; they know no other subclass of Eagle3."""

    name = "eagle3"
    architecture = "LlamaForCausalLMEagle3"
    sglang_algorithm = "EAGLE3"


EAGLE3 = _Served()
