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


def described(returned: Any) -> str:
    """Return what a user's own method returned, for a message: shapes of tensors, types of anything else."""
    if isinstance(returned, Tensor):
        return f"Tensor{tuple(returned.shape)}"
    if isinstance(returned, list | tuple):
        return f"{type(returned).__name__}({', '.join(map(described, returned))})"
    return type(returned).__name__


class CheckedDrafting:
    """A decode of a kind, which may be the user's own: a wrong return of a method is one line."""

    def __init__(self, decode: Drafting, kind: str, hidden_size: int) -> None:
        self.decode, self.kind, self.hidden_size = decode, kind, hidden_size

    def confirm(self, aux_hidden_states: Float[Tensor, "N AH"], next_tokens: list[int]) -> Float[Tensor, "1 H"]:
        hidden = self.decode.confirm(aux_hidden_states, next_tokens)
        if not self._are_states(hidden, 1):
            raise self._wrong("confirm", hidden, f"the state of the last row, of shape (1, {self.hidden_size})")
        return hidden

    def root(self) -> Path:
        path = self.decode.root()
        if not _is_path(path, 1):
            raise self._wrong("root", path, "a tuple of tensors whose first dimension is 1")
        return path

    def step(
        self, hidden: Float[Tensor, "F H"], tokens: Int[Tensor, " F"], path: Path
    ) -> tuple[Float[Tensor, "F H"], Path]:
        made, nodes = self.decode.step(hidden, tokens, path), len(tokens)
        is_pair = isinstance(made, tuple) and len(made) == 2
        if not (is_pair and self._are_states(made[0], nodes) and _is_path(made[1], nodes)):
            states = f"the states, of shape ({nodes}, {self.hidden_size})"
            raise self._wrong(
                "step", made, f"{states}, and the path, a tuple of tensors whose first dimension is {nodes}"
            )
        return made

    def _are_states(self, states: Any, nodes: int) -> bool:
        return isinstance(states, Tensor) and states.shape == (nodes, self.hidden_size)

    def _wrong(self, method: str, returned: Any, rule: str) -> InputError:
        name = f"{type(self.decode).__name__}.{method}"
        return InputError(f"model.kind={self.kind}: its {name} returns {described(returned)}; return {rule}")


def _is_path(path: Any, nodes: int) -> bool:
    return isinstance(path, tuple) and all(isinstance(part, Tensor) and part.shape[:1] == (nodes,) for part in path)


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
        """Start the decode of `cached`, whose methods and returns are checked."""
        started = self.cached(head, embedding, room, window=window)
        if not isinstance(started, Drafting):
            raise InputError(
                f"model.kind={self.name}: its cached returns {type(started).__name__}; return an object with the "
                f"methods confirm, root and step"
            )
        return CheckedDrafting(started, self.name, head.config.hidden_size)

    def to_json(self, config: Any) -> dict[str, Any]:
        """Return the content of config.json, except for the architecture, the dtype and the captured layers."""
        return asdict(config)

    def from_json(self, config: dict[str, Any]) -> Any:
        """Read config.json; KeyError if something is missing."""
        return self.config_type(**{each.name: config[each.name] for each in fields(self.config_type)})
