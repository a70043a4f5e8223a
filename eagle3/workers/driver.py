"""Hands out items to many workers, collects their results, and gives the items of a lost worker to others."""

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from eagle3.errors import InputError
from eagle3.workers.meter import Progress
from eagle3.workers.task import Keyed, Total
from eagle3.workers.worker_thread import Report

log = logging.getLogger(__name__)
LONGEST_WAIT_S = 60


@dataclass(frozen=True)
class Lost:
    """News of a worker whose process or node is gone."""

    reason: str


def wait_before_restart(losses: int) -> float:
    """Return the seconds until a worker starts again that was lost so many times in a row: 1, 2, 4 … 60."""
    return min(2.0 ** (losses - 1), LONGEST_WAIT_S)


class WorkerPool(Protocol):
    """Worker threads in other processes, by name."""

    def new_workers(self) -> Sequence[str]:
        """Return the workers that have joined since the last call."""

    def send(self, worker: str, items: Sequence[Keyed]) -> None:
        """Send items to a worker (`WorkerThread.exchange`), which is answered by one of `reports`."""

    def reports(self) -> Iterable[tuple[str, Report | Lost]]:
        """Wait a while for reports. A lost worker starts again with the next `send`."""

    def stop(self, worker: str) -> None:
        """Kill a worker."""

    def shutdown(self) -> None:
        """Let all workers stop their servers, then stop the workers."""


@dataclass
class WorkerState:
    items: dict[Hashable, Any] = field(default_factory=dict)  # sent, without a result so far
    shown: int = 0  # of `items`: those that the progress bar counts as done
    losses: int = 0  # since its last result
    restart_at: float | None = None  # lost, and not started again before
    host: str = ""
    ready: bool = False


class Driver:
    """Hands out every item until each has a result."""

    def __init__(
        self,
        pool: WorkerPool,
        items: Iterable[Keyed],
        progress: Progress,
        *,
        ahead: int,
        total: Total,
        restarts: int,
        wait: Callable[[int], float] = wait_before_restart,
    ) -> None:
        """`restarts`: how often in a row a worker may be lost without a result; for the others see `Workers`."""
        self.wait = wait
        self.pool, self.items, self.progress = pool, iter(items), progress
        self.ahead, self.left, self.restarts = ahead, total, restarts
        self.workers: dict[str, WorkerState] = {}
        self.returned: deque[Keyed] = deque()  # items of lost workers
        self.last_error = "there was none"

    def results(self) -> Iterator[list[Keyed]]:
        """Yield results as they come. Raises InputError if no worker is left."""
        try:
            while self._has_work():
                self._restart()
                for worker, report in self.pool.reports():
                    if worker not in self.workers:
                        continue
                    if isinstance(report, Lost):
                        self._handle_loss(worker, report.reason)
                    elif results := self._handle(worker, report):
                        yield results
        except BaseException:
            for worker in self.workers:
                self.pool.stop(worker)
            raise
        self.pool.shutdown()

    def _has_work(self) -> bool:
        """Add new workers; return whether any item is left."""
        for worker in self.pool.new_workers():
            self.workers[worker] = WorkerState()
            self._send(worker)
        if not self.workers:
            raise InputError(
                f"workers: all have failed (the last: {self.last_error}); what is finished is kept: when the cause is "
                f"removed, run the same command again"
            )
        if any(state.items for state in self.workers.values()):
            return True
        item = self._next()
        if item is not None:
            self.returned.appendleft(item)
        return item is not None

    def _send(self, worker: str) -> None:
        """Top up a worker's items once it is ready; near the end, split the rest evenly. With fewer items at a time,
        engines would run half empty: many items at once cost them little more than one."""
        state, new = self.workers[worker], list[Keyed]()
        most = self.ahead if state.ready else 0
        left = self.left() if callable(self.left) else self.left
        if left is not None:
            most = min(most, max(state.ready, math.ceil(left / len(self.workers))))
        while len(state.items) < most and (item := self._next()) is not None:
            state.items[item[0]] = item[1]
            new.append(item)
        self.pool.send(worker, new)

    def _next(self) -> Keyed | None:
        return self.returned.popleft() if self.returned else next(self.items, None)

    def _handle(self, worker: str, report: Report) -> list[Keyed]:
        state = self.workers[worker]
        state.host, state.ready = report.host, report.ready
        for line in report.warnings:
            log.warning("%s on %s: %s", worker, report.host, line)
        # The items that it held when it was considered lost are another worker's now.
        results = [(key, result) for key, result in report.results if key in state.items]
        for key, _ in results:
            del state.items[key]
        if results:
            state.losses = 0
            self.left = self.left - len(results) if isinstance(self.left, int) else self.left
        state.shown += report.ended - len(results)
        self.progress.note = f"{sum(each.ready for each in self.workers.values())} of {len(self.workers)} workers"
        self.progress.add(ended=report.ended, tokens=report.tokens)
        if report.error is None:
            self._send(worker)
        else:
            self._remove(worker, f"{worker} on {report.host}: {report.error}")
        return results

    def _handle_loss(self, worker: str, reason: str) -> None:
        state = self.workers[worker]
        state.losses, state.ready = state.losses + 1, False
        loss = f"{worker} on {state.host or 'an unknown node'} was lost with {len(state.items)} items ({reason})"
        if state.losses > self.restarts:
            self._remove(worker, f"{loss}, {state.losses} times without a result: workers.restarts={self.restarts}")
            return
        wait = self.wait(state.losses)
        log.warning("%s; other workers take over its work, and it restarts in %g s", loss, wait)
        self._take_back(state)
        state.restart_at = time.monotonic() + wait

    def _restart(self) -> None:
        for worker, state in self.workers.items():
            if state.restart_at is not None and time.monotonic() >= state.restart_at:
                state.restart_at = None
                self._send(worker)

    def _remove(self, worker: str, reason: str) -> None:
        self._take_back(self.workers.pop(worker))
        self.pool.stop(worker)
        self.last_error = reason
        if self.workers:
            log.warning("%s; the other %d continue", reason, len(self.workers))

    def _take_back(self, state: WorkerState) -> None:
        self.returned.extend(state.items.items())
        self.progress.add(ended=-state.shown)
        state.items, state.shown = {}, 0
