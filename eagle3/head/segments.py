"""Tokens that the anchors of a pack attend to, as calls of an attention kernel.

The span of a turn is the tokens from the end of the sample's previous turn on. Anchors attend to their own span up to
themselves, and to the spans of all earlier turns. A sample whose turns 1 … 4 have the anchors a and the spans s takes

    the causal call    a1 → s1    a2 → s2    a3 → s3    a4 → s4
    1st other call     a3 a4 → s1 s2                                the right half of the turns reads the left half
    2nd other call     a2 → s1               a4 → s3                the same inside each half

which are ceil(log2(turns)) other calls, and none for a sample of one turn. Keys stay in place in the pack: gathering
each turn's keys would cost memory for turns x tokens.

Shapes: T tokens of the pack, R anchors.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from eagle3.data.pack import OnDevice

Range = tuple[int, int]  # the first, and one past the last


class Read(NamedTuple):
    """Consecutive anchors, as indices in R, and the consecutive tokens that they attend to."""

    anchors: Range
    tokens: Range


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
        """Cut all anchors and tokens at the bounds of `reads`, which ascend; what is between them reads nothing.

        Anchors 0 and 1 read tokens 0 … 4, anchors 4 and 5 tokens 9 … 11, of 6 anchors and 14 tokens:

            query_bounds    0  2  4  4   6   6    2 anchors, 2 that read nothing, none, 2 anchors, none
            key_bounds      0  5  5  9  12  14    5 tokens, none, 4 that nobody reads, 3, 2 that nobody reads
        """
        bounds = [(0, 0)]
        end = Read((num_anchors, num_anchors), (num_tokens, num_tokens))
        for (first_anchor, anchor_stop), (first_token, token_stop) in [*reads, end]:
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


def build_segments(turns_of_samples: list[list[Read]], num_anchors: int, num_tokens: int) -> tuple[Segments, ...]:
    """Return the causal call, then the others. `turns_of_samples` has, for each sample and turn, anchors and span."""
    own = [turn for turns in turns_of_samples for turn in turns]
    return (
        Segments.of(own, num_anchors, num_tokens, causal=True),
        *(Segments.of(reads, num_anchors, num_tokens, causal=False) for reads in earlier_turns(turns_of_samples)),
    )


def earlier_turns(groups: list[list[Read]]) -> Iterator[list[Read]]:
    """Yield for each other call which anchors of right halves read which tokens of left halves."""
    while groups := [turns for turns in groups if len(turns) > 1]:
        halves = [(turns[: len(turns) // 2], turns[len(turns) // 2 :]) for turns in groups]
        yield [
            Read((right[0].anchors[0], right[-1].anchors[1]), (left[0].tokens[0], left[-1].tokens[1]))
            for left, right in halves
        ]
        groups = [half for both in halves for half in both]


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
        turns[sample].append(Read(anchors, (start, stop)))
        start = stop
    return turns
