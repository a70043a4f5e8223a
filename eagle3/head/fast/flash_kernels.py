"""Kernels that attend over many segments in one call, without a score matrix, and return the log-sum-exp.

Two builds of FlashAttention-2: the copy inside PyTorch, and the flash-attn package. Both need CUDA, compute capability
8.0 or more, float16 or bfloat16, and C a multiple of 8 up to 256. Our kernel, faster on Hopper, is in triton_flash.py.

Shapes: fast/__init__.py, but that R are any queries.
"""

from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from eagle3.head.segments import Segments

Gradients = tuple[Float[Tensor, "R Q C"], Float[Tensor, "T G C"], Float[Tensor, "T G C"]]


@runtime_checkable
class VarlenKernel(Protocol):
    """FlashAttention-2 (arXiv:2307.08691) of segments; query head q reads key/value head q // P."""

    def forward(
        self, query: Float[Tensor, "R Q C"], key: Float[Tensor, "T G C"], value: Float[Tensor, "T G C"], where: Segments
    ) -> tuple[Float[Tensor, "R Q C"], Float[Tensor, "Q R"]]:
        """Return softmax(query · keyᵀ / √C) · value, and the log-sum-exp of the scores in float32 or wider.

        Queries of a segment without keys have finite outputs, and -inf for the log-sum-exp."""

    def backward(
        self,
        grad_output: Float[Tensor, "R Q C"],
        query: Float[Tensor, "R Q C"],
        key: Float[Tensor, "T G C"],
        value: Float[Tensor, "T G C"],
        output: Float[Tensor, "R Q C"],
        logsumexp: Float[Tensor, "Q R"],
        where: Segments,
    ) -> Gradients:
        """Return the gradients of query, key and value in new tensors; zero for keys that no query reads."""


class TorchFlash:
    """PyTorch's own copy; signatures as in PyTorch 2.9 to 2.13."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, where: Segments) -> tuple[Tensor, Tensor]:
        output, logsumexp, *_ = torch.ops.aten._flash_attention_forward(
            query, key, value, *_bounds(where), 0.0, where.causal, return_debug_mask=False
        )
        return output, _without_keys(logsumexp)

    def backward(
        self,
        grad_output: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
        logsumexp: Tensor,
        where: Segments,
    ) -> Gradients:
        random_state = torch.empty(2, dtype=torch.uint64, device=query.device)  # not read: there is no dropout
        inputs = (grad_output, query, key, value, output, logsumexp)
        return torch.ops.aten._flash_attention_backward(
            *inputs, *_bounds(where), 0.0, where.causal, random_state, random_state
        )


class FlashAttnPackage:
    """The flash-attn package, 2.7 and 2.8."""

    def __init__(self) -> None:
        from flash_attn import flash_attn_interface

        self.interface = flash_attn_interface

    def forward(self, query: Tensor, key: Tensor, value: Tensor, where: Segments) -> tuple[Tensor, Tensor]:
        output, logsumexp, *_ = self.interface._flash_attn_varlen_forward(
            query,
            key,
            value,
            *_bounds(where),
            dropout_p=0.0,
            softmax_scale=query.shape[-1] ** -0.5,
            causal=where.causal,
        )
        return output, _without_keys(logsumexp)

    def backward(
        self,
        grad_output: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
        logsumexp: Tensor,
        where: Segments,
    ) -> Gradients:
        grads = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        inputs = (grad_output, query, key, value, output, logsumexp)
        self.interface._flash_attn_varlen_backward(
            *inputs,
            *grads,
            *_bounds(where),
            dropout_p=0.0,
            softmax_scale=query.shape[-1] ** -0.5,
            causal=where.causal,
            window_size_left=-1,
            window_size_right=-1,
            softcap=0.0,
            alibi_slopes=None,
            deterministic=False,
        )
        return grads


def _without_keys(logsumexp: Float[Tensor, "Q R"]) -> Float[Tensor, "Q R"]:
    """Return -inf where FlashAttention-2 has +inf: at queries of segments without keys."""
    return logsumexp.masked_fill_(logsumexp == torch.inf, -torch.inf)


def _bounds(where: Segments) -> tuple[Tensor, Tensor, int, int]:
    # If no segment has two queries, FlashAttention-2 takes a path for decoding, which needs exactly one in each.
    return where.query_bounds, where.key_bounds, max(where.most_queries, 2), where.most_keys
