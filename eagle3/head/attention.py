"""Attention of the unroll. At step k an anchor attends to the step-0 keys of positions up to itself in its sample, and
to the keys of its own chain: those of steps 1 … k at the same anchor.

`PaddedAttention` is the reference: score matrices, samples of similar length in one batch. `FlashAttention`, in
fast/flash_attention.py, has no score matrix. kernels.py chooses.

Shapes: T tokens of the pack, R anchors, r of them in some samples, N samples of similar length, L most tokens of one,
M most anchors of one, S steps of the chain so far, Q query heads, G key/value heads, P = Q / G queries that share one,
C channels.
"""

from collections.abc import Callable
from itertools import pairwise

import torch
from jaxtyping import Float, Int
from torch import Tensor

from eagle3.head.batch import TttBatch

KeysValues = tuple[Float[Tensor, "_ G C"], Float[Tensor, "_ G C"]]


# Of one batch, called at every step with the anchors' queries, and the keys and values of their chains' steps 1 … k.
Attention = Callable[[Float[Tensor, "R Q C"], list[KeysValues]], Float[Tensor, "R Q C"]]
# Called once per batch, with the keys and values of step 0 [T, G, C].
MakeAttention = Callable[[KeysValues, TttBatch], Attention]


class PaddedAttention:
    """The reference: softmax(q · kᵀ / √C) · v over the sample up to the anchor and the anchor's own chain.

    Samples of about the same length share one padded score matrix. tests/head/test_attention.py compares it with one
    anchor at a time."""

    def __init__(self, context: KeysValues, batch: TttBatch) -> None:
        # Grouped by powers of two of the length, so that one long sample does not pad all short ones.
        by_length: dict[int, list[int]] = {}
        for sample, bounds in enumerate(pairwise(batch.pack.token_bounds)):
            by_length.setdefault((bounds[1] - bounds[0]).bit_length(), []).append(sample)
        self.groups = [_PaddedSamples(context, batch, samples) for samples in by_length.values()]
        self.order = torch.cat([group.anchors for group in self.groups]).argsort()

    def __call__(self, query: Float[Tensor, "R Q C"], chain: list[KeysValues]) -> Float[Tensor, "R Q C"]:
        groups, channels = self.groups[0].key.shape[2:]
        query = query.unflatten(1, (groups, -1)) * channels**-0.5  # (R, G, P, C)
        if not chain:
            output = torch.cat([group.attend(query, None)[0] for group in self.groups])
            return output.index_select(0, self.order).flatten(1, 2)
        keys, values = (torch.stack(parts) for parts in zip(*chain, strict=True))  # (S, R, G, C)
        chain_scores = torch.einsum("rgpc,srgc->rgps", query, keys)
        parts = [group.attend(query, chain_scores) for group in self.groups]
        output, chain_weights = (torch.cat(part).index_select(0, self.order) for part in zip(*parts, strict=True))
        return (output + torch.einsum("rgps,srgc->rgpc", chain_weights, values)).flatten(1, 2)


class _PaddedSamples:
    def __init__(self, context: KeysValues, batch: TttBatch, samples: list[int]) -> None:
        device = batch.anchors.device
        tokens, _ = _padded_index(batch.pack.token_bounds, samples)  # (N, L)
        padded, places = _padded_index(batch.anchor_bounds, samples)  # (N, M), (r,)
        self.anchors = padded.flatten()[places].to(device, non_blocking=True)  # (r,), places in R
        starts = tokens[:, 0].to(device, non_blocking=True)
        tokens, self.padded, self.places = (part.to(device, non_blocking=True) for part in (tokens, padded, places))
        # Padded tokens come after every anchor of the sample, so the mask of the future hides them. Padded anchors are
        # never read, but must attend to a token: if all their scores were -inf, gradients would be nan.
        positions = (batch.anchors[self.padded] - starts[:, None]).clamp(min=0)[:, :, None]
        self.future = torch.arange(tokens.shape[1], device=device) > positions  # (N, M, L)
        self.key, self.value = gathered(context[0], tokens), gathered(context[1], tokens)  # (N, L, G, C)

    def attend(
        self, query: Float[Tensor, "R G P C"], chain_scores: Float[Tensor, "R G P S"] | None
    ) -> tuple[Float[Tensor, "r G P C"], Float[Tensor, "r G P _"]]:
        """Return the context's share of the samples' r outputs, and the weights of their chains' keys."""
        scores = torch.einsum("nmgpc,nlgc->ngpml", gathered(query, self.padded), self.key)
        scores = scores.masked_fill(self.future[:, None, None], float("-inf"))
        if chain_scores is not None:
            scores = torch.cat([scores, gathered(chain_scores, self.padded).permute(0, 2, 3, 1, 4)], dim=-1)
        wide = torch.promote_types(scores.dtype, torch.float32)
        weights = scores.softmax(-1, dtype=wide).to(self.value.dtype)  # (N, G, P, M, L + S)
        length = self.key.shape[1]
        output = torch.einsum("ngpml,nlgc->nmgpc", weights[..., :length], self.value)
        chain_weights = weights[..., length:].permute(0, 3, 1, 2, 4)
        output, chain_weights = (part.flatten(0, 1).index_select(0, self.places) for part in (output, chain_weights))
        return output, chain_weights


def gathered(x: Tensor, index: Int[Tensor, "N M"]) -> Tensor:
    """Return x[index]. Its gradient is one kernel on the GPU; that of plain indexing sorts first."""
    return x.index_select(0, index.flatten()).unflatten(0, index.shape)


def _padded_index(bounds: tuple[int, ...], samples: list[int]) -> tuple[Int[Tensor, "N M"], Int[Tensor, " r"]]:
    """Return the indices of the entries of some samples, padded with the sample's first, and the unpadded places."""
    # Lists, because reading an element of a tensor may synchronise with the GPU.
    starts = [bounds[sample] for sample in samples]
    lengths = [bounds[sample + 1] - bounds[sample] for sample in samples]
    first, offsets = torch.tensor(starts)[:, None], torch.arange(max(lengths))
    inside = offsets < torch.tensor(lengths)[:, None]
    index = torch.where(inside, first + offsets, first.clamp(max=max(bounds[-1] - 1, 0)))
    return index, torch.arange(inside.numel())[inside.flatten()]
