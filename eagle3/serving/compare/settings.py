"""What heads are compared in, and how: keys of conf/serve/compare.yaml."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from eagle3.draft_shape import num_draft_tokens
from eagle3.errors import InputError


class Shape(NamedTuple):
    """How a head drafts; `draft_tokens` counts the root, also of a chain."""

    steps: int
    topk: int
    draft_tokens: int

    def __str__(self) -> str:
        return f"chain of {self.steps}" if self.topk == 1 else f"tree {self.steps}/{self.topk}/{self.draft_tokens}"


class Way(NamedTuple):
    """One way to decode: the target's tokens at a temperature, drafts of a shape; `rejection`: drafts are sampled."""

    temperature: float
    shape: Shape
    rejection: bool = False

    @property
    def sampling(self) -> str:
        if self.temperature == 0:
            return "greedy"
        return f"T = {self.temperature:g}" + (", rejection sampling" if self.rejection else "")


@dataclass(frozen=True, kw_only=True)
class CompareSettings:
    """The keys of the same names in conf/serve/compare.yaml."""

    shapes: Sequence[Mapping[str, Any]]
    temperatures: Sequence[float]
    decoder: str
    batch_size: int
    batch_tokens: int
    positions: Sequence[int] | None

    def __post_init__(self) -> None:
        """Raise InputError for a shape that SGLang would change or refuse, and for positions that cannot be."""
        self.drafts()
        positions = list(self.positions or [])
        if positions != sorted(set(positions)):
            raise InputError(f"compare.positions={positions} must rise, e.g. [1024,4096]")
        if positions and self.decoder == "plain":
            raise InputError(
                f"compare.positions={positions} needs compare.decoder=batched: plain keeps no round's position"
            )

    def drafts(self) -> list[Shape]:
        """Return the shapes, each once."""
        try:
            found = [Shape(each["steps"], each["topk"], num_draft_tokens(**each)) for each in self.shapes]
        except InputError as error:
            raise InputError(f"compare.shapes: {error}") from None
        return [*dict.fromkeys(found)]

    def ways(self, *, rejection: bool = False) -> list[Way]:
        """Return every shape at every temperature; with `rejection` chains also as SGLang's rejection sampling."""
        found = [Way(temperature, shape) for temperature in dict.fromkeys(self.temperatures) for shape in self.drafts()]
        if not rejection:
            return found
        return [*found, *(Way(*way[:2], rejection=True) for way in found if way.temperature and way.shape.topk == 1)]

    @property
    def most_steps(self) -> int:
        return max(shape.steps for shape in self.drafts())
