"""A kind of draft head: how its heads are made, trained, run and written. Base of EAGLE-3's (eagle3.py) and of your own
(docs/how-to/own-head-kind.md).

Shapes: R anchors, F nodes that are drafted from, N confirmed rows, H hidden size, AH captured states side by side, V
target and D draft vocabulary.
"""

from dataclasses import asdict, fields
from typing import Any, Protocol, runtime_checkable

from jaxtyping import Float, Int
from torch import Tensor

from eagle3.data.pack import Pack
from eagle3.errors import InputError
from eagle3.head.batch import TttBatch, prepare_ttt
from eagle3.head.head import Head, HeadSizes
from eagle3.head.kernels import KernelPlan
from eagle3.target.facts import TargetConfig

Path = tuple[Tensor, ...]  # the state of drafted nodes; each tensor has one row per node


@runtime_checkable
class Drafting(Protocol):
    """One decode: rows that the target has confirmed, and steps down the paths of drafted trees."""

    def confirm(self, aux_hidden_states: Float[Tensor, "N AH"], next_tokens: list[int]) -> Float[Tensor, "1 H"]:
        """Append rows, each with the token after it; the state of the last one predicts the first draft."""

    def root(self) -> Path:
        """Return the path of the last confirmed row, with no drafts yet."""

    def step(
        self, hidden: Float[Tensor, "F H"], tokens: Int[Tensor, " F"], path: Path
    ) -> tuple[Float[Tensor, "F H"], Path]:
        """Return the states that predict the draft after each node, from the states that drafted `tokens`."""


class Kind:
    """A kind is given only its own heads and batches, so its methods may name their types."""

    name: str  # in checkpoints and exported heads: the import path that `kind_named` found it by
    config_type: type[HeadSizes]
    architecture: str  # in config.json of exported heads: the class that a server builds; by default the kind's own
    sglang_algorithm: str | None = None  # SGLang's --speculative-algorithm for its heads; None: no server knows them

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.architecture = vars(cls).get("architecture", cls.__name__)

    def new_config(self, target: TargetConfig, **settings: Any) -> Any:
        """Make the config of a new head; `settings` are keys of conf/model, None takes the target's value."""
        return self.config_type.for_target(target, **settings)

    def new_head(self, config: Any, draft_ids: Int[Tensor, " D"]) -> Head:
        """Make a head whose weights the caller sets."""
        raise NotImplementedError

    def most_steps(self, config: Any) -> int | None:
        """Return the most draft steps of a round, which are also the most steps of a training; None: any number."""
        return None

    def require_steps(self, config: Any, steps: int, *, setting: str = "steps", head: str = "the head") -> None:
        """Raise InputError for more steps than a head of this kind drafts."""
        most = self.most_steps(config)
        if most is not None and steps > most:
            key = setting.rpartition(" ")[2]
            raise InputError(f"{setting}={steps}: {head}, of kind {self.name}, drafts at most {most}; set {key}={most}")

    def prepare(self, pack: Pack, ttt_steps: int) -> TttBatch:
        """Derive the training batch from a pack; runs on the CPU, in several reader threads at once."""
        return prepare_ttt(pack, ttt_steps)

    def unroll(
        self, head: Any, embedding: Float[Tensor, "V H"], batch: TttBatch, ttt_steps: int, kernels: KernelPlan
    ) -> list[Float[Tensor, "R H"]]:
        """Return the state of each step at the trained positions, which `norm` and `lm_head` turn into logits.

        A kind may ignore parts of `kernels`."""
        raise NotImplementedError

    def cached(self, head: Any, embedding: Float[Tensor, "V H"], room: int, *, window: int | None = None) -> Drafting:
        """Start a decode of at most `room` confirmed rows, which drafts as `unroll` trained."""
        raise NotImplementedError

    def drafting(self, head: Any, embedding: Float[Tensor, "V H"], room: int, *, window: int | None = None) -> Drafting:
        """Return what `cached` does, after a look at its methods."""
        started = self.cached(head, embedding, room, window=window)
        if not isinstance(started, Drafting):
            raise InputError(
                f"model.kind={self.name}: its cached returns {type(started).__name__}; return an object with the "
                f"methods confirm, root and step"
            )
        return started

    def to_json(self, config: Any) -> dict[str, Any]:
        """Return the content of config.json, except for the architecture, the dtype and the captured layers."""
        return asdict(config)

    def from_json(self, config: dict[str, Any]) -> Any:
        """Read config.json; KeyError if something is missing."""
        return self.config_type(**{each.name: config[each.name] for each in fields(self.config_type)})
