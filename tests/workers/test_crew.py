"""What the driver hands out, on a crew of the test's own."""

import random
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from worker_tasks import Squares

from eagle3.errors import InputError
from eagle3.workers import bench
from eagle3.workers.bench import Bench, Report
from eagle3.workers.crew import Driver, Worker
from eagle3.workers.here import Here
from eagle3.workers.meter import Meter, Progress, Tally
from eagle3.workers.task import Keyed, Place


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """The crews here visit one worker after the other, so that each would wait for those before it."""
    monkeypatch.setattr(bench, "WAIT_S", 0.01)


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
    assert sorted(given, key=int) == [*range(200)]  # type: ignore[arg-type]
    assert min(held[0]) >= 18


class ThreadWorker:
    """A worker in a thread of this process. `lost`: the chance that a visit finds it gone."""

    def __init__(self, task: Squares, place: Place, lost: float, drawn: random.Random) -> None:
        self.task, self.place, self.lost, self.drawn = task, place, lost, drawn
        self.name, self.bench, self.asked = place.name, Bench(task, place), list[Keyed]()

    def visit(self, items: Sequence[Keyed] | None) -> None:
        self.asked = list(items or ())

    def report(self) -> Report | None:
        if self.drawn.random() < self.lost:
            self.bench.visit(None)
            self.bench = Bench(self.task, self.place)
            return None
        return replace(self.bench.visit(self.asked), said=[])  # in one process, these are the driver's own warnings too

    def end(self) -> None:
        self.bench.visit(None)


class Threads:
    """A crew of such workers."""

    def __init__(self, task: Squares, count: int, lost: float) -> None:
        drawn = random.Random(0)
        self.workers = [ThreadWorker(task, Place(number, one_of_many=True), lost, drawn) for number in range(count)]
        self.new = list(self.workers)

    def come(self) -> list[ThreadWorker]:
        new, self.new = self.new, []
        return new

    def reports(self) -> Iterator[tuple[ThreadWorker, Report | None]]:
        return ((worker, worker.report()) for worker in self.workers)

    def go_home(self) -> None:
        for worker in self.workers:
            worker.end()


ITEMS: list[Keyed] = [(f"item {number}", number) for number in range(200)]
EXPECTED = {f"item {number}": number * number for number in range(200)}


def squares(
    task: Squares, progress: Progress, *, count: int = 3, lost: float = 0, restarts: int = 20
) -> dict[Any, int]:
    driver = Driver(Threads(task, count, lost), ITEMS, progress, ahead=10, total=200, restarts=restarts)
    given = [pair for results in driver.results() for pair in results]
    assert len(given) == len({key for key, _ in given})
    return dict(given)


def test_every_item_has_one_result() -> None:
    told = Tally()
    assert squares(Squares(), told) == EXPECTED and (told.ended, told.tokens) == (200, 2000)


def test_this_process_alone_gives_the_same() -> None:
    told = Tally()
    given = [pair for some in Here()(Squares(), iter(ITEMS), told, ahead=1) for pair in some]
    assert dict(given) == EXPECTED and told.ended == 200


def test_what_lost_workers_held_is_done_by_others_and_counted_once(caplog: pytest.LogCaptureFixture) -> None:
    with Meter(200, desc="squares", unit="number", of="tokens") as meter:
        assert squares(Squares(), meter, lost=0.2, restarts=1000) == EXPECTED
        assert meter.bar.n == 200 and meter.note.endswith(" of 3 workers")
    assert "was lost with" in caplog.text


def test_a_worker_that_is_always_lost_is_given_up() -> None:
    with pytest.raises(InputError, match=r"3 times without a result: workers\.restarts=2"):
        squares(Squares(), Tally(), count=1, lost=1, restarts=2)


def test_a_worker_that_cannot_start_is_named_and_the_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    assert squares(Squares(refused=frozenset([1])), Tally()) == EXPECTED
    assert "worker 1 on" in caplog.text and "there is no target here; the other 2 go on" in caplog.text


def test_workers_that_all_cannot_start_end_the_run_in_a_line() -> None:
    with pytest.raises(InputError, match=r"workers: none is left \(worker \d on .*: there is no target here\)"):
        squares(Squares(refused=frozenset(range(3))), Tally())


def test_a_fault_of_the_task_is_named(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(InputError, match=r"none is left \(worker \d on .*: ZeroDivisionError: by a test\)"):
        squares(Squares(broken=150), Tally())
    assert any(record.exc_info for record in caplog.records)  # the traceback is in the worker's log
