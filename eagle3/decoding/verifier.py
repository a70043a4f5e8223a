"""The target's side of speculative decoding: one forward reads a tree of drafts, and rejected tokens are dropped.

Shapes: R rows that the target confirmed in a round, H hidden size, V target vocabulary.
"""

from functools import partial
from typing import Any, TypedDict, Unpack

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import DynamicCache

from eagle3.adapters.transformers import (
    branching_cache,
    keep_branch,
    keeps_keys_and_values,
    layer_input,
    next_logits,
    preallocated_cache,
    require_cache,
)
from eagle3.answers.generate import choose_tokens
from eagle3.target.model import Target


class Sampling(TypedDict):
    """How the target chooses its tokens, as `choose_tokens` takes it."""

    temperature: float
    top_p: float
    top_k: int


def verifier(target: Target, capture_layers: list[int], *, seed: int, **sampling: Unpack[Sampling]) -> "Verifier":
    require_cache(target.model, target.path)
    kind = Verifier if keeps_keys_and_values(target.model) else StepwiseVerifier
    return kind(target, capture_layers, seed, sampling)


class Verifier:
    """The target during one decode: its cache, and the captured states of the latest forward."""

    def __init__(self, target: Target, capture_layers: list[int], seed: int, sampling: Sampling) -> None:
        self.target = target
        self.capture_layers = capture_layers
        self.sampling = sampling
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
        """Read the tokens known since the last call and the drafts after them; return the drafts that the target
        chooses itself, then its next choice. `[[]]` drafts nothing.

        The paths of the tree are rows of a batch that share the cache, not one row with a tree mask. Each is plain text
        to the model, so windows, chunks, position-dependent scales and every attention kernel stay correct. Tokens on
        several paths are computed several times, and a branch costs a copy of the cache.
        """
        longest = max(map(len, paths))
        rows = [known + path + [0] * (longest - len(path)) for path in paths]  # nothing looks back at the padding
        logits = self._read(rows, last=longest + 1)  # (paths, longest + 1, V)
        chosen: list[int] = []
        row, agreeing = 0, list(range(len(paths)))
        while agreeing:
            row = agreeing[0]
            chosen.append(self._choose(logits[row, len(chosen)]))
            agreeing = [other for other in agreeing if paths[other][: len(chosen)] == chosen]
        self.kept = row, len(known) + len(chosen) - 1
        keep_branch(self.cache, *self.kept, read=len(rows[0]))
        return chosen

    def features(self) -> Float[Tensor, "R AH"]:
        """Return the captured states at the tokens that the latest `advance` added to the cache."""
        row, count = self.kept
        return torch.cat([self.inputs[layer][row, :count] for layer in self.capture_layers], dim=-1)

    def _empty_cache(self) -> DynamicCache:
        return branching_cache(self.target.model)

    def _read(self, rows: list[list[int]], *, last: int) -> Float[Tensor, "paths last V"]:
        input_ids = torch.tensor(rows, device=self.target.device)
        return next_logits(self.target.model, self.cache, last=last, input_ids=input_ids)

    def _choose(self, logits: Float[Tensor, " V"]) -> int:
        # One uniform number per token, drafted or not, so that sampled answers do not depend on the drafts.
        uniform = torch.rand(1, generator=self.generator, dtype=torch.float64).to(logits.device)
        return int(choose_tokens(logits[None].float(), uniform, **self.sampling))

    def _keep_input(self, layer: int, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        # Copied, because a model may update it in place; the layers of a balanced model are on several devices.
        self.inputs[layer] = layer_input(args, kwargs).to(self.target.device, copy=True)


class StepwiseVerifier(Verifier):
    """Verifier of targets with a recurrent state, which cannot forget a token: it reads only tokens that it has chosen.

    Each token costs a forward, drafted or not. The accept length is the same, but the time means nothing."""

    def advance(self, known: list[int], paths: list[list[int]]) -> list[int]:
        """Walk down the tree along the target's choices, one forward each, as far as they were drafted."""
        self.inputs = {}
        chosen: list[int] = []
        read = known
        while read:
            logits = self._read([read], last=1)  # (1, 1, V)
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
