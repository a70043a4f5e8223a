"""The head's side of speculative decoding: the tree of tokens that it drafts behind the last verified one.

Shapes: R rows that the target confirmed in a round, N all confirmed rows, F nodes that are drafted from, S steps of
their paths, H hidden size, Q query heads, G key/value heads, C channels, V target vocabulary.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from eagle3.head.draft_head import DraftHead

KeysValues = tuple[Float[Tensor, "*N G C"], Float[Tensor, "*N G C"]]


class Drafter:
    """The head during one decode: keys and values of the confirmed rows, and the tree that grows from the last one."""

    def __init__(self, head: DraftHead, embedding: Float[Tensor, "V H"], room: int) -> None:
        self.head = head
        self.embedding = embedding
        shape = (room, head.config.num_kv_heads, head.config.head_dim)
        self.keys, self.values = head.fc.weight.new_empty(shape), head.fc.weight.new_empty(shape)
        self.confirmed = 0  # rows in them

    def confirm(self, aux: Float[Tensor, "R 3H"], next_tokens: list[int]) -> Float[Tensor, "1 H"]:
        """Append rows with the target's own features; the output of the last one predicts the first draft."""
        start, self.confirmed = self.confirmed, self.confirmed + len(next_tokens)
        positions = torch.arange(start, self.confirmed, device=aux.device)
        fused = self.head.fuse(aux)
        x = self.head.attention_input(self.embedding[next_tokens], fused)
        self.keys[start : self.confirmed], self.values[start : self.confirmed] = self.head.keys_values(x, positions)
        # One layer: earlier rows matter through their keys and values alone, so only the last is a query.
        query = self.head.queries(x[-1:], positions[-1:])
        return self.head.output(fused[-1:], self._attend(query, self._no_path()))

    def paths(self, hidden: Float[Tensor, "1 H"], *, steps: int, topk: int, num_drafts: int) -> list[list[int]]:
        """The tree of the `num_drafts` most probable drafts, as its paths from below the root to each leaf.

        Each step expands the `topk` best nodes of the step before by `topk` children. A node's score is the product
        of the head's probabilities (over the draft vocabulary) along its path, as in SGLang. There, a node reads the
        keys that its place among the `topk` wrote in earlier steps, whoever its parent is; here, those of its own
        path, as in training."""
        scores, tokens, parents = [], [], []
        frontier, own = torch.tensor([-1], device=hidden.device), self._no_path()
        frontier_scores = torch.ones(1, 1, device=hidden.device)
        for step in range(steps):
            best = self.head.logits(hidden).softmax(-1, dtype=torch.float32).topk(topk)  # (F, topk)
            scores.append((frontier_scores * best.values).flatten())
            tokens.append(self.head.draft_ids[best.indices].flatten())
            parents.append(frontier.repeat_interleave(topk))
            if step + 1 < steps:
                kept_scores, kept = scores[-1].topk(topk)
                first = sum(len(earlier) for earlier in scores[:-1])
                frontier, frontier_scores, source = first + kept, kept_scores[:, None], kept // topk
                path = (own[0][source], own[1][source])
                hidden, own = self._step(hidden[source], tokens[-1][kept], path)
        return _best_paths(torch.cat(scores), torch.cat(tokens).tolist(), torch.cat(parents).tolist(), num_drafts)

    def _step(
        self, hidden: Float[Tensor, "F H"], tokens: Int[Tensor, " F"], own: KeysValues
    ) -> tuple[Float[Tensor, "F H"], KeysValues]:
        """Run the head on its own output and a drafted token; its key and value join the path's."""
        position = self.confirmed + own[0].shape[1]
        positions = torch.full_like(tokens, position)
        hidden = self.head.feedback(hidden)
        x = self.head.attention_input(self.embedding[tokens], hidden)
        key, value = self.head.keys_values(x, positions)
        own = (torch.cat([own[0], key[:, None]], dim=1), torch.cat([own[1], value[:, None]], dim=1))
        return self.head.output(hidden, self._attend(self.head.queries(x, positions), own)), own

    def _attend(self, query: Float[Tensor, "F Q C"], own: KeysValues) -> Float[Tensor, "F Q C"]:
        """Every confirmed row and the node's own path [F, S, G, C]; both lie before it, so there is nothing to mask."""
        keys, values = self.keys[: self.confirmed], self.values[: self.confirmed]
        query = query.unflatten(1, (keys.shape[1], -1)) * query.shape[-1] ** -0.5  # (F, G, Q/G, C)
        scores = [torch.einsum("fgqc,ngc->fgqn", query, keys), torch.einsum("fgqc,fsgc->fgqs", query, own[0])]
        weights = torch.cat(scores, dim=-1).softmax(-1, dtype=torch.float32).to(values.dtype)
        confirmed = torch.einsum("fgqn,ngc->fgqc", weights[..., : self.confirmed], values)
        return (confirmed + torch.einsum("fgqs,fsgc->fgqc", weights[..., self.confirmed :], own[1])).flatten(1, 2)

    def _no_path(self) -> KeysValues:
        return self.keys[None, :0], self.values[None, :0]


def _best_paths(scores: Tensor, tokens: list[int], parents: list[int], num_drafts: int) -> list[list[int]]:
    """Candidates stand in order of depth and no child scores above its parent, so the stable order of the best keeps
    every parent of what it keeps."""
    kept = sorted(scores.sort(descending=True, stable=True).indices[:num_drafts].tolist())
    path: dict[int, list[int]] = {-1: []}
    for node in kept:
        path[node] = [*path[parents[node]], tokens[node]]
    leaves = sorted(set(kept) - {parents[node] for node in kept})
    return [path[leaf] for leaf in leaves]
