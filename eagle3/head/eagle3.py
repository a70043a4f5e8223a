"""EAGLE-3 (arXiv:2503.01840) and EAGLE-3.1 (arXiv:2605.09992): how a head trains, decodes and reads config.json.

Shapes: R anchors, H hidden size, V target and D draft vocabulary.
"""

from typing import Any

from jaxtyping import Float, Int
from torch import Tensor

from eagle3.data.pack import Pack
from eagle3.head.batch import TttBatch, prepare_ttt
from eagle3.head.draft_head import DraftHead, HeadConfig
from eagle3.head.kernels import KernelPlan
from eagle3.head.kv_cache import CachedHead
from eagle3.head.unroll import unroll

OPTIONS = ("fc_norm", "norm_before_fc", "norm_output")  # of config.json, left out where they are off


class Eagle3:
    """One Llama layer over fused captured states, trained by the training-time test. The base class of other kinds.

    A kind is given only its own heads and batches, so its methods may name their types. Every head has a `config`,
    `draft_ids` [D], a final `norm` and an `lm_head`.
    """

    name: str = HeadConfig.KIND  # in checkpoints and exported heads
    architecture = "LlamaForCausalLMEagle3"  # in config.json of exported heads
    config_type: type[HeadConfig] = HeadConfig

    def new_head(self, config: HeadConfig, draft_ids: Int[Tensor, " D"]) -> DraftHead:
        """Make a head whose weights the caller sets."""
        return DraftHead(config, draft_ids)

    def prepare(self, pack: Pack, ttt_steps: int) -> TttBatch:
        """Derive the training batch from a pack; runs on the CPU, in several reader threads at once."""
        return prepare_ttt(pack, ttt_steps)

    def unroll(
        self, head: DraftHead, embedding: Float[Tensor, "V H"], batch: TttBatch, ttt_steps: int, kernels: KernelPlan
    ) -> list[Float[Tensor, "R H"]]:
        """Return the state of each step at the trained positions, which `norm` and `lm_head` turn into logits.

        A kind may ignore parts of `kernels`.
        """
        return unroll(head, embedding, batch, ttt_steps, kernels.attention, kernels.layer)

    def cached(
        self, head: DraftHead, embedding: Float[Tensor, "V H"], room: int, *, window: int | None = None
    ) -> CachedHead:
        """Start a decode of at most `room` confirmed rows."""
        return CachedHead(head, embedding, room, window=window)

    def to_json(self, config: HeadConfig) -> dict[str, Any]:
        """Return the content of config.json, except for the architecture, the dtype and the captured layers."""
        rope = {"rope_type": "default", **config.rope_parameters}
        scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
        options: dict[str, Any] = {key: True for key in OPTIONS if getattr(config, key)}
        if config.num_captured_layers != 3:
            options["num_aux_hidden_states"] = config.num_captured_layers
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
        """Read config.json; KeyError if something is missing."""
        heads = config["num_attention_heads"]
        return HeadConfig(
            num_captured_layers=config.get("num_aux_hidden_states") or 3,
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            num_heads=heads,
            num_kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            vocab_size=config["vocab_size"],
            draft_vocab_size=config.get("draft_vocab_size") or config["vocab_size"],
            rms_norm_eps=config["rms_norm_eps"],
            rope_parameters=rope_of(config) or {"rope_type": "default", "rope_theta": 10000.0},  # as servers assume
            max_position_embeddings=config["max_position_embeddings"],
            fc_norm=has_fc_norm(config),
            norm_before_fc=has_norm_before_fc(config),
            norm_output=bool(config.get("norm_output")),
        )


def has_fc_norm(config: dict[str, Any]) -> bool:
    """Say whether config.json asks for a norm of each captured layer, under either of SGLang's two names."""
    return bool(config.get("fc_norm") or config.get("use_aux_norm"))


def has_norm_before_fc(config: dict[str, Any]) -> bool:
    """Say whether config.json asks for one norm of all captured layers: `eagle_config`, where NVIDIA's heads say it,
    counts before the top level, where the speculators' do, as in SGLang."""
    stated = config | (config.get("eagle_config") or {})
    return bool(stated.get("norm_before_fc"))


def rope_of(config: dict[str, Any]) -> dict[str, Any] | None:
    """Return RoPE in transformers 5's notation: rope_parameters, else rope_theta and rope_scaling; None if absent."""
    rope = config.get("rope_parameters") or {}
    if not rope and config.get("rope_theta"):
        rope = {**(config.get("rope_scaling") or {}), "rope_theta": config["rope_theta"]}
    if "rope_theta" not in rope:
        return None
    kind = rope.get("rope_type", rope.get("type", "default"))
    return {"rope_type": kind} | {key: value for key, value in rope.items() if key not in ("type", "rope_type")}


EAGLE3 = Eagle3()
