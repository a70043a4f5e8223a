"""The head at decoding time: row by row over a cache, then down the paths of a tree of drafts.

Shapes: R rows that the target confirmed in a round, N all confirmed rows, F nodes that are drafted from, S steps of
their paths, A captured layers, H hidden size, AH = A · H, Q query heads, G key/value heads, P = Q / G, C channels, V
target vocabulary.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from eagle3.head.draft_head import DraftHead
from eagle3.head.kind import Path


class CachedHead:
    """Keys and values of the confirmed rows; a path holds those of a node's own drafts [F, S, G, C]."""

    def __init__(self, head: DraftHead, embedding: Float[Tensor, "V H"], room: int) -> None:
        self.head, self.embedding = head, embedding
        shape = (room, head.config.num_kv_heads, head.config.head_dim)
        self.keys, self.values = head.fc.weight.new_empty(shape), head.fc.weight.new_empty(shape)
        self.confirmed = 0  # rows in them

    def confirm(self, aux_hidden_states: Float[Tensor, "R AH"], next_tokens: list[int]) -> Float[Tensor, "1 H"]:
        """Append rows with the target's own features; the output of the last one predicts the first draft."""
        start, self.confirmed = self.confirmed, self.confirmed + len(next_tokens)
        positions = torch.arange(start, self.confirmed, device=aux_hidden_states.device)
        fused = self.head.fuse(aux_hidden_states)
        x = self.head.attention_input(self.embedding[next_tokens], fused)
        self.keys[start : self.confirmed], self.values[start : self.confirmed] = self.head.keys_values(x, positions)
        # One layer: earlier rows matter through their keys and values alone, so only the last is a query.
        query = self.head.queries(x[-1:], positions[-1:])
        return self.head.output(fused[-1:], self._attend(query, self.root()))

    def root(self) -> Path:
        return self.keys[None, :0], self.values[None, :0]

    def step(
        self, hidden: Float[Tensor, "F H"], tokens: Int[Tensor, " F"], path: Path
    ) -> tuple[Float[Tensor, "F H"], Path]:
        """Run the head on its own output and a drafted token; its key and value join the path's."""
        keys, values = path
        positions = torch.full_like(tokens, self.confirmed + keys.shape[1])
        hidden = self.head.feedback(hidden)
        x = self.head.attention_input(self.embedding[tokens], hidden)
        key, value = self.head.keys_values(x, positions)
        path = (torch.cat([keys, key[:, None]], dim=1), torch.cat([values, value[:, None]], dim=1))
        return self.head.output(hidden, self._attend(self.head.queries(x, positions), path)), path

    def _attend(self, query: Float[Tensor, "F Q C"], path: Path) -> Float[Tensor, "F Q C"]:
        """Read every confirmed row and the node's own path; both lie before it, so there is nothing to mask."""
        keys, values = self.keys[: self.confirmed], self.values[: self.confirmed]
        query = query.unflatten(1, (keys.shape[1], -1)) * query.shape[-1] ** -0.5  # (F, G, P, C)
        scores = [torch.einsum("fgpc,ngc->fgpn", query, keys), torch.einsum("fgpc,fsgc->fgps", query, path[0])]
        wide = torch.promote_types(values.dtype, torch.float32)
        weights = torch.cat(scores, dim=-1).softmax(-1, dtype=wide).to(values.dtype)
        confirmed = torch.einsum("fgpn,ngc->fgpc", weights[..., : self.confirmed], values)
        return (confirmed + torch.einsum("fgps,fsgc->fgpc", weights[..., self.confirmed :], path[1])).flatten(1, 2)
