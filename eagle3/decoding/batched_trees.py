"""The trees that eagle3/decoding/drafter.py drafts, for many positions of a known text at once.

Shapes: N rows of the text, P positions where a round may begin, F nodes that are drafted from (1, then topk), K steps,
J trees of 1, 2, … steps, C candidates of a tree, H hidden size.
"""

from typing import NamedTuple, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from eagle3.decoding.drafter import draft_tree
from eagle3.decoding.speculate import Speculator
from eagle3.draft_shape import most_draft_tokens
from eagle3.head.draft_head import DraftHead
from eagle3.head.kv_cache import Paths, output, step
from eagle3.head.registry import kind_named
from eagle3.target.capture import Capture

POSITIONS_AT_ONCE = 128  # each with the logits of topk nodes; for fewer, a GPU waits for the host's launches
SCORES_AT_ONCE = 2**20  # of attention, for each of its heads: positions x topk x rows of the text
NOWHERE = -1


class Frontier(NamedTuple):
    """The nodes that a step drafts from; `is_own` marks those whose path equals the text."""

    hidden: Float[Tensor, "P F H"]
    scores: Float[Tensor, "P F"]
    is_own: Bool[Tensor, "P F"]
    paths: Paths


class BatchedTrees:
    """A text, with the head's keys and values of its rows, computed from the target's features.

    Row t joins the feature of token t with the embedding of token t + 1. A round whose root is token r drafts from row
    r - 1, and attends to no later row. Its candidates are numbered step by step. For topk=2:

        step 1    0 1             children of the root
        step 2    2 3  4 5        two children of each of the two nodes that step 1 kept: 0 and 1
        step 3    6 7  8 9        two children of each that step 2 kept, say 5 and 2: 6 and 7 are children of 5

    If the text continues with candidates 1, 4 and none, `own` is [1, 4, NOWHERE] and `ends` is [0, 2, 6, 10]: among the
    first 2, 6 and 10 candidates the trees of 1, 2 and 3 steps rank them."""

    @torch.inference_mode()
    def __init__(
        self, speculator: Speculator, capture: Capture, token_ids: list[int], *, window: int | None = None
    ) -> None:
        """A node attends to the last `window` keys, its own included (None: all)."""
        self.window = window
        self.head = cast(DraftHead, speculator.head)
        self.embedding = speculator.target.embedding
        self.ids = torch.tensor(token_ids, device=self.embedding.device)
        [features] = capture(self.ids[None, :-1], [len(token_ids) - 1])
        self.fused = self.head.fuse(features.aux_hidden_states)  # (N, H)
        self.x = self.head.attention_input(self.embedding[self.ids[1:]], self.fused)  # (N, 2H)
        self.rows = torch.arange(len(self.x), device=self.x.device)
        self.context = self.head.keys_values(self.x, self.rows)

    @torch.inference_mode()
    def places(self, roots: range, topk: int, steps: int) -> Int[Tensor, "P K K"]:
        """See `Recording`; a position is the token that is the root of a round."""
        at_once = max(1, min(POSITIONS_AT_ONCE, SCORES_AT_ONCE // (topk * len(self.rows))))
        parts = torch.arange(roots.start, roots.stop, device=self.ids.device).split(at_once)
        places = [self._places(part, topk, steps) for part in parts]
        return torch.cat([torch.empty(0, steps, steps, dtype=torch.int32), *places])

    def _places(self, roots: Int[Tensor, " P"], topk: int, steps: int) -> Int[Tensor, "P K K"]:
        scores, own, ends = [], [], [0]  # by step: scores of candidates, number of the text's token, candidates so far
        frontier = self._first(roots)
        for depth in range(steps):
            best = self.head.logits(frontier.hidden).softmax(-1, dtype=torch.float32).topk(topk)  # (P, F, topk)
            tokens = self.head.draft_ids[best.indices]
            is_own = frontier.is_own[..., None] & (tokens == self.ids[roots + depth + 1, None, None])
            scores.append((frontier.scores[..., None] * best.values).flatten(1))
            marks = is_own.flatten(1)  # one candidate at most
            own.append(torch.where(marks.any(dim=1), ends[-1] + marks.int().argmax(dim=1), NOWHERE))
            ends.append(ends[-1] + scores[-1].shape[1])
            if depth + 1 < steps:
                frontier = self._next(frontier, roots, tokens, scores[-1], is_own)
        return _places_in_order(torch.cat(scores, dim=1), torch.stack(own, dim=1), ends[1:]).int().cpu()

    def _first(self, roots: Int[Tensor, " P"]) -> Frontier:
        """Return the head's output at the row before each root, with no drafts yet."""
        last = roots[:, None] - 1
        keys, values = (part.expand(len(roots), 1, -1, -1, -1)[:, :, :0] for part in self.context)
        hidden = output(
            self.head, self.x[last], self.fused[last], last, self.context, (keys, values), self._visible(roots, 0)
        )
        own = torch.ones_like(last, dtype=torch.bool)
        return Frontier(hidden, torch.ones_like(last, dtype=torch.float32), own, (keys, values))

    def _next(
        self,
        frontier: Frontier,
        roots: Int[Tensor, " P"],
        tokens: Int[Tensor, "P F topk"],
        scores: Float[Tensor, "P candidates"],
        is_own: Bool[Tensor, "P F topk"],
    ) -> Frontier:
        """Run the head on its own output and a drafted token, for the `topk` best candidates of the step."""
        topk = tokens.shape[-1]
        kept_scores, kept = scores.topk(topk, dim=1)  # (P, topk) of the step's candidates, counted from 0
        every = torch.arange(len(roots), device=roots.device)[:, None]
        parents = kept // topk  # (P, topk), among the F nodes of the frontier
        keys, values = (part[every, parents] for part in frontier.paths)
        hidden, drafted = frontier.hidden[every, parents], tokens.flatten(1)[every, kept]
        positions = (roots[:, None] + keys.shape[2]).expand_as(drafted)
        visible = self._visible(roots, keys.shape[2] + 1)
        hidden, paths = step(
            self.head, self.embedding, hidden, drafted, positions, self.context, (keys, values), visible
        )
        return Frontier(hidden, kept_scores, is_own.flatten(1)[every, kept], paths)

    def _visible(self, roots: Int[Tensor, " P"], drafted: int) -> Bool[Tensor, "P N"]:
        """Return the rows visible to a node after `drafted` drafts on its path."""
        before = self.rows < roots[:, None]
        return before if self.window is None else before & (self.rows >= roots[:, None] + drafted - self.window)


class SteppedTrees:
    """The same for a head whose kind decodes in a way of its own: one position after the other, as it drafts them."""

    @torch.inference_mode()
    def __init__(
        self, speculator: Speculator, capture: Capture, token_ids: list[int], *, window: int | None = None
    ) -> None:
        self.speculator, self.ids, self.window = speculator, token_ids, window
        rows = len(token_ids) - 1
        device = speculator.target.embedding.device
        [features] = capture(torch.tensor([token_ids[:-1]], device=device), [rows])
        self.aux_hidden_states = features.aux_hidden_states  # (N, AH)

    @torch.inference_mode()
    def places(self, roots: range, topk: int, steps: int) -> Int[Tensor, "P K K"]:
        head, target = self.speculator.head, self.speculator.target
        cached = kind_named(head.kind).drafting(head, target.embedding, len(self.ids) + steps, window=self.window)
        found, confirmed = torch.empty(len(roots), steps, steps, dtype=torch.int32), 0
        for position, root in enumerate(roots):
            hidden = cached.confirm(self.aux_hidden_states[confirmed:root], self.ids[confirmed + 1 : root + 1])
            confirmed = root
            ends = [most_draft_tokens(depth, topk) - 1 for depth in range(1, steps + 1)]
            tree = draft_tree(head, cached, hidden, steps=steps, topk=topk, num_drafts=ends[-1])
            own = tree.walk(self.ids[root + 1 : root + 1 + steps])
            for depth, end in enumerate(ends, start=1):  # the first `end` candidates are the tree of so many steps
                order = torch.tensor(tree.scores[:end]).argsort(descending=True, stable=True).tolist()
                places = [order.index(node) for node in own[:depth]]
                found[position, depth - 1] = torch.tensor(places + [end] * (steps - len(places)))
        return found


def _places_in_order(scores: Float[Tensor, "P C"], own: Int[Tensor, "P K"], ends: list[int]) -> Int[Tensor, "P J K"]:
    """Rank candidates as eagle3/decoding/drafter.py does: by score, ties in order. See `Recording` for the result."""
    found = []
    for end in ends:
        order = scores[:, :end].argsort(dim=1, descending=True, stable=True)
        place = order.argsort(dim=1).gather(1, own.clamp(0, end - 1))
        found.append(torch.where((own != NOWHERE) & (own < end), place, end))
    return torch.stack(found, dim=1)
