"""The head at decoding time: a cache of confirmed rows, and steps down the paths of drafted trees.

`attend` and `step` are the only attention and the only step of decoding. CachedHead calls them for one tree after its
confirmed rows, decoding/batched_trees.py for trees after many tokens of a known text at once.

Shapes: P trees, F nodes of a tree that are drafted from, S steps of their paths, N rows of the context, R rows that the
target confirmed in a round, A captured layers, H hidden size, AH = A · H, HH = 2 · H, Q query heads, G key/value heads,
M = Q / G, C channels, V target vocabulary.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from eagle3.head.draft_head import DraftHead
from eagle3.head.kind import Path

Context = tuple[Float[Tensor, "N G C"], Float[Tensor, "N G C"]]  # keys and values of rows
Paths = tuple[Float[Tensor, "P F _ G C"], Float[Tensor, "P F _ G C"]]  # of each node's own drafts, S that grows


def attend(
    query: Float[Tensor, "P F Q C"], context: Context, paths: Paths, visible: Bool[Tensor, "P N"] | None = None
) -> Float[Tensor, "P F Q C"]:
    """Attend to the rows of the context that are visible to each tree (None: all), and to each node's own path."""
    keys, values = context
    query = query.unflatten(2, (keys.shape[1], -1)) * query.shape[-1] ** -0.5  # (P, F, G, M, C)
    to_context = torch.einsum("pfgmc,ngc->pfgmn", query, keys)
    if visible is not None:
        to_context = to_context.masked_fill(~visible[:, None, None, None], -torch.inf)
    to_path = torch.einsum("pfgmc,pfsgc->pfgms", query, paths[0])
    wide = torch.promote_types(values.dtype, torch.float32)
    weights = torch.cat([to_context, to_path], dim=-1).softmax(-1, dtype=wide).to(values.dtype)
    from_context = torch.einsum("pfgmn,ngc->pfgmc", weights[..., : len(keys)], values)
    return (from_context + torch.einsum("pfgms,pfsgc->pfgmc", weights[..., len(keys) :], paths[1])).flatten(2, 3)


def output(
    head: DraftHead,
    x: Float[Tensor, "P F HH"],
    hidden: Float[Tensor, "P F H"],
    positions: Int[Tensor, "P F"],
    context: Context,
    paths: Paths,
    visible: Bool[Tensor, "P N"] | None = None,
) -> Float[Tensor, "P F H"]:
    """Return the head's output at nodes with the attention input `x` and the state `hidden`."""
    query = head.queries(x.flatten(0, 1), positions.flatten()).unflatten(0, positions.shape)
    attended = attend(query, context, paths, visible)
    return head.output(hidden.flatten(0, 1), attended.flatten(0, 1)).unflatten(0, positions.shape)


def step(
    head: DraftHead,
    embedding: Float[Tensor, "V H"],
    hidden: Float[Tensor, "P F H"],
    tokens: Int[Tensor, "P F"],
    positions: Int[Tensor, "P F"],
    context: Context,
    paths: Paths,
    visible: Bool[Tensor, "P N"] | None = None,
) -> tuple[Float[Tensor, "P F H"], Paths]:
    """Run nodes on the output that drafted them and their tokens; their keys and values join the paths."""
    hidden = head.feedback(hidden)
    x = head.attention_input(embedding[tokens], hidden)
    key, value = head.keys_values(x.flatten(0, 1), positions.flatten())
    key, value = (part.unflatten(0, tokens.shape)[:, :, None] for part in (key, value))
    paths = torch.cat([paths[0], key], dim=2), torch.cat([paths[1], value], dim=2)
    return output(head, x, hidden, positions, context, paths, visible), paths


class CachedHead:
    """Keys and values of the confirmed rows of one decode; a node's path has those of its own drafts [F, S, G, C]."""

    def __init__(
        self, head: DraftHead, embedding: Float[Tensor, "V H"], room: int, *, window: int | None = None
    ) -> None:
        """`room` is the largest number of rows. A node attends to the last `window` keys (None: all)."""
        self.head, self.embedding, self.window = head, embedding, window
        shape = (room, head.config.num_kv_heads, head.config.head_dim)
        self.keys, self.values = head.fc.weight.new_empty(shape), head.fc.weight.new_empty(shape)
        self.confirmed = 0

    def context(self, drafted: int) -> Context:
        """Return the rows visible to a node after `drafted` drafts on its path."""
        first = 0 if self.window is None else max(0, self.confirmed + drafted - self.window)
        return self.keys[first : self.confirmed], self.values[first : self.confirmed]

    def confirm(self, aux_hidden_states: Float[Tensor, "R AH"], next_tokens: list[int]) -> Float[Tensor, "1 H"]:
        """Append rows with the target's features; the output of the last one predicts the first draft."""
        start, self.confirmed = self.confirmed, self.confirmed + len(next_tokens)
        positions = torch.arange(start, self.confirmed, device=aux_hidden_states.device)
        fused = self.head.fuse(aux_hidden_states)
        x = self.head.attention_input(self.embedding[next_tokens], fused)
        self.keys[start : self.confirmed], self.values[start : self.confirmed] = self.head.keys_values(x, positions)
        # The head has one layer: earlier rows matter only by their keys and values, so only the last is a query.
        x, hidden, last = x[None, -1:], fused[None, -1:], positions[None, -1:]
        return output(self.head, x, hidden, last, self.context(0), _one_tree(self.root()))[0]

    def root(self) -> Path:
        """Return the path of the last confirmed row, with no drafts yet."""
        return self.keys[None, :0], self.values[None, :0]

    def step(
        self, hidden: Float[Tensor, "F H"], tokens: Int[Tensor, " F"], path: Path
    ) -> tuple[Float[Tensor, "F H"], Path]:
        """Run the head on its own output and a drafted token; its key and value join the path's."""
        drafted = path[0].shape[1]
        positions, context = torch.full_like(tokens, self.confirmed + drafted), self.context(drafted + 1)
        outputs, (keys, values) = step(
            self.head, self.embedding, hidden[None], tokens[None], positions[None], context, _one_tree(path)
        )
        return outputs[0], (keys[0], values[0])


def _one_tree(path: Path) -> Paths:
    keys, values = path
    return keys[None], values[None]
