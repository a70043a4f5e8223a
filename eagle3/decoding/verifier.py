"""The target's side of speculative decoding: one forward reads a tree of drafts, and what it rejects is forgotten.

Shapes: R rows that the target confirmed in a round, H hidden size, V target vocabulary.
"""

from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import DynamicCache

from eagle3.answers.cache import (
    WITHOUT_CACHE,
    PreallocatedLayer,
    forward_with_cache,
    keeps_keys_and_values,
    preallocated_cache,
    require_cache,
)
from eagle3.answers.sampling import choose_tokens
from eagle3.target.capture import layer_input
from eagle3.target.model import Target


def verifier(target: Target, capture_layers: list[int], temperature: float, seed: int) -> "Verifier":
    """Return the one that fits what the target keeps of its past."""
    require_cache(target.model, target.path)
    plain = keeps_keys_and_values(DynamicCache(config=target.model.config))
    return (Verifier if plain else StepwiseVerifier)(target, capture_layers, temperature, seed)


class Verifier:
    """The target during one decode: its cache, and what its captured layers read in the latest forward."""

    def __init__(self, target: Target, capture_layers: list[int], temperature: float, seed: int) -> None:
        self.target = target
        self.capture_layers = capture_layers
        self.temperature = temperature
        self.generator = torch.Generator().manual_seed(seed)
        self.cache = self._empty_cache()
        self.inputs: dict[int, Tensor] = {}
        self.handles: list[RemovableHandle] = []
        self.kept = (0, 0)  # path and number of its tokens that the latest walk kept

    def __enter__(self) -> "Verifier":
        for layer in self.capture_layers:
            hook = partial(self._keep_input, layer)
            self.handles.append(self.target.layers[layer].register_forward_pre_hook(hook, with_kwargs=True))
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self.handles:
            handle.remove()

    def advance(self, known: list[int], paths: list[list[int]]) -> list[int]:
        """Read the tokens known since the last time, and the drafts behind them; return those drafts that are the
        target's own choice, then its next choice. `[[]]` drafts nothing.

        The paths of the tree are rows of a batch that share the cache, not one row with a tree mask: to the model each
        is plain text, so windows, chunks, position-dependent scales and every attention kernel stay right. Tokens on
        several paths are computed several times, and a branch costs a copy of the cache.
        """
        longest = max(map(len, paths))
        rows = [known + path + [0] * (longest - len(path)) for path in paths]  # nothing looks back at the padding
        logits = forward_with_cache(
            self.target.model,
            self.cache,
            input_ids=torch.tensor(rows, device=self.target.device),
            logits_to_keep=longest + 1,
        ).logits  # (paths, longest + 1, V)
        chosen: list[int] = []
        row, agreeing = 0, list(range(len(paths)))
        while agreeing:
            row = agreeing[0]
            chosen.append(self._choose(logits[row, len(chosen)]))
            agreeing = [other for other in agreeing if paths[other][: len(chosen)] == chosen]
        self.kept = row, len(known) + len(chosen) - 1
        for layer in self.cache.layers:
            if isinstance(layer, _BranchingLayer):
                layer.keep(*self.kept, read=len(rows[0]))
        return chosen

    def features(self) -> Float[Tensor, "R AH"]:
        """What the captured layers read at the tokens that the latest call of `advance` added to the cache."""
        row, count = self.kept
        return torch.cat([self.inputs[layer][row, :count] for layer in self.capture_layers], dim=-1)

    def _empty_cache(self) -> DynamicCache:
        cache = DynamicCache(config=self.target.model.config)
        cache.layers = [layer if type(layer).__name__ == WITHOUT_CACHE else _BranchingLayer() for layer in cache.layers]
        return cache

    def _choose(self, logits: Float[Tensor, " V"]) -> int:
        # One uniform a token, whether it was drafted or not: sampled answers do not depend on the drafts.
        uniform = torch.rand(1, generator=self.generator, dtype=torch.float64).to(logits.device)
        return int(choose_tokens(logits[None].float(), uniform, temperature=self.temperature, top_p=1.0, top_k=0))

    def _keep_input(self, layer: int, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        # Copied, because a model may go on in place; the layers of a balanced model lie on several devices.
        self.inputs[layer] = layer_input(args, kwargs).to(self.target.device, copy=True)


class StepwiseVerifier(Verifier):
    """For targets with a state, out of which no token can be taken back: it reads nothing but what it has chosen.

    Each token costs a forward, drafted or not; what is accepted is the same, and no speed is measured by it."""

    def advance(self, known: list[int], paths: list[list[int]]) -> list[int]:
        """Walk down the tree by the target's own choices, one forward each, as far as they were drafted."""
        self.inputs = {}
        chosen: list[int] = []
        read = known
        while read:
            logits = forward_with_cache(
                self.target.model,
                self.cache,
                input_ids=torch.tensor([read], device=self.target.device),
                logits_to_keep=1,
            ).logits  # (1, 1, V)
            chosen.append(self._choose(logits[0, -1]))
            read = chosen[-1:] if any(path[: len(chosen)] == chosen for path in paths) else []
        self.kept = 0, len(known) + len(chosen) - 1
        return chosen

    def _empty_cache(self) -> DynamicCache:
        return preallocated_cache(self.target.model)

    def _keep_input(self, layer: int, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        earlier = self.inputs.get(layer)
        super()._keep_input(layer, module, args, kwargs)
        if earlier is not None:
            self.inputs[layer] = torch.cat([earlier, self.inputs[layer]], dim=1)


class _BranchingLayer(PreallocatedLayer):
    """One layer's keys and values, from which one forward may branch and of which the rejected end is forgotten.

    Windows are kept whole: their own kind of layer has dropped what a rejected token had pushed out."""

    branches: tuple[Tensor, Tensor] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if len(key_states) == 1:
            self.branches = None
            return super().update(key_states, value_states, *args, **kwargs)
        self.branches = key_states, value_states
        return self._branched(self.keys, key_states), self._branched(self.values, value_states)

    def keep(self, row: int, count: int, *, read: int) -> None:
        """Of the `read` tokens of the latest forward only the first `count` of this row ever were."""
        if self.branches is None:
            self.used -= read - count
        else:
            keys, values = (states[row : row + 1, :, :count] for states in self.branches)
            super().update(keys, values)

    def _branched(self, kept: Tensor, states: Tensor) -> Tensor:
        return torch.cat([kept[:, :, : self.used].expand(len(states), -1, -1, -1), states], dim=-2)
