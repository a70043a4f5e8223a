"""The doors between a stage and its workers: items with keys go in, results with the same keys come out."""

from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from eagle3.workers.meter import Progress

Keyed = tuple[Hashable, Any]  # an item or its result, behind the item's key


@dataclass(frozen=True)
class Place:
    """Which worker this is. Workers of one machine have different numbers, and ports that follow from them."""

    number: int = 0
    one_of_many: bool = False

    @property
    def name(self) -> str:
        return f"worker {self.number}"

    @property
    def folder(self) -> str:
        """Return where this worker's logs go, in the folder of all logs."""
        return f"worker-{self.number}" if self.one_of_many else "."


class Task(Protocol):
    """The work of a stage, as one worker does it; lives in one thread of the worker's process."""

    def __call__(self, items: Iterator[Keyed], progress: Progress) -> Iterator[list[Keyed]]:
        """Yield results as they come, in any order, one for each item. `items` ends where the worker has none at hand:
        it is called again when there are some, and may ask `items` again before. What makes going on senseless is an
        InputError."""


# Makes the task in the worker's process, ready inside `with`: its servers run, its target is loaded. Can be pickled.
Build = Callable[[Place], AbstractContextManager[Task]]


class Workers(Protocol):
    """Those who work on items at the same time."""

    def __call__(
        self, build: Build, items: Iterable[Keyed], progress: Progress, *, ahead: int, total: int | None = None
    ) -> Iterator[list[Keyed]]:
        """Yield each item's result once, in any order: what was lost with a worker is done by another. A worker holds
        at most `ahead` items, and near the end of `total` only its share. InputError where nobody can go on."""
