"""This process is the only worker."""

from collections.abc import Iterable, Iterator
from itertools import chain

from eagle3.workers.meter import Progress
from eagle3.workers.task import Build, Keyed, Place


class Here:
    """`Workers` of one. What is asked of it is done in order, and nothing is done twice."""

    def __call__(
        self, build: Build, items: Iterable[Keyed], progress: Progress, *, ahead: int, total: int | None = None
    ) -> Iterator[list[Keyed]]:
        waiting = iter(items)
        first = next(waiting, None)
        if first is None:  # nothing is loaded for it
            return
        with build(Place()) as task:
            yield from task(chain([first], waiting), progress)
