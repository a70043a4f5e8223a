"""The door for kinds of heads: what training, decoding and export ask of one. EAGLE-3 and 3.1 are eagle3.py.

Shapes: R positions that are trained or confirmed, F drafted nodes, AH captured states side by side, H hidden size, V
target and D draft vocabulary.
"""

from typing import Any, Protocol, runtime_checkable

from jaxtyping import Float, Int
from torch import Tensor

from eagle3.data.pack import Batch, Pack
from eagle3.errors import InputError
from eagle3.head.draft_head import HeadConfig
from eagle3.head.kernels import KernelPlan

Path = tuple[Tensor, ...]  # what drafted nodes have of their own; each tensor begins with one row a node


class CachedHead(Protocol):
    """A head during one decode."""

    def confirm(self, aux_hidden_states: Float[Tensor, "R AH"], next_tokens: list[int]) -> Float[Tensor, "1 H"]:
        """Append rows with the target's own features; the output of the last one predicts the first draft."""

    def root(self) -> Path:
        """Return the path of the last confirmed row: nothing is drafted behind it yet."""

    def step(
        self, hidden: Float[Tensor, "F H"], tokens: Int[Tensor, " F"], path: Path
    ) -> tuple[Float[Tensor, "F H"], Path]:
        """Run nodes of the tree on the output that drafted them and their tokens."""


@runtime_checkable
class HeadKind(Protocol):
    """One kind of head. Its heads are modules with a `config`, `draft_ids` [D], a final `norm` and an `lm_head`.

    A kind is given its own heads and batches alone, so that its methods may name their types.
    """

    name: str  # in checkpoints and exported heads
    architecture: str  # in config.json of exported heads
    config_type: type[HeadConfig]

    def new_head(self, config: HeadConfig, draft_ids: Int[Tensor, " D"]) -> Any:
        """Make a head whose weights are set by whoever asks for it."""

    def prepare(self, pack: Pack, ttt_steps: int) -> Batch:
        """Derive from a pack what is trained on it; runs on the CPU, in several reader threads at once."""

    def unroll(
        self, head: Any, embedding: Float[Tensor, "V H"], batch: Any, ttt_steps: int, kernels: KernelPlan
    ) -> list[Float[Tensor, "R H"]]:
        """Return the state of each step that `norm` and `lm_head` turn into logits, at the positions that are trained.

        A kind takes from the plan of kernels what it has a use for.
        """

    def cached(self, head: Any, embedding: Float[Tensor, "V H"], room: int) -> CachedHead:
        """Begin a decode with room for so many confirmed rows."""

    def to_json(self, config: Any) -> dict[str, Any]:
        """Return what config.json says of a head, but for its architecture, its dtype and the captured layers."""

    def from_json(self, config: dict[str, Any]) -> HeadConfig:
        """Read config.json; KeyError or TypeError where it lacks something."""


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


def kind_of_architecture(architectures: list[str] | None) -> HeadKind | None:
    """Return the kind that config.json names, None where no kind goes by that name."""
    return next((kind for kind in _KINDS.values() if [kind.architecture] == architectures), None)
