"""The draft vocabulary: the D most frequent answer tokens, sorted by target id.

Shapes: V target vocabulary, D draft vocabulary, B that of another head.
"""

import math

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from eagle3.errors import InputError

# lm_head's products in bf16 are 2 to 7 times as slow where rows of logits do not begin at multiples of 16 bytes: with
# an odd number of tokens, a small head trains half as fast (benchmarks/results/draft_vocab.json).
ALIGNED = 8
MULTIPLE = 64  # also enough for float8, and for lm_head in parts on several GPUs of a server


def most_frequent(counts: Int[Tensor, " V"], size: int) -> Int[Tensor, " D"]:
    """Return the ids of the `size` most frequent tokens, ascending; size=V takes the whole vocabulary.

    Ties go to the lower id, so that the choice is reproducible.
    """
    vocab_size, distinct = len(counts), int((counts > 0).sum())
    if size == vocab_size:
        return torch.arange(vocab_size)
    if size > distinct:
        raise InputError(
            f"model.draft_vocab_size={size} but the answers hold {distinct} distinct tokens; "
            f"set model.draft_vocab_size={distinct} or less (or null to choose it), or {vocab_size} for all tokens"
        )
    order = torch.sort(counts, descending=True, stable=True).indices
    return order[:size].sort().values


def extended(draft_ids: Int[Tensor, " B"], counts: Int[Tensor, " V"], limit: int) -> Int[Tensor, " D"]:
    """Add to `draft_ids`, in any order, the answer tokens that they lack, and others up to a multiple of 64; ascending.

    The most frequent come first. There are at most `limit` in all: none is added to `limit` ids or more."""
    lacking = counts.clone()
    lacking[draft_ids] = -1
    wanted = len(draft_ids) + int((lacking > 0).sum())
    size = min(limit, len(counts), math.ceil(wanted / MULTIPLE) * MULTIPLE)
    added = torch.sort(lacking, descending=True, stable=True).indices[: max(0, size - len(draft_ids))]
    return torch.cat([draft_ids, added]).sort().values


def to_offsets(draft_ids: Int[Tensor, " D"]) -> Int[Tensor, " D"]:
    """Return SGLang's d2t: target id = draft id + d2t[draft id]."""
    return draft_ids - torch.arange(len(draft_ids))


def from_offsets(d2t: Int[Tensor, " D"]) -> Int[Tensor, " D"]:
    return d2t + torch.arange(len(d2t))


def membership(draft_ids: Int[Tensor, " D"], vocab_size: int) -> Bool[Tensor, " V"]:
    """Return SGLang's t2d: whether a target token is in the draft vocabulary."""
    mask = torch.zeros(vocab_size, dtype=torch.bool, device=draft_ids.device)
    mask[draft_ids] = True
    return mask
