"""The driver, with pools of the test's own."""

import itertools
import random
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
from steady_pool import SteadyPool

from eagle3.errors import InputError
from eagle3.workers import driver, worker_thread
from eagle3.workers.cluster import RayPool, connect, lost_actor_reason
from eagle3.workers.driver import Driver, Lost
from eagle3.workers.in_process import InProcess
from eagle3.workers.meter import Meter, Progress, ProgressBuffer
from eagle3.workers.task import Keyed, Take, Task, WorkerId
from eagle3.workers.worker_thread import Report, WorkerThread


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pools here ask one worker after the other, so that each would wait for those before it."""
    monkeypatch.setattr(worker_thread, "WAIT_S", 0.01)


@pytest.mark.parametrize("slow", [False, True])
def test_workers_hold_all_they_may_when_the_last_item_is_handed_out(slow):
    pool, held = SteadyPool(slow), list[list[int]]()

    def items() -> Iterator[Keyed]:
        for number in range(200):
            yield number, number
        held.append([*map(len, pool.held.values())])

    driver = Driver(pool, items(), ProgressBuffer(), ahead=20, total=200, restarts=0)
    given = [key for results in driver.results() for key, _ in results]
    assert sorted(given, key=int) == [*range(200)]  # type: ignore[arg-type]
    assert min(held[0]) >= 18


@dataclass(frozen=True)
class Squares:
    """A task. `refused`: workers that cannot start; `broken`: an item that no worker can do."""

    refused: frozenset[int] = field(default_factory=frozenset)
    broken: int | None = None

    def __call__(self, worker: WorkerId) -> AbstractContextManager[Task]:
        if worker.number in self.refused:
            raise InputError("there is no target here")
        return nullcontext(self._square)

    def _square(self, take: Take[Keyed], progress: Progress) -> Iterator[list[Keyed]]:
        while items := take(1):
            [(key, number)] = items
            if number == self.broken:
                raise ZeroDivisionError("by a test")
            progress.add(ended=1, tokens=10)
            yield [(key, number * number)]


class ThreadPool:
    """Workers in threads of this process. `lost`: the chance that a worker is gone when it is asked for its report."""

    def __init__(self, task: Squares, count: int, lost: float) -> None:
        self.task, self.lost, self.random = task, lost, random.Random(0)
        self.new = [WorkerId(number, one_of_many=True) for number in range(count)]
        self.threads = {worker.name: WorkerThread(task, worker) for worker in self.new}
        self.sent: dict[str, Sequence[Keyed]] = {}

    def new_workers(self) -> list[str]:
        new, self.new = self.new, []
        return [worker.name for worker in new]

    def send(self, worker: str, items: Sequence[Keyed]) -> None:
        self.sent[worker] = items

    def reports(self) -> Iterator[tuple[str, Report | Lost]]:
        return ((worker, self.report(worker)) for worker in self.threads)

    def report(self, worker: str) -> Report | Lost:
        thread = self.threads[worker]
        if self.random.random() < self.lost:
            thread.exchange(None)
            self.threads[worker] = WorkerThread(self.task, thread.worker)
            return Lost("by a test")
        return replace(thread.exchange(self.sent[worker]), warnings=[])  # here, these are the driver's own warnings too

    def stop(self, worker: str) -> None:
        self.threads[worker].exchange(None)

    def shutdown(self) -> None:
        for thread in self.threads.values():
            thread.exchange(None)


ITEMS: list[Keyed] = [(f"item {number}", number) for number in range(200)]
EXPECTED = {f"item {number}": number * number for number in range(200)}


def squares(
    task: Squares, progress: Progress, *, count: int = 3, lost: float = 0, restarts: int = 20
) -> dict[Any, int]:
    limits = {"ahead": 10, "total": 200, "restarts": restarts}
    driver = Driver(ThreadPool(task, count, lost), ITEMS, progress, **limits, wait=lambda losses: 0)
    given = [pair for results in driver.results() for pair in results]
    assert len(given) == len({key for key, _ in given})
    return dict(given)


def test_every_item_has_one_result_by_many_workers_as_by_this_process_alone():
    many, one = ProgressBuffer(), ProgressBuffer()
    assert squares(Squares(), many) == EXPECTED
    assert dict(pair for some in InProcess()(Squares(), iter(ITEMS), one, ahead=1) for pair in some) == EXPECTED
    assert (many.ended, many.tokens) == (one.ended, one.tokens) == (200, 2000)


def test_what_lost_workers_held_is_done_by_others_and_counted_once(caplog):
    with Meter(200, desc="squares", unit="number", of="tokens") as meter:
        assert squares(Squares(), meter, lost=0.3, restarts=1000) == EXPECTED
        assert meter.bar.n == 200 and meter.note.endswith(" of 3 workers")
    assert "items (by a test); other workers take over its work" in caplog.text


def test_results_that_come_at_once_are_given_no_rate(caplog):
    caplog.set_level("INFO")
    for seconds in (0.5, 60):
        with Meter(2, desc=f"{seconds} s", unit="number", of="tokens") as meter:
            meter.add(ended=1, tokens=600)
            meter.since -= seconds
            meter.add(ended=1, tokens=600)
    with Meter(2, desc="up to date", unit="number", of="tokens") as meter:
        meter.add(ended=2)
    assert caplog.messages == ["60 s: 10 tokens/s, counted from the first result"]


def test_a_worker_that_cannot_start_is_named_and_the_others_continue(caplog):
    assert squares(Squares(refused=frozenset([1])), ProgressBuffer()) == EXPECTED
    assert "worker 1 on" in caplog.text and "there is no target here; the other 2 continue" in caplog.text


@pytest.mark.parametrize(
    ("task", "workers", "reason"),
    [
        (Squares(refused=frozenset(range(3))), {}, r"worker \d on .*: there is no target here"),
        (Squares(broken=150), {}, r"worker \d on .*: ZeroDivisionError: by a test"),
        (Squares(), {"count": 1, "lost": 1, "restarts": 2}, r".*, 3 times without a result: workers\.restarts=2"),
    ],
)
def test_a_run_whose_workers_all_fail_ends_with_the_reason_of_the_last(task, workers, reason, caplog):
    with pytest.raises(InputError, match=rf"workers: all have failed \(the last: {reason}\); .*run the same command"):
        squares(task, ProgressBuffer(), **workers)
    # The traceback of a fault is in the worker's log.
    assert any(record.exc_info for record in caplog.records) == (task.broken is not None)


class DyingPool:
    """A worker that is lost whenever it is asked; each look at the reports takes a quarter of a second."""

    def __init__(self, clock: list[float]) -> None:
        self.clock, self.sent_at, self.asked = clock, list[float](), False

    def new_workers(self) -> list[str]:
        return ["worker 0"] if not self.sent_at else []

    def send(self, worker: str, items: Sequence[Keyed]) -> None:
        self.sent_at.append(self.clock[0])
        self.asked = True

    def reports(self) -> Iterator[tuple[str, Report | Lost]]:
        self.clock[0] += 0.25
        if self.asked:
            self.asked = False
            yield "worker 0", Lost("its node has died")

    def stop(self, worker: str) -> None:
        pass

    def shutdown(self) -> None:
        pass


def test_a_worker_that_is_lost_again_and_again_waits_longer_before_each_restart(monkeypatch, caplog):
    clock = [0.0]
    monkeypatch.setattr(driver.time, "monotonic", lambda: clock[0])
    pool = DyingPool(clock)
    with pytest.raises(InputError, match=r"was lost .*\(its node has died\), 10 times"):
        [*Driver(pool, ITEMS, ProgressBuffer(), ahead=10, total=200, restarts=9).results()]
    waits = [later - earlier for earlier, later in itertools.pairwise(pool.sent_at)]
    assert [int(wait) for wait in waits] == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert len(caplog.messages) == 9 and "restarts in 60 s" in caplog.messages[-1]


def test_a_cluster_that_is_not_there_or_too_small_is_told(tmp_path):
    pytest.importorskip("ray")
    with pytest.raises(InputError, match=r"workers\.address=127\.0\.0\.1:1: no Ray cluster answers there"):
        connect("127.0.0.1:1")
    pool = RayPool(Squares(), count=None, resources={"GPU": 1, "CPU": 1}, logs=tmp_path)
    nodes = [{"Alive": True, "Resources": {"CPU": 8}}]
    pool.ray = SimpleNamespace(nodes=lambda: nodes, cluster_resources=lambda: {"CPU": 8})
    with pytest.raises(InputError, match=r"a worker needs GPU 1, CPU 1, and no node .* on CPUs: workers\.gpus=0"):
        pool.new_workers()


def test_the_reason_of_a_loss_is_ray_s_own_in_a_line():
    message = (
        "The actor died unexpectedly before finishing this task.\n\tclass_name: Actor\n\tip: 10.0.0.1\n"
        "The actor is dead because its node has died. Node Id: 34cd\n\tthe actor's node was terminated: SIGTERM"
    )
    reason = "The actor is dead because its node has died. Node Id: 34cd the actor's node was terminated: SIGTERM"
    assert lost_actor_reason(message) == reason
    assert lost_actor_reason("The actor 12ab is unavailable: RPC error") == "The actor 12ab is unavailable: RPC error"
