"""The door for kinds of heads: what training, decoding and export ask of one. EAGLE-3 and 3.1 are eagle3.py.

Shapes: R positions that are trained, H hidden size, V target and D draft vocabulary, K steps.
"""

from typing import Any, Protocol, runtime_checkable

from jaxtyping import Float, Int
from torch import Tensor, nn

from eagle3.data.pack import Batch, Pack
from eagle3.errors import InputError
from eagle3.head.draft_head import HeadConfig
from eagle3.head.kernels import KernelPlan


@runtime_checkable
class HeadKind(Protocol):
    """One kind of head. Its heads are modules with a `config`, `draft_ids` [D], a final `norm` and an `lm_head`.

    A kind is given its own heads and batches alone, so that its methods may name their types.
    """

    name: str  # in checkpoints and exported heads
    config_type: type[HeadConfig]

    def new_head(self, config: HeadConfig, draft_ids: Int[Tensor, " D"]) -> nn.Module:
        """Make a head whose weights are set by whoever asks for it."""

    def prepare(self, pack: Pack, ttt_steps: int) -> Batch:
        """Derive from a pack what is trained on it; runs on the CPU, in several reader threads at once."""

    def unroll(
        self, head: Any, embedding: Float[Tensor, "V H"], batch: Any, ttt_steps: int, kernels: KernelPlan
    ) -> list[Float[Tensor, "R H"]]:
        """Return the state of each step that `norm` and `lm_head` turn into logits, at the positions that are trained.

        A kind takes from the plan of kernels what it has a use for.
        """


_KINDS: dict[str, HeadKind] = {}


def register(kind: HeadKind) -> None:
    """Make a kind known under its name; its configs name it in KIND."""
    _KINDS[kind.name] = kind


def kind_named(name: str) -> HeadKind:
    if name not in _KINDS:
        raise InputError(
            f"a head of kind {name} is none of {', '.join(sorted(_KINDS))}; import the module that registers it"
        )
    return _KINDS[name]
