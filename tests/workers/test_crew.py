"""What the driver hands out, on a crew of the test's own."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence

import pytest

from eagle3.workers.bench import Report
from eagle3.workers.crew import Driver, Worker
from eagle3.workers.meter import Tally
from eagle3.workers.task import Keyed


class Steady:
    """A worker that ends one item each time it is asked."""

    def __init__(self, name: str) -> None:
        self.name, self.held = name, deque[Keyed]()

    def visit(self, items: Sequence[Keyed] | None) -> None:
        self.held.extend(items or ())

    def end(self) -> None:
        raise AssertionError("nothing is wrong")


class InTurn:
    """A crew whose workers report one after the other; `slow` the last one only every third time."""

    def __init__(self, workers: Sequence[Steady], slow: bool) -> None:
        self.workers, self.slow, self.turn = workers, slow, 0

    def come(self) -> Sequence[Worker]:
        return self.workers if self.turn == 0 else []

    def reports(self) -> Iterable[tuple[Worker, Report | None]]:
        self.turn += 1
        for worker in self.workers:
            if self.slow and worker is self.workers[-1] and self.turn % 3:
                continue
            results = [worker.held.popleft()] if worker.held else []
            yield worker, Report(host="here", ready=True, results=results, ended=len(results))

    def go_home(self) -> None:
        pass


@pytest.mark.parametrize("slow", [False, True])
def test_workers_hold_all_they_may_when_the_last_item_is_handed_out(slow: bool) -> None:
    workers = [Steady("one"), Steady("other")]
    held = list[list[int]]()

    def items() -> Iterator[Keyed]:
        for number in range(200):
            yield number, number
        held.append([len(worker.held) for worker in workers])

    driver = Driver(InTurn(workers, slow), items(), Tally(), ahead=20, total=200, restarts=0)
    given = [key for results in driver.results() for key, _ in results]
    assert sorted(given, key=int) == [*range(200)]  # type: ignore[call-overload]
    assert min(held[0]) >= 18
