"""How the unroll runs the head's layer around attention.

`PlainLayer` is the head's own methods on plain autograd: the judge of the fast one, `FusedLayer` in fast/.
layer_choice.py chooses.

Shapes: T tokens of the pack, N rows of a step, R trained rows, H hidden size, V target vocabulary, Q query heads, G
key/value heads, C channels.
"""

from collections.abc import Callable
from typing import Protocol

from jaxtyping import Float, Int
from torch import Tensor

from eagle3.head.attention import KeysValues
from eagle3.head.draft_head import DraftHead

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
