"""The trees that eagle3/decoding/drafter.py grows, behind many tokens of a known text at once.

Shapes: N rows of the text, P positions where a round may begin, F nodes that are drafted from (1, then topk), S steps
of their paths so far, K steps, J trees of 1, 2, … steps, C candidates of a tree, H hidden size, X = 2H, Q query heads,
G key/value heads, E channels of a head.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from eagle3.decoding.speculate import Speculator
from eagle3.target.capture import Capture

POSITIONS_AT_ONCE = 32  # each with topk queries over all rows of the text
NOWHERE = -1

KeysValues = tuple[Float[Tensor, "P F S G E"], Float[Tensor, "P F S G E"]]


class Frontier(NamedTuple):
    """The nodes that a step drafts from, and of each whether its path is what the answer says."""

    hidden: Float[Tensor, "P F H"]
    scores: Float[Tensor, "P F"]
    is_own: Bool[Tensor, "P F"]
    path: KeysValues


class Grower:
    """A text and the head's rows of it, on the target's own features.

    Row t joins the feature of token t with the embedding of token t + 1. A round whose root is token r drafts from row
    r - 1, and from no later row."""

    @torch.inference_mode()
    def __init__(self, speculator: Speculator, capture: Capture, token_ids: list[int]) -> None:
        self.head = speculator.head
        self.embedding = speculator.target.embedding
        self.ids = torch.tensor(token_ids, device=self.embedding.device)
        [features] = capture(self.ids[None, :-1], [len(token_ids) - 1])
        self.fused = self.head.fuse(features.aux_hidden_states)  # (N, H)
        self.x = self.head.attention_input(self.embedding[self.ids[1:]], self.fused)  # (N, 2H)
        self.rows = torch.arange(len(self.x), device=self.x.device)
        self.keys, self.values = self.head.keys_values(self.x, self.rows)

    @torch.inference_mode()
    def places(self, roots: range, topk: int, steps: int) -> Int[Tensor, "P K K"]:
        """See `Recording`; a position is the token that is the root of a round."""
        found = [torch.empty(0, steps, steps, dtype=torch.int32)]
        for start in range(roots.start, roots.stop, POSITIONS_AT_ONCE):
            stop = min(start + POSITIONS_AT_ONCE, roots.stop)
            found.append(self._places(torch.arange(start, stop, device=self.ids.device), topk, steps))
        return torch.cat(found)

    @torch.inference_mode()
    def chances(self, roots: range, steps: int, temperature: float) -> Float[Tensor, "P K"]:
        """Return the probability with which a head that samples its drafts of the whole vocabulary drafts the text's
        own next tokens behind each root, each after the ones before it."""
        found = [torch.empty(0, steps)]
        for start in range(roots.start, roots.stop, POSITIONS_AT_ONCE):
            stop = min(start + POSITIONS_AT_ONCE, roots.stop)
            found.append(self._chances(torch.arange(start, stop, device=self.ids.device), steps, temperature).cpu())
        return torch.cat(found)

    def _chances(self, roots: Int[Tensor, " P"], steps: int, temperature: float) -> Float[Tensor, "P K"]:
        place = self.head.draft_ids.argsort()  # (V,), of each token in the head's own order
        first, chances = self._first(roots), []
        hidden, path = first.hidden, first.path
        for step in range(steps):
            own = self.ids[roots + step + 1, None]  # (P, 1)
            probabilities = (self.head.logits(hidden[:, 0]).float() / temperature).softmax(-1)
            chances.append(probabilities.gather(1, place[own]))
            if step + 1 < steps:
                hidden, path = self._deeper(hidden, own, path, roots)
        return torch.cat(chances, dim=1)

    def _places(self, roots: Int[Tensor, " P"], topk: int, steps: int) -> Int[Tensor, "P K K"]:
        scores, own, ends = [], [], [0]  # by step: the candidates' scores, the answer's own among all, their number
        frontier = self._first(roots)
        for step in range(steps):
            best = self.head.logits(frontier.hidden).softmax(-1, dtype=torch.float32).topk(topk)  # (P, F, topk)
            tokens = self.head.draft_ids[best.indices]
            is_own = frontier.is_own[..., None] & (tokens == self.ids[roots + step + 1, None, None])
            scores.append((frontier.scores[..., None] * best.values).flatten(1))
            own.append(_index_of(is_own.flatten(1), first=ends[-1]))
            ends.append(ends[-1] + scores[-1].shape[1])
            if step + 1 < steps:
                frontier = self._next(frontier, roots, tokens, scores[-1], is_own)
        return _places_in_order(torch.cat(scores, dim=1), torch.stack(own, dim=1), ends[1:]).int().cpu()

    def _first(self, roots: Int[Tensor, " P"]) -> Frontier:
        last = roots[:, None] - 1
        no_path = (
            self.keys.expand(len(roots), 1, -1, -1, -1)[:, :, :0],
            self.values.expand(len(roots), 1, -1, -1, -1)[:, :, :0],
        )
        hidden = self._output(self.x[last], self.fused[last], last, roots, no_path)
        return Frontier(
            hidden, torch.ones_like(last, dtype=torch.float32), torch.ones_like(last, dtype=torch.bool), no_path
        )

    def _next(
        self,
        frontier: Frontier,
        roots: Int[Tensor, " P"],
        tokens: Int[Tensor, "P F topk"],
        scores: Float[Tensor, "P candidates"],
        is_own: Bool[Tensor, "P F topk"],
    ) -> Frontier:
        """The head runs on its own output and a drafted token, at the `topk` best of the step's candidates."""
        topk = tokens.shape[-1]
        kept_scores, kept = scores.topk(topk, dim=1)
        every = torch.arange(len(roots), device=roots.device)[:, None]
        parents = kept // topk
        keys, values = (states[every, parents] for states in frontier.path)
        drafted = tokens.flatten(1)[every, kept]
        hidden, path = self._deeper(frontier.hidden[every, parents], drafted, (keys, values), roots)
        return Frontier(hidden, kept_scores, is_own.flatten(1)[every, kept], path)

    def _deeper(
        self, hidden: Float[Tensor, "P F H"], tokens: Int[Tensor, "P F"], path: KeysValues, roots: Int[Tensor, " P"]
    ) -> tuple[Float[Tensor, "P F H"], tuple[Tensor, Tensor]]:
        """Run nodes on the output that drafted them and their tokens; their keys and values join the paths."""
        hidden, (keys, values) = self.head.feedback(hidden), path
        x = self.head.attention_input(self.embedding[tokens], hidden)
        positions = (roots[:, None] + keys.shape[2]).expand_as(tokens)
        key, value = self.head.keys_values(x.flatten(0, 1), positions.flatten())
        key, value = (states.unflatten(0, tokens.shape)[:, :, None] for states in (key, value))
        path = (torch.cat([keys, key], dim=2), torch.cat([values, value], dim=2))
        return self._output(x, hidden, positions, roots, path), path

    def _output(
        self,
        x: Float[Tensor, "P F X"],
        hidden: Float[Tensor, "P F H"],
        positions: Int[Tensor, "P F"],
        roots: Int[Tensor, " P"],
        path: KeysValues,
    ) -> Float[Tensor, "P F H"]:
        query = self.head.queries(x.flatten(0, 1), positions.flatten()).unflatten(0, positions.shape)
        attended = self._attend(query, roots, path)
        return self.head.output(hidden.flatten(0, 1), attended.flatten(0, 1)).unflatten(0, positions.shape)

    def _attend(
        self, query: Float[Tensor, "P F Q E"], roots: Int[Tensor, " P"], path: KeysValues
    ) -> Float[Tensor, "P F Q E"]:
        """Rows before the root, and the node's own path."""
        query = query.unflatten(2, (self.keys.shape[1], -1)) * query.shape[-1] ** -0.5  # (P, F, G, Q/G, E)
        to_rows = torch.einsum("pfgqe,nge->pfgqn", query, self.keys)
        to_rows = to_rows.masked_fill((self.rows >= roots[:, None])[:, None, None, None], -torch.inf)
        to_path = torch.einsum("pfgqe,pfsge->pfgqs", query, path[0])
        weights = torch.cat([to_rows, to_path], dim=-1).softmax(-1, dtype=torch.float32).to(self.values.dtype)
        of_rows = torch.einsum("pfgqn,nge->pfgqe", weights[..., : len(self.rows)], self.values)
        return (of_rows + torch.einsum("pfgqs,pfsge->pfgqe", weights[..., len(self.rows) :], path[1])).flatten(2, 3)


def _index_of(mark: Bool[Tensor, "P candidates"], *, first: int) -> Int[Tensor, " P"]:
    """Of the one that is marked, where the candidates are numbered from `first` on."""
    return torch.where(mark.any(dim=1), first + mark.int().argmax(dim=1), NOWHERE)


def _places_in_order(scores: Float[Tensor, "P C"], own: Int[Tensor, "P K"], ends: list[int]) -> Int[Tensor, "P J K"]:
    """A tree keeps the best candidates, of equal ones the earlier, as eagle3/decoding/drafter.py does."""
    found = []
    for end in ends:
        order = scores[:, :end].argsort(dim=1, descending=True, stable=True)
        place = order.argsort(dim=1).gather(1, own.clamp(0, end - 1))
        found.append(torch.where((own != NOWHERE) & (own < end), place, end))
    return torch.stack(found, dim=1)
