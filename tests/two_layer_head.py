"""A second kind of head, for tests alone: EAGLE-3 with one more decoder layer, written in the slowest plain way.

Shapes: R rows, N confirmed rows, F nodes, S steps of a path, H hidden size, G key/value heads, C channels, AH captured
states side by side, V target vocabulary, D draft vocabulary.
"""

from itertools import pairwise
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from eagle3.errors import InputError
from eagle3.head.batch import TttBatch
from eagle3.head.draft_head import MLP, DraftHead, HeadConfig
from eagle3.head.eagle3 import Eagle3
from eagle3.head.head import RMSNorm
from eagle3.head.kernels import KernelPlan
from eagle3.head.kind import Path


class TwoLayerHead(DraftHead):
    kind = "two_layer_head.TwoLayers"

    def __init__(self, config: HeadConfig, draft_ids: Int[Tensor, " D"]) -> None:
        super().__init__(config, draft_ids)
        hidden, width = config.hidden_size, config.num_heads * config.head_dim
        self.second_norm = RMSNorm(hidden, config.rms_norm_eps)
        self.second_mlp_norm = RMSNorm(hidden, config.rms_norm_eps)
        self.second_mlp = MLP(config)
        self.second_q = nn.Linear(hidden, width, bias=False)
        self.second_kv = nn.Linear(hidden, 2 * config.num_kv_heads * config.head_dim, bias=False)
        self.second_o = nn.Linear(width, hidden, bias=False)

    def second_output(self, hidden: Float[Tensor, "R H"], attended: Tensor) -> Float[Tensor, "R H"]:
        hidden = hidden + self.second_o(attended.flatten(-2))
        return hidden + self.second_mlp(self.second_mlp_norm(hidden))


class CachedTwoLayers:
    """Keys and values of both layers; nothing is written in place, so that gradients flow through a decode."""

    def __init__(self, head: TwoLayerHead, embedding: Float[Tensor, "V H"]) -> None:
        self.head, self.embedding = head, embedding
        empty = head.fc.weight.new_empty(0, head.config.num_kv_heads, head.config.head_dim)
        self.context: tuple[Tensor, ...] = (empty,) * 4

    def confirm(self, aux_hidden_states: Float[Tensor, "R AH"], next_tokens: list[int]) -> Float[Tensor, "1 H"]:
        hidden = self.head.fuse(aux_hidden_states)
        for row, token in enumerate(next_tokens):
            output, path = self._run(hidden[row : row + 1], torch.tensor([token]), self.root())
            self.context = tuple(torch.cat([kept, new[0]]) for kept, new in zip(self.context, path, strict=True))
        return output

    def root(self) -> Path:
        return tuple(kept[None, :0] for kept in self.context)

    def step(
        self, hidden: Float[Tensor, "F H"], tokens: Int[Tensor, " F"], path: Path
    ) -> tuple[Float[Tensor, "F H"], Path]:
        return self._run(self.head.feedback(hidden), tokens, path)

    def _run(
        self, hidden: Float[Tensor, "F H"], tokens: Int[Tensor, " F"], path: Path
    ) -> tuple[Float[Tensor, "F H"], Path]:
        head, nodes = self.head, len(hidden)
        positions = torch.full((nodes,), len(self.context[0]) + path[0].shape[1])
        x = head.attention_input(self.embedding[tokens], hidden)
        key, value = head.keys_values(x, positions)
        first = self._longer(path[:2], key, value)
        hidden = head.output(hidden, self._attend(head.queries(x, positions), self.context[:2], first))
        normed = head.second_norm(hidden)
        key, value = head.second_kv(normed).unflatten(-1, (2, -1, head.config.head_dim)).unbind(1)
        second = self._longer(path[2:], key, value)
        query = head.second_q(normed).unflatten(-1, (-1, head.config.head_dim))
        hidden = head.second_output(hidden, self._attend(query, self.context[2:], second))
        return hidden, (*first, *second)

    @staticmethod
    def _longer(path: Path, key: Tensor, value: Tensor) -> Path:
        parts = zip(path, (key, value), strict=True)
        return tuple(torch.cat([kept.expand(len(new), -1, -1, -1), new[:, None]], dim=1) for kept, new in parts)

    @staticmethod
    def _attend(query: Tensor, context: Path, path: Path) -> Tensor:
        keys, values = (
            torch.cat([kept[None].expand(len(query), -1, -1, -1), own], dim=1)
            for kept, own in zip(context, path, strict=True)
        )  # (F, N + S, G, C)
        grouped = query.unflatten(1, (keys.shape[2], -1))  # (F, G, Q / G, C)
        weights = (torch.einsum("fgpc,fngc->fgpn", grouped, keys) * query.shape[-1] ** -0.5).softmax(-1)
        return torch.einsum("fgpn,fngc->fgpc", weights, values).flatten(1, 2)


class TwoLayers(Eagle3):
    def new_head(self, config: HeadConfig, draft_ids: Int[Tensor, " D"]) -> TwoLayerHead:
        return TwoLayerHead(config, draft_ids)

    def unroll(
        self, head: TwoLayerHead, embedding: Float[Tensor, "V H"], batch: TttBatch, ttt_steps: int, kernels: KernelPlan
    ) -> list[Float[Tensor, "R H"]]:
        """Decode along the known tokens from every anchor, one after the other."""
        pack, outputs = batch.pack, []
        for start, stop in pairwise(pack.token_bounds):
            cached, done = self.cached(head, embedding, stop - start), start
            ids = [*pack.input_ids[start:stop].tolist(), *[0] * ttt_steps]
            for anchor in (each for each in batch.anchors.tolist() if start <= each < stop):
                known = slice(done, anchor + 1)
                tokens = ids[done - start + 1 : anchor - start + 2]
                hidden, path = cached.confirm(pack.aux_hidden_states[known], tokens), cached.root()
                chain, done = [hidden], anchor + 1
                for step in range(1, ttt_steps):
                    token = torch.tensor([ids[anchor - start + 1 + step]])
                    hidden, path = cached.step(hidden, token, path)
                    chain.append(hidden)
                outputs.append(torch.cat(chain))  # (K, H)
        return list(torch.stack(outputs, dim=1).unbind())

    def cached(
        self, head: TwoLayerHead, embedding: Float[Tensor, "V H"], room: int, *, window: int | None = None
    ) -> CachedTwoLayers:
        if window is not None:
            raise InputError("draft_window: this kind attends to all tokens")
        return CachedTwoLayers(head, embedding)

    def to_json(self, config: HeadConfig) -> dict[str, Any]:
        return super().to_json(config) | {"num_hidden_layers": 2}
