"""Attention of the unroll. At step k a row attends to the step-0 keys of rows up to itself in its sample, and to its
own keys of steps 1 … k.

`DenseAttention` is the plain way, one score matrix per sample: the judge of every faster one. `PaddedAttention` does
samples of similar length at once: fewer and larger kernels where samples are short and many. `FlashAttention`, in
flash_attention.py, has no score matrix. attention_choice.py chooses.

Shapes: T tokens of the pack, R trained rows, N samples of similar length, L most tokens of one, M most rows of one, S
own steps so far, Q query heads, G key/value heads, C channels.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor

from eagle3.head.batch import TttBatch

KeysValues = tuple[Float[Tensor, "*N G C"], Float[Tensor, "*N G C"]]


class Attention(Protocol):
    """Called at every step: `own` are the rows' keys and values of steps 1 … k [R, G, C]."""

    def __call__(self, query: Float[Tensor, "R Q C"], own: list[KeysValues]) -> Float[Tensor, "R Q C"]: ...


# Once a batch, from the keys and values of step 0 [T, G, C].
MakeAttention = Callable[[KeysValues, TttBatch], Attention]


class DenseAttention:
    def __init__(self, context: KeysValues, batch: TttBatch) -> None:
        self.context, self.batch = context, batch

    def __call__(self, query: Float[Tensor, "R Q C"], own: list[KeysValues]) -> Float[Tensor, "R Q C"]:
        outputs = []
        for sample in range(len(self.batch.pack.sample_ids)):
            tokens = slice(self.batch.pack.token_bounds[sample], self.batch.pack.token_bounds[sample + 1])
            rows = slice(self.batch.anchor_bounds[sample], self.batch.anchor_bounds[sample + 1])
            outputs.append(
                self._sample_attention(
                    query[rows],
                    (self.context[0][tokens], self.context[1][tokens]),
                    [(key[rows], value[rows]) for key, value in own],
                    self.batch.anchors[rows] - tokens.start,
                )
            )
        return torch.cat(outputs)

    @staticmethod
    def _sample_attention(
        query: Float[Tensor, "R Q C"], context: KeysValues, own: list[KeysValues], rows: Int[Tensor, " R"]
    ) -> Float[Tensor, "R Q C"]:
        key, value = context
        groups, channels = key.shape[1:]
        query = query.unflatten(1, (groups, -1)) * channels**-0.5  # (R, G, Q/G, C)
        scores = torch.einsum("rgqc,tgc->gqrt", query, key)
        future = torch.arange(len(key), device=rows.device) > rows[:, None]
        scores = scores.masked_fill(future, float("-inf"))
        own_scores = [torch.einsum("rgqc,rgc->gqr", query, own_key)[..., None] for own_key, _ in own]
        weights = torch.cat([scores, *own_scores], dim=-1).softmax(-1, dtype=torch.float32).to(value.dtype)
        output = torch.einsum("gqrt,tgc->rgqc", weights[..., : len(key)], value)
        for step, (_, own_value) in enumerate(own):
            output = output + torch.einsum("gqr,rgc->rgqc", weights[..., len(key) + step], own_value)
        return output.flatten(1, 2)


