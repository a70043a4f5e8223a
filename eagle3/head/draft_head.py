"""The EAGLE-3 draft head, with the names and the arithmetic of SGLang's LlamaForCausalLMEagle3.

The caller owns attention (a training unroll, a decoding cache), so the head offers the parts around it:

    hidden = head.fuse(aux_hidden_states)              # the target's captured layers, once per position
    x = head.attention_input(embed, hidden)            # embed: the *next* token's, unscaled, from the target
    query, (key, value) = head.queries(x, positions), head.keys_values(x, positions)
    hidden = head.output(hidden, attended)             # un-normed; logits(hidden) predicts the token after the next
    hidden = head.feedback(hidden)                     # the next step takes it instead of the fused state

Shapes: any leading dimensions R; A captured layers, H hidden size, Q query heads, G key/value heads, C channels of a
head, D draft vocabulary; AH = A · H, HH = 2 · H.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers import LlamaConfig

from eagle3.adapters.transformers import LlamaRotaryEmbedding
from eagle3.errors import InputError
from eagle3.head.head import Head, HeadSizes, RMSNorm


@dataclass(frozen=True, kw_only=True)
class HeadConfig(HeadSizes):
    """Every setting of the head's shape and arithmetic."""

    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_parameters: dict[str, Any]
    max_position_embeddings: int
    fc_norm: bool = False
    norm_before_fc: bool = False
    norm_output: bool = False
    norm_before_residual: bool = False  # of vLLM's speculators: the layer adds to its normed state; is not trained here

    def __post_init__(self) -> None:
        for name in ("num_heads", "num_kv_heads", "head_dim", "intermediate_size"):
            if getattr(self, name) < 1:
                raise InputError(f"model.{name}={getattr(self, name)} must be 1 or more; null takes the target's")
        if self.hidden_size % self.num_heads:  # whatever head_dim is, transformers' LlamaConfig refuses it
            raise InputError(
                f"model.num_heads={self.num_heads} does not divide the target's hidden size of {self.hidden_size}, "
                f"so that servers would not load the head; pick a divisor, or null"
            )
        if self.num_heads % self.num_kv_heads:
            raise InputError(
                f"model.num_kv_heads={self.num_kv_heads} does not divide model.num_heads={self.num_heads}; "
                f"pick a divisor, e.g. model.num_kv_heads=1"
            )
        if self.fc_norm and self.norm_before_fc:
            raise InputError(
                "model.norm_before_fc=true and model.fc_norm=true would norm captured layers twice; set one to false"
            )
        if self.head_dim % 2:
            raise InputError(
                f"model.head_dim={self.head_dim} is odd; RoPE needs an even number, e.g. model.head_dim=64"
            )


