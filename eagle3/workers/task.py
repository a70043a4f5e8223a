"""Interfaces between a stage and its workers: items with keys go in, results with the same keys come out."""

from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol, TypeVar

from eagle3.workers.meter import Progress

Item = TypeVar("Item")
Keyed = tuple[Hashable, Any]  # the key of an item, and the item or its result


@dataclass(frozen=True)
class WorkerId:
    """The number of a worker; its ports and the name of its logs depend on it."""

    number: int = 0
    one_of_many: bool = False

    @property
    def name(self) -> str:
        return f"worker {self.number}"

    @property
    def folder(self) -> str:
        """The worker's subfolder in the folder of logs."""
        return f"worker-{self.number}" if self.one_of_many else "."


class Take(Protocol[Item]):
    """Gives a worker its items."""

    def __call__(self, count: int, *, wait: bool = True) -> list[Item]:
        """Return 1 to `count` items. An empty list means that no more items will come; with `wait=False`, only that
        none is there at the moment."""


def take_from(items: Iterable[Item], *, before: Iterable[Item] = ()) -> Take[Item]:
    """Return a `Take` of items that never have to be waited for; those in `before` come first."""
    iterator, first = iter(items), [*before]

    def take(count: int, *, wait: bool = True) -> list[Item]:
        taken = first[:count]
        del first[:count]
        return [*taken, *islice(iterator, count - len(taken))]

    return take


# The work of a stage, in one thread of a worker's process: takes all its items and yields one result for each, in any
# order. Raises InputError for what makes further work pointless.
Task = Callable[[Take[Keyed], Progress], Iterator[list[Keyed]]]

# Makes the task in the worker's process, ready inside `with`: its servers run, its target is loaded. Can be pickled.
Build = Callable[[WorkerId], AbstractContextManager[Task]]

Total = int | Callable[[], int | None] | None  # the number of items, or a function of those without a result


class Workers(Protocol):
    """Workers that process items at the same time."""

    def __call__(
        self, build: Build, items: Iterable[Keyed], progress: Progress, *, ahead: int, total: Total = None
    ) -> Iterator[list[Keyed]]:
        """Yield one result for each item, in any order; items of a lost worker go to another. A worker holds at most
        `ahead` items, and near the end of `total` only its share. Raises InputError if no worker can continue.

        `items` may end and have more later: they are asked again after each result, until there is nothing to do."""