class PaddedAttention:
    def __init__(self, context: KeysValues, batch: TttBatch) -> None:
        # By powers of two of the length: one long sample among short ones must not make all of them long.
        by_length: dict[int, list[int]] = {}
        for sample, bounds in enumerate(pairwise(batch.pack.token_bounds)):
            by_length.setdefault((bounds[1] - bounds[0]).bit_length(), []).append(sample)
        self.groups = [_PaddedSamples(context, batch, samples) for samples in by_length.values()]
        self.order = torch.cat([group.own_rows for group in self.groups]).argsort()

    def __call__(self, query: Float[Tensor, "R Q C"], own: list[KeysValues]) -> Float[Tensor, "R Q C"]:
        groups, channels = self.groups[0].key.shape[2:]
        query = query.unflatten(1, (groups, -1)) * channels**-0.5  # (R, G, Q/G, C)
        if not own:
            output = torch.cat([group.attend(query, None)[0] for group in self.groups])
            return output.index_select(0, self.order).flatten(1, 2)
        own_keys, own_values = (torch.stack(parts) for parts in zip(*own, strict=True))  # (S, R, G, C)
        own_scores = torch.einsum("rgqc,srgc->rgqs", query, own_keys)
        parts = [group.attend(query, own_scores) for group in self.groups]
        output, own_weights = (torch.cat(part).index_select(0, self.order) for part in zip(*parts, strict=True))
        return (output + torch.einsum("rgqs,srgc->rgqc", own_weights, own_values)).flatten(1, 2)


class _PaddedSamples:
    """Some samples of a pack as a batch."""

    def __init__(self, context: KeysValues, batch: TttBatch, samples: list[int]) -> None:
        device = batch.anchors.device
        tokens, _ = _padded_index(batch.pack.token_bounds, samples)
        rows, places = _padded_index(batch.anchor_bounds, samples)
        self.own_rows = rows.flatten()[places].to(device, non_blocking=True)
        starts = tokens[:, 0].to(device, non_blocking=True)
        tokens, self.rows, self.places = (part.to(device, non_blocking=True) for part in (tokens, rows, places))
        # Padded tokens stand behind every row of the sample, so the mask of the future hides them; padded rows are
        # never read, but must see a token: a row of nothing but -inf would make gradients nan.
        row_positions = (batch.anchors[self.rows] - starts[:, None]).clamp(min=0)[:, :, None]
        self.future = torch.arange(tokens.shape[1], device=device) > row_positions  # (N, M, L)
        self.key, self.value = gathered(context[0], tokens), gathered(context[1], tokens)  # (N, L, G, C)

    def attend(
        self, query: Float[Tensor, "R G Q/G C"], own_scores: Float[Tensor, "R G Q/G S"] | None
    ) -> tuple[Float[Tensor, "r G Q/G C"], Float[Tensor, "r G Q/G S"]]:
        """What the samples' own r rows read of the context, and the weights that their own keys of later steps get."""
        scores = torch.einsum("nmgqc,nlgc->ngqml", gathered(query, self.rows), self.key)
        scores = scores.masked_fill(self.future[:, None, None], float("-inf"))
        if own_scores is not None:
            scores = torch.cat([scores, gathered(own_scores, self.rows).permute(0, 2, 3, 1, 4)], dim=-1)
        weights = scores.softmax(-1, dtype=torch.float32).to(self.value.dtype)  # (N, G, Q/G, M, L + S)
        length = self.key.shape[1]
        output = torch.einsum("ngqml,nlgc->nmgqc", weights[..., :length], self.value)
        own_weights = weights[..., length:].permute(0, 3, 1, 2, 4)
        output, own_weights = (part.flatten(0, 1).index_select(0, self.places) for part in (output, own_weights))
        return output, own_weights


def gathered(x: Tensor, index: Int[Tensor, "N M"]) -> Tensor:
    """x[index], whose gradient is one kernel on the GPU: that of indexing sorts first."""
    return x.index_select(0, index.flatten()).unflatten(0, index.shape)


def _padded_index(bounds: tuple[int, ...], samples: list[int]) -> tuple[Int[Tensor, "N M"], Int[Tensor, " r"]]:
    """Where the entries of some samples lie, in rows padded with the sample's first; and the places that are none."""
    starts, lengths = torch.tensor(bounds)[samples], torch.tensor(bounds).diff()[samples]
    offsets = torch.arange(int(lengths.max()))
    inside = offsets < lengths[:, None]
    index = torch.where(inside, starts[:, None] + offsets, starts[:, None].clamp(max=max(bounds[-1] - 1, 0)))
    return index, inside.flatten().nonzero().squeeze(1)
