"""The driver of many workers: hands out items, takes results, and gives what a lost worker held to others."""

import logging
import math
from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from eagle3.errors import InputError
from eagle3.workers.bench import Report
from eagle3.workers.meter import Progress
from eagle3.workers.task import Keyed

log = logging.getLogger(__name__)


class Worker(Protocol):
    """A worker as its driver sees it."""

    name: str

    def visit(self, items: Sequence[Keyed] | None) -> None:
        """Begin a visit (bench.py); its report comes by `Crew.reports`."""

    def end(self) -> None:
        """Stop it at once."""


class Crew(Protocol):
    """The workers that there are."""

    def come(self) -> Sequence[Worker]:
        """Return those that are new since the last call."""

    def reports(self) -> Iterable[tuple[Worker, Report | None]]:
        """Wait a while for visits that have ended. None: the worker was lost; its next visit begins it anew."""

    def go_home(self) -> None:
        """Let all stop their servers, and end them."""


@dataclass
class Hand:
    """What the driver knows of a worker."""

    held: dict[Hashable, Any] = field(default_factory=dict)
    shown: int = 0  # of those that it holds: what the bar counts as ended
    losses: int = 0  # in a row, without a result
    host: str = ""
    ready: bool = False


class Driver:
    """Hands out every item until there is a result of each."""

    def __init__(
        self, crew: Crew, items: Iterable[Keyed], progress: Progress, *, ahead: int, total: int | None, restarts: int
    ) -> None:
        """`restarts`: how often in a row a worker may be lost without a result; for the others see `Workers`."""
        self.crew, self.items, self.progress = crew, iter(items), progress
        self.ahead, self.left, self.restarts = ahead, total, restarts
        self.hands: dict[Worker, Hand] = {}
        self.again: deque[Keyed] = deque()
        self.reason = "there was none"

    def results(self) -> Iterator[list[Keyed]]:
        """Yield results as they come. InputError when no worker is left."""
        try:
            while self._goes_on():
                for worker, report in self.crew.reports():
                    if worker not in self.hands:
                        continue
                    if report is None:
                        self._lost(worker)
                    elif results := self._taken(worker, report):
                        yield results
        except BaseException:
            for worker in self.hands:
                worker.end()
            raise
        self.crew.go_home()

    def _goes_on(self) -> bool:
        """Welcome new workers, and say whether anything is to be done."""
        for worker in self.crew.come():
            self.hands[worker] = Hand()
            self._visit(worker)
        if not self.hands:
            raise InputError(f"workers: none is left ({self.reason})")
        if any(hand.held for hand in self.hands.values()):
            return True
        item = self._next()
        if item is not None:
            self.again.appendleft(item)
        return item is not None

    def _visit(self, worker: Worker) -> None:
        """Fill its hands once it is ready for work; of the last items each holds as many. With fewer, engines would run
        half empty: many items at once cost them little more than one."""
        hand, new = self.hands[worker], list[Keyed]()
        most = self.ahead if hand.ready else 0
        if self.left is not None:
            most = min(most, max(hand.ready, math.ceil(self.left / len(self.hands))))
        while len(hand.held) < most and (item := self._next()) is not None:
            hand.held[item[0]] = item[1]
            new.append(item)
        worker.visit(new)

    def _next(self) -> Keyed | None:
        return self.again.popleft() if self.again else next(self.items, None)

    def _taken(self, worker: Worker, report: Report) -> list[Keyed]:
        hand = self.hands[worker]
        hand.host, hand.ready = report.host, report.ready
        for line in report.said:
            log.warning("%s on %s: %s", worker.name, report.host, line)
        # What it held when it was taken for lost is another's by now.
        results = [(key, result) for key, result in report.results if key in hand.held]
        for key, _ in results:
            del hand.held[key]
        if results:
            hand.losses = 0
            self.left = None if self.left is None else self.left - len(results)
        hand.shown += report.ended - len(results)
        self.progress.note = f"{sum(each.ready for each in self.hands.values())} of {len(self.hands)} workers"
        self.progress.add(ended=report.ended, tokens=report.tokens)
        if report.error is None:
            self._visit(worker)
        else:
            self._dismiss(worker, f"{worker.name} on {report.host}: {report.error}")
        return results

    def _lost(self, worker: Worker) -> None:
        hand = self.hands[worker]
        hand.losses, hand.ready = hand.losses + 1, False
        what = f"{worker.name} on {hand.host or 'its way'} was lost with {len(hand.held)} items"
        if hand.losses > self.restarts:
            self._dismiss(worker, f"{what}, {hand.losses} times without a result: workers.restarts={self.restarts}")
            return
        log.warning("%s; others do them, and it begins anew", what)
        self._take_back(hand)
        self._visit(worker)

    def _dismiss(self, worker: Worker, reason: str) -> None:
        self._take_back(self.hands.pop(worker))
        worker.end()
        self.reason = reason
        if self.hands:
            log.warning("%s; the other %d go on", reason, len(self.hands))

    def _take_back(self, hand: Hand) -> None:
        self.again.extend(hand.held.items())
        self.progress.add(ended=-hand.shown)
        hand.held, hand.shown = {}, 0
