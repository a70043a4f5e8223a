"""Merges the keys of a chain's later steps, which only their own anchor reads, into the output of a flash kernel.

Two parts of a softmax are combined by the log-sum-exp l of their scores (FlashAttention-2, arXiv:2307.08691,
section 2.3). With scores s_i = query · key_i / √C of the chain's S keys:

    l' = log(exp(l) + Σ exp(s_i))        output' = exp(l - l') · output + Σ exp(s_i - l') · value_i

Shapes: fast/__init__.py.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from eagle3.head.fast.varlen_kernel import LogSumExp, OfQueries

Chain = Sequence[Float[Tensor, "R G C"]]  # keys or values of a chain's steps
ChainGradients = tuple[list[Float[Tensor, "R G C"]], list[Float[Tensor, "R G C"]]]


class ChainKeys:
    """The reference, in plain PyTorch. `TritonChainKeys` overrides both methods on a GPU."""

    def merge(
        self, output: OfQueries, logsumexp: LogSumExp, query: OfQueries, keys: Chain, values: Chain
    ) -> tuple[OfQueries, LogSumExp]:
        """Return output and log-sum-exp of `output` merged with each anchor's chain."""
        scores = _scores(query, torch.stack(tuple(keys)), logsumexp.dtype)
        merged = torch.logaddexp(logsumexp, scores.logsumexp(-1).flatten(1).T)  # (Q, R)
        weights, stacked = _weights(scores, merged), torch.stack(tuple(values))
        added = torch.einsum("rgps,srgc->rgpc", weights.to(stacked.dtype), stacked).flatten(1, 2)  # (R, Q, C)
        kept = output * (logsumexp - merged).exp().T[..., None]
        return (kept + added).to(query.dtype), merged.contiguous()

    def backward(
        self,
        grad_output: OfQueries,
        output: OfQueries,
        logsumexp: LogSumExp,
        query: OfQueries,
        keys: Chain,
        values: Chain,
        grad_query: OfQueries,
    ) -> ChainGradients:
        """Return the gradients of keys and values; that of the query through them is added to `grad_query`.

        `output` and `logsumexp` are the merged ones: with weight p = exp(s - l') and mean m = grad_output · output',
        ds = p · (grad_output · value - m) / √C, dkey = ds · query, dquery = Σ ds_i · key_i, dvalue = p · grad_output.
        """
        stacked_keys, stacked_values = torch.stack(tuple(keys)), torch.stack(tuple(values))  # (S, R, G, C)
        wide, narrow, groups = logsumexp.dtype, query.dtype, stacked_keys.shape[2]
        weights = _weights(_scores(query, stacked_keys, wide), logsumexp)
        mean = (grad_output.to(wide) * output).sum(-1).unflatten(1, (groups, -1))  # (R, G, P)
        query, grad_output = (x.unflatten(1, (groups, -1)) for x in (query, grad_output))  # (R, G, P, C)
        grad_weights = torch.einsum("rgpc,srgc->rgps", grad_output, stacked_values)
        grad_scores = (weights * (grad_weights - mean[..., None]) * query.shape[-1] ** -0.5).to(narrow)
        grad_query += torch.einsum("rgps,srgc->rgpc", grad_scores, stacked_keys).flatten(1, 2)
        grad_keys = torch.einsum("rgps,rgpc->srgc", grad_scores, query)
        grad_values = torch.einsum("rgps,rgpc->srgc", weights.to(narrow), grad_output)
        return list(grad_keys.unbind()), list(grad_values.unbind())


def _scores(query: OfQueries, keys: Float[Tensor, "S R G C"], wide: torch.dtype) -> Float[Tensor, "R G P S"]:
    scores = torch.einsum("rgpc,srgc->rgps", query.unflatten(1, (keys.shape[2], -1)), keys)
    return scores.to(wide) * query.shape[-1] ** -0.5


def _weights(scores: Float[Tensor, "R G P S"], logsumexp: LogSumExp) -> Float[Tensor, "R G P S"]:
    return (scores - logsumexp.T.unflatten(1, (scores.shape[1], -1))[..., None]).exp()
