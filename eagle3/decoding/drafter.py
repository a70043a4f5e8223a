"""The head's side of speculative decoding: the tree of tokens that it drafts after the last verified one.

Shapes: F nodes that are drafted from, H hidden size.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from eagle3.head.head import Head
from eagle3.head.kind import Drafting


class Tree(NamedTuple):
    """Drafts of a round, parents first: tokens, indices of their parents in this list (-1: the last verified token),
    and scores, which are products of the head's probabilities along the path."""

    tokens: list[int]
    parents: list[int]
    scores: list[float]

    def probability(self, node: int) -> float:
        """Return the head's probability of this draft, given its parent."""
        parent = self.parents[node]
        above = 1.0 if parent == -1 else self.scores[parent]
        return self.scores[node] / above if above else 0.0  # a long path's product may be too small for a float

    def paths(self) -> list[list[int]]:
        """Return the tokens from the root's children to each node."""
        paths: list[list[int]] = []
        for token, parent in zip(self.tokens, self.parents, strict=True):
            paths.append([token] if parent == -1 else [*paths[parent], token])
        return paths

    def branches(self) -> list[list[int]]:
        return [path for node, path in enumerate(self.paths()) if node not in self.parents]

    def walk(self, tokens: list[int]) -> list[int]:
        """Return the nodes along these tokens, from the top down, as far as they were drafted."""
        nodes: list[int] = []
        below = {link: node for node, link in enumerate(zip(self.parents, self.tokens, strict=True))}
        for token in tokens:
            node = below.get((nodes[-1] if nodes else -1, token))
            if node is None:
                break
            nodes.append(node)
        return nodes


def draft_tree(
    head: Head, cached: Drafting, hidden: Float[Tensor, "1 H"], *, steps: int, topk: int, num_drafts: int
) -> Tree:
    """Return the tree of the `num_drafts` most probable drafts after the last row that `cached` has confirmed, whose
    output is `hidden`.

    Each step expands the `topk` best nodes of the previous step by `topk` children (EAGLE-2, arXiv:2406.16858). A
    node's score is the product of the head's probabilities (over the draft vocabulary) along its path, as in SGLang. In
    SGLang a node attends to the keys written by its rank among the `topk` in earlier steps, whoever its parent is; here
    it attends to the keys of its own path, as in training."""
    scores, tokens, parents = [], [], []
    frontier, path = torch.tensor([-1], device=hidden.device), cached.root()
    frontier_scores = torch.ones(1, 1, device=hidden.device)
    for step in range(steps):
        best = head.logits(hidden).softmax(-1, dtype=torch.float32).topk(topk)  # (F, topk)
        scores.append((frontier_scores * best.values).flatten())
        tokens.append(head.draft_ids[best.indices].flatten())
        parents.append(frontier.repeat_interleave(topk))
        if step + 1 < steps:
            kept_scores, kept = scores[-1].topk(topk)
            first = sum(len(earlier) for earlier in scores[:-1])
            frontier, frontier_scores, source = first + kept, kept_scores[:, None], kept // topk
            path = tuple(part[source] for part in path)
            hidden, path = cached.step(hidden[source], tokens[-1][kept], path)
    return _best(torch.cat(scores), torch.cat(tokens).tolist(), torch.cat(parents).tolist(), num_drafts)


def _best(scores: Tensor, tokens: list[int], parents: list[int], num_drafts: int) -> Tree:
    """Return the best candidates, in order. Candidates are sorted by depth and no child scores above its parent, so a
    stable sort keeps the parents of every kept node."""
    kept = sorted(scores.sort(descending=True, stable=True).indices[:num_drafts].tolist())
    place = {-1: -1} | {node: number for number, node in enumerate(kept)}
    return Tree([tokens[node] for node in kept], [place[parents[node]] for node in kept], scores[kept].tolist())
