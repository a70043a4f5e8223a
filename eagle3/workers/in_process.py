"""Workers that are this process alone."""

from collections.abc import Iterable, Iterator

from eagle3.workers.meter import Progress
from eagle3.workers.task import Build, Keyed, Total, WorkerId, take_from


class InProcess:
    """`Workers` that run the task in this process, on one item after the other."""

    def __call__(
        self, build: Build, items: Iterable[Keyed], progress: Progress, *, ahead: int, total: Total = None
    ) -> Iterator[list[Keyed]]:
        items = iter(items)
        first = next(items, None)
        if first is None:  # the target is not loaded
            return
        with build(WorkerId()) as task:
            yield from task(take_from(items, before=[first]), progress)
