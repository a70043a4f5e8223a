"""The keys of later steps, which a row alone reads: merged into what a flash kernel returned, by log-sum-exp.

Plain PyTorch, the reference of own_keys_kernel.py.

Shapes: R trained rows, S own steps so far, Q query heads, G key/value heads, C channels.
"""

import sys
from collections.abc import Sequence
from types import ModuleType

import torch
from jaxtyping import Float
from torch import Tensor

from eagle3.head.fast.kernel_choice import runs_triton


def choose_own_keys(device: torch.device, dtype: torch.dtype) -> ModuleType:
    """Triton's kernels where they run; else this module."""
    if runs_triton(device, dtype):
        from eagle3.head.fast import own_keys_kernel

        return own_keys_kernel
    return sys.modules[__name__]


def add_own_keys(
    output: Float[Tensor, "R Q C"],
    logsumexp: Float[Tensor, "Q R"],
    query: Float[Tensor, "R Q C"],
    keys: Sequence[Float[Tensor, "R G C"]],
    values: Sequence[Float[Tensor, "R G C"]],
) -> tuple[Float[Tensor, "R Q C"], Float[Tensor, "Q R"]]:
    """Output and log-sum-exp over what `output` was made from and each row's own keys."""
    scores = _scores(query, torch.stack(tuple(keys)), logsumexp.dtype)
    after = torch.logaddexp(logsumexp, scores.logsumexp(-1).flatten(1).T)
    weights, stacked = _weights(scores, after), torch.stack(tuple(values))
    added = torch.einsum("rgqs,srgc->rgqc", weights.to(stacked.dtype), stacked).flatten(1, 2)
    kept = output * (logsumexp - after).exp().T[..., None]
    return (kept + added).to(query.dtype), after.contiguous()


def own_keys_backward(
    grad_output: Float[Tensor, "R Q C"],
    output: Float[Tensor, "R Q C"],
    logsumexp: Float[Tensor, "Q R"],
    query: Float[Tensor, "R Q C"],
    keys: Sequence[Float[Tensor, "R G C"]],
    values: Sequence[Float[Tensor, "R G C"]],
    grad_query: Float[Tensor, "R Q C"],
) -> tuple[list[Float[Tensor, "R G C"]], list[Float[Tensor, "R G C"]]]:
    """The gradients of own keys and values; that of the query through them is added to `grad_query`.

    `output` and `logsumexp` are the merged ones.
    """
    stacked_keys, stacked_values = torch.stack(tuple(keys)), torch.stack(tuple(values))
    wide, narrow, groups = logsumexp.dtype, query.dtype, stacked_keys.shape[2]
    weights = _weights(_scores(query, stacked_keys, wide), logsumexp)
    mean = (grad_output.to(wide) * output).sum(-1).unflatten(1, (groups, -1))  # of the gradients of all weights
    query, grad_output = (x.unflatten(1, (groups, -1)) for x in (query, grad_output))
    grad_weights = torch.einsum("rgqc,srgc->rgqs", grad_output, stacked_values)
    grad_scores = (weights * (grad_weights - mean[..., None]) * query.shape[-1] ** -0.5).to(narrow)
    grad_query += torch.einsum("rgqs,srgc->rgqc", grad_scores, stacked_keys).flatten(1, 2)
    grad_keys = torch.einsum("rgqs,rgqc->srgc", grad_scores, query)
    grad_values = torch.einsum("rgqs,rgqc->srgc", weights.to(narrow), grad_output)
    return list(grad_keys.unbind()), list(grad_values.unbind())


def _scores(
    query: Float[Tensor, "R Q C"], keys: Float[Tensor, "S R G C"], wide: torch.dtype
) -> Float[Tensor, "R G Q/G S"]:
    scores = torch.einsum("rgqc,srgc->rgqs", query.unflatten(1, (keys.shape[2], -1)), keys)
    return scores.to(wide) * query.shape[-1] ** -0.5


def _weights(scores: Float[Tensor, "R G Q/G S"], logsumexp: Float[Tensor, "Q R"]) -> Float[Tensor, "R G Q/G S"]:
    return (scores - logsumexp.T.unflatten(1, (scores.shape[1], -1))[..., None]).exp()