class MLP(nn.Module):
    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Float[Tensor, "*R H"]) -> Float[Tensor, "*R H"]:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class AttentionProjections(nn.Module):
    """Projections without bias and without q/k norms: SGLang silently ignores both."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        wide = 2 * config.hidden_size
        self.q_proj = nn.Linear(wide, config.num_heads * config.head_dim, bias=False)
        self.k_proj = nn.Linear(wide, config.num_kv_heads * config.head_dim, bias=False)
        self.v_proj = nn.Linear(wide, config.num_kv_heads * config.head_dim, bias=False)
        self.o_proj = nn.Linear(config.num_heads * config.head_dim, config.hidden_size, bias=False)


class DraftLayer(nn.Module):
    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = AttentionProjections(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)


class WithoutValues(TorchFunctionMode):
    """Builds heads whose weights are loaded next: to draw values for those of an 8B takes three seconds."""

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        return given["tensor"] if function is nn.init.kaiming_uniform_ else function(*args, **given)


class DraftHead(Head):
    kind = "eagle3"
    config: HeadConfig

    def __init__(self, config: HeadConfig, draft_ids: Int[Tensor, " D"]) -> None:
        super().__init__(config, draft_ids)
        hidden = config.hidden_size
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(
                RMSNorm(hidden, config.rms_norm_eps) for _ in range(config.num_captured_layers)
            )
        if config.norm_before_fc:
            self.input_norm = RMSNorm(config.num_captured_layers * hidden, config.rms_norm_eps)
        self.fc = nn.Linear(config.num_captured_layers * hidden, hidden, bias=False)
        self.midlayer = DraftLayer(config)
        self.norm = RMSNorm(hidden, config.rms_norm_eps)
        self.lm_head = nn.Linear(hidden, config.draft_vocab_size, bias=False)
        self.rotary = LlamaRotaryEmbedding(
            LlamaConfig(
                hidden_size=hidden,
                num_attention_heads=config.num_heads,
                head_dim=config.head_dim,
                max_position_embeddings=config.max_position_embeddings,
                rope_parameters=dict(config.rope_parameters),
            )
        )

    def fuse(self, aux_hidden_states: Float[Tensor, "*R AH"]) -> Float[Tensor, "*R H"]:
        aux = aux_hidden_states.to(self.fc.weight.dtype)
        if norms := self.norms_of_aux():
            parts = aux.chunk(len(norms), dim=-1)
            aux = torch.cat([norm(part) for norm, part in zip(norms, parts, strict=True)], dim=-1)
        return self.fc(aux)

    def norms_of_aux(self) -> list[RMSNorm]:
        """Return the norms before `fc`, each for an equal part of its input: one per layer, one for all, or none."""
        if self.config.norm_before_fc:
            return [self.input_norm]
        return cast("list[RMSNorm]", list(self.fc_norm)) if self.config.fc_norm else []

    def attention_input(self, embed: Float[Tensor, "*R H"], hidden: Float[Tensor, "*R H"]) -> Float[Tensor, "*R HH"]:
        layer = self.midlayer
        return torch.cat([layer.input_layernorm(embed.to(hidden.dtype)), layer.hidden_norm(hidden)], dim=-1)

    def queries(self, x: Float[Tensor, "R HH"], positions: Int[Tensor, " R"]) -> Float[Tensor, "R Q C"]:
        return self._rotated(self.midlayer.self_attn.q_proj(x), positions)

    def keys_values(
        self, x: Float[Tensor, "R HH"], positions: Int[Tensor, " R"]
    ) -> tuple[Float[Tensor, "R G C"], Float[Tensor, "R G C"]]:
        attention = self.midlayer.self_attn
        value = attention.v_proj(x).unflatten(-1, (-1, self.config.head_dim))
        return self._rotated(attention.k_proj(x), positions), value

    def output(self, hidden: Float[Tensor, "R H"], attended: Float[Tensor, "R Q C"]) -> Float[Tensor, "R H"]:
        """Return the layer's output before the final norm, from its input state and the result of attention."""
        residual = self.midlayer.hidden_norm(hidden) if self.config.norm_before_residual else hidden
        hidden = residual + self.midlayer.self_attn.o_proj(attended.flatten(-2))
        return hidden + self.midlayer.mlp(self.midlayer.post_attention_layernorm(hidden))

    def feedback(self, hidden: Float[Tensor, "*R H"]) -> Float[Tensor, "*R H"]:
        return self.norm(hidden) if self.config.norm_output else hidden

    def _rotated(self, projected: Tensor, positions: Int[Tensor, " R"]) -> Float[Tensor, "R heads C"]:
        heads = projected.unflatten(-1, (-1, self.config.head_dim))
        cos, sin = self.rotary(heads, positions[None])
        first, second = heads.chunk(2, dim=-1)
        return heads * cos[0][:, None] + torch.cat([-second, first], dim=-1) * sin[0][:, None]


def own_layer(head: Head) -> str | None:
    """Say why the fused kernels, which compute `DraftHead`, do not compute this subclass of it; None if they do."""
    if isinstance(head, DraftHead) and type(head) is not DraftHead:
        return f"computes EAGLE-3's layer, not that of {type(head).__name__}"
    return None
