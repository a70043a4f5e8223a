"""Interface by which the unroll runs the head's layer around attention.

`PlainLayer` is the head's own methods on plain autograd: the reference for `FusedLayer` in fast/.
kernels.py chooses.

Shapes: T tokens of the pack, R anchors, H hidden size, AH = A · H of A captured layers, V target vocabulary, Q query
heads, G key/value heads, C channels.
"""

from collections.abc import Callable

from jaxtyping import Float, Int
from torch import Tensor

from eagle3.head.attention import KeysValues
from eagle3.head.draft_head import DraftHead

Projected = tuple[Float[Tensor, "R H"], Float[Tensor, "R Q C"], KeysValues]


class PlainLayer:
    """The head's layer without its attention, built for every training step. `FusedLayer` overrides every method."""

    def __init__(self, head: DraftHead, embedding: Float[Tensor, "V H"]) -> None:
        self.head, self.embedding = head, embedding

    def fuse(self, aux_hidden_states: Float[Tensor, "T AH"]) -> Float[Tensor, "T H"]:
        """Return the hidden state of step 0."""
        return self.head.fuse(aux_hidden_states)

    def project_context(
        self,
        hidden: Float[Tensor, "T H"],
        tokens: Int[Tensor, " T"],
        positions: Int[Tensor, " T"],
        anchors: Int[Tensor, " R"],
    ) -> Projected:
        """Return hidden states and queries of anchors, keys and values of all positions. `tokens` are the next ones."""
        x = self.head.attention_input(self.embedding[tokens], hidden)
        keys_values = self.head.keys_values(x, positions)
        hidden, x, positions = (each.index_select(0, anchors) for each in (hidden, x, positions))
        return hidden, self.head.queries(x, positions), keys_values

    def project_step(
        self, hidden: Float[Tensor, "R H"], tokens: Int[Tensor, " R"], positions: Int[Tensor, " R"], step: int
    ) -> Projected:
        """Return the same at step 1, 2, …, all at the anchors only; `hidden` is the latest result of `output`."""
        hidden = self.head.feedback(hidden)
        x = self.head.attention_input(self.embedding[tokens], hidden)
        return hidden, self.head.queries(x, positions), self.head.keys_values(x, positions)

    def output(self, hidden: Float[Tensor, "R H"], attended: Float[Tensor, "R Q C"]) -> Float[Tensor, "R H"]:
        """Compute `DraftHead.output`; `hidden` comes from `project_context` or `project_step`."""
        return self.head.output(hidden, attended)


MakeLayer = Callable[[DraftHead, Tensor], PlainLayer]  # from the head and the target's embedding [V, H]
