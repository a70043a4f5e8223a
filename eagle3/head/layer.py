"""How a training step runs the layer around attention: config key `layer`.

`PlainLayer` is the head's own methods on plain autograd: the judge of the fast one, `FusedLayer` in fused_layer.py.

Shapes: T tokens of the pack, N rows of a step, R trained rows, H hidden size, V target vocabulary, Q query heads, G
key/value heads, C channels.
"""

import logging
from collections.abc import Callable
from importlib.util import find_spec
from typing import Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor

from eagle3.errors import InputError
from eagle3.head.attention import KeysValues
from eagle3.head.draft_head import DraftHead

log = logging.getLogger(__name__)

NAMES = ("auto", "fused", "plain")
Projected = tuple[Float[Tensor, "R H"], Float[Tensor, "R Q C"], KeysValues]


class Layer(Protocol):
    """Made anew for every training step."""

    def fuse(self, aux: Float[Tensor, "T 3H"]) -> Float[Tensor, "T H"]:
        """What step 0 takes as the hidden state."""

    def project(
        self,
        hidden: Float[Tensor, "N H"],
        tokens: Int[Tensor, " N"],
        positions: Int[Tensor, " N"],
        rows: Int[Tensor, " R"] | None = None,
    ) -> Projected:
        """Hidden states and queries of `rows` (None: of all), keys and values of all; `tokens` are the next ones."""

    def output(self, hidden: Float[Tensor, "R H"], attended: Float[Tensor, "R Q C"]) -> Float[Tensor, "R H"]:
        """As `DraftHead.output`; `hidden` is what `project` returned."""

    def feedback(self, hidden: Float[Tensor, "R H"]) -> Float[Tensor, "R H"]:
        """As `DraftHead.feedback`."""


# From the head and the target's embedding [V, H].
MakeLayer = Callable[[DraftHead, Tensor], Layer]


class PlainLayer:
    def __init__(self, head: DraftHead, embedding: Float[Tensor, "V H"]) -> None:
        self.head, self.embedding = head, embedding
        self.fuse, self.output, self.feedback = head.fuse, head.output, head.feedback

    def project(
        self,
        hidden: Float[Tensor, "N H"],
        tokens: Int[Tensor, " N"],
        positions: Int[Tensor, " N"],
        rows: Int[Tensor, " R"] | None = None,
    ) -> Projected:
        x = self.head.attention_input(self.embedding[tokens], hidden)
        keys_values = self.head.keys_values(x, positions)
        if rows is not None:
            hidden, x, positions = (each.index_select(0, rows) for each in (hidden, x, positions))
        return hidden, self.head.queries(x, positions), keys_values


def require_known_layer(name: str) -> None:
    if name not in NAMES:
        raise InputError(f"layer={name} is none of {', '.join(NAMES)}; layer=auto takes the fastest that can run")


def choose_layer(name: str, *, device: torch.device) -> MakeLayer:
    """The layer of that name; `auto` takes the fused one where it pays, and the log says why.

    InputError where the named one cannot run.
    """
    from eagle3.head.fused_layer import FusedLayer  # which is a Layer, too

    require_known_layer(name)
    obstacle = _obstacle(device)
    if name == "auto":
        name = "plain" if obstacle or device.type != "cuda" else "fused"
        why = "the fastest of all" if name == "fused" else f"fused {obstacle or 'pays on a GPU alone'}"
        log.info("layer=auto takes %s: %s", name, why)
    elif name == "fused" and obstacle:
        raise InputError(f"layer=fused {obstacle}; layer=plain runs everywhere")
    return FusedLayer if name == "fused" else PlainLayer


def _obstacle(device: torch.device) -> str | None:
    """Why this run cannot use the fused layer; None if it can, as it always can on the CPU."""
    if device.type == "cuda" and torch.__version__ < "2.10":
        return f"needs PyTorch 2.10 or newer on a GPU, this is {torch.__version__}"
    if device.type == "cuda" and not find_spec("triton"):
        return "needs Triton on a GPU (a part of PyTorch's CUDA builds for Linux)"
    return None
