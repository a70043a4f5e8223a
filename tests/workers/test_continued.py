"""Calls that share workers: the task is made once, and each call has the results of its own items."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from steady_pool import SteadyPool

from eagle3.workers.continued import Continued
from eagle3.workers.driver import Driver
from eagle3.workers.in_process import InProcess
from eagle3.workers.meter import Progress, ProgressBuffer
from eagle3.workers.task import Keyed, Take, Task, WorkerId, Workers


class Built:
    """A build that says when its task was made and ended."""

    def __init__(self) -> None:
        self.said: list[str] = []

    @contextmanager
    def __call__(self, worker: WorkerId) -> Iterator[Task]:
        self.said.append("made")
        yield doubled
        self.said.append("ended")


def doubled(take: Take[Keyed], progress: Progress) -> Iterator[list[Keyed]]:
    while items := take(3):
        progress.add(ended=len(items))
        yield [(key, 2 * item) for key, item in items]


def results(workers: Workers, build: Any, numbers: range, progress: ProgressBuffer) -> dict[Any, int]:
    items = ((number, number) for number in numbers)
    found = [each for some in workers(build, items, progress, ahead=2, total=len(numbers)) for each in some]
    assert len(found) == len(numbers)
    return dict(found)  # type: ignore[arg-type]


class TwoWorkers:
    """Workers of a driver, which holds several items at a time."""

    def __call__(self, build: Any, items: Any, progress: Progress, **settings: Any) -> Iterator[list[Keyed]]:
        with build(WorkerId()):
            yield from Driver(SteadyPool(slow=True), items, progress, restarts=0, **settings).results()


@pytest.mark.parametrize("kind", [InProcess, TwoWorkers])
def test_calls_share_one_task_that_ends_with_the_last(kind):
    build = Built()
    with Continued(kind) as workers:
        for numbers in (range(7), range(0), range(7, 8), range(8, 20)):
            progress = ProgressBuffer()
            assert [*sorted(results(workers, build, numbers, progress))] == [*numbers]
            assert progress.take()["ended"] == len(numbers)
        assert build.said == ["made"]
        workers.close()
        assert build.said == ["made", "ended"]
        assert [*results(workers, build, range(2), ProgressBuffer())] == [0, 1]
    assert build.said == ["made", "ended"] * 2


def test_nothing_is_made_for_no_items_and_an_error_ends_the_task_at_once():
    build = Built()
    with Continued(InProcess) as workers:
        assert results(workers, build, range(0), ProgressBuffer()) == {}
    assert build.said == []
    with pytest.raises(KeyError), Continued(InProcess) as workers:
        for _ in workers(build, ((number, number) for number in range(100)), ProgressBuffer(), ahead=2):
            raise KeyError
    assert build.said == ["made"]  # its block was left by the error
