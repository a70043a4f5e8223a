"""Tokens that the anchors of a pack attend to, as calls of an attention kernel.

One causal call covers the span of each turn: the tokens from the end of the sample's previous turn up to the anchor.
The spans of earlier turns follow by halving the turns of a sample recursively: at each level the anchors of the right
halves attend to the tokens of the left halves. That makes ceil(log2(turns)) calls, and none for samples of one turn.
Keys stay in place in the pack: gathering each turn's keys would cost memory for turns x tokens.

Shapes: T tokens of the pack, R anchors.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from jaxtyping import Int
from torch import Tensor

from eagle3.data.pack import OnDevice

Range = tuple[int, int]  # the first, and one past the last
Read = tuple[Range, Range]  # of anchors, as indices in R, and of the tokens that they attend to


@dataclass(frozen=True, kw_only=True)
class Segments(OnDevice):
    """Bounds of queries and keys of a call: queries of a segment attend to all its keys, or causally.

    Causal is aligned to the end, as in the kernels: the last query of a segment attends to all its keys, the one before
    to all but the last. A segment may have no queries, or no keys: its queries' log-sum-exp is -inf.
    """

    query_bounds: Int[Tensor, " bounds"]  # int32, one more than segments
    key_bounds: Int[Tensor, " bounds"]
    most_queries: int
    most_keys: int
    causal: bool

    @classmethod
    def of(cls, reads: Sequence[Read], num_anchors: int, num_tokens: int, *, causal: bool) -> "Segments":
        """Cut all anchors and tokens at the bounds of `reads`, which ascend; what is between them reads nothing."""
        bounds = [(0, 0)]
        for (first_anchor, anchor_stop), (first_token, token_stop) in [
            *reads,
            ((num_anchors, num_anchors), (num_tokens, num_tokens)),
        ]:
            queries, keys = bounds[-1]
            if first_anchor > queries:
                bounds.append((first_anchor, keys))
            if first_token > keys:
                bounds.append((first_anchor, first_token))
            if token_stop > first_token:
                bounds.append((anchor_stop, token_stop))
        of_both = torch.tensor(bounds, dtype=torch.int32).T.contiguous()
        most_queries, most_keys = of_both.diff().amax(1).tolist()
        return cls(
            query_bounds=of_both[0],
            key_bounds=of_both[1],
            most_queries=most_queries,
            most_keys=most_keys,
            causal=causal,
        )


def segments_of(turns_of_samples: list[list[Read]], num_anchors: int, num_tokens: int) -> tuple[Segments, ...]:
    """Return the call for each turn's own span, then those for earlier turns. `turns_of_samples` has, for each sample
    and turn, the anchors and the span."""
    levels: list[list[Read]] = []
    for turns in turns_of_samples:
        _halve(turns, levels)
    own = [turn for turns in turns_of_samples for turn in turns]
    return (
        Segments.of(own, num_anchors, num_tokens, causal=True),
        *(Segments.of(level, num_anchors, num_tokens, causal=False) for level in levels),
    )


def turns_of_samples(
    turn_bounds: tuple[int, ...], turn_ends: tuple[int, ...], token_bounds: tuple[int, ...]
) -> list[list[Read]]:
    """Return each sample's turns: the anchors, and the span, which are the tokens since the previous turn."""
    turns: list[list[Read]] = [[] for _ in token_bounds[1:]]
    sample, start = 0, 0
    for anchors, stop in zip(pairwise(turn_bounds), turn_ends, strict=True):
        while stop > token_bounds[sample + 1]:
            sample += 1
            start = token_bounds[sample]
        turns[sample].append((anchors, (start, stop)))
        start = stop
    return turns


def _halve(turns: list[Read], levels: list[list[Read]], depth: int = 0) -> None:
    """Add to each level the anchors of a right half, and the tokens of the left half that they attend to."""
    if len(turns) < 2:
        return
    left, right = turns[: len(turns) // 2], turns[len(turns) // 2 :]
    if depth == len(levels):
        levels.append([])
    anchors, tokens = (right[0][0][0], right[-1][0][1]), (left[0][1][0], left[-1][1][1])
    levels[depth].append((anchors, tokens))
    _halve(left, levels, depth + 1)
    _halve(right, levels, depth + 1)
