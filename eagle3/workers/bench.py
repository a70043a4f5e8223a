"""Inside a worker's process: a thread at work, and what lies on its bench between two visits of the driver."""

import logging
import platform
import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from eagle3.errors import InputError
from eagle3.workers.meter import Tally
from eagle3.workers.task import Build, Keyed, Place

log = logging.getLogger(__name__)

WAIT_S = 1.0  # of a visit, for something to report
END_S = 60.0  # of the last visit, for servers to stop


@dataclass(frozen=True)
class Report:
    """What a worker tells on a visit. `error`: it has ended, and this is why."""

    host: str
    ready: bool
    results: list[Keyed] = field(default_factory=list)
    ended: int = 0
    tokens: int = 0
    said: list[str] = field(default_factory=list)  # its warnings
    error: str | None = None


class Bench:
    """A worker: `build` makes its task, in a thread of its own."""

    def __init__(self, build: Build, place: Place) -> None:
        self.build, self.place = build, place
        self.inbox: queue.SimpleQueue[Keyed | None] = queue.SimpleQueue()
        self.news = threading.Event()  # it is ready, has results or has failed
        self.results: queue.SimpleQueue[list[Keyed]] = queue.SimpleQueue()
        self.tally, self.said = Tally(), Said()
        self.ready = False
        self.error: str | None = None
        self.thread = threading.Thread(target=self._work, daemon=True, name=place.name)
        self.thread.start()

    def visit(self, items: Sequence[Keyed] | None) -> Report:
        """Leave items and take what is done, after a while if nothing is; None: no more will come."""
        for item in items or ():
            self.inbox.put(item)
        if items is None:
            self.inbox.put(None)
            self.thread.join(END_S)
        else:
            self.news.wait(WAIT_S)
        self.news.clear()  # before the rest is read: what comes later sets it again
        error = self.error  # before the results, which come before it
        return Report(
            host=platform.node(),
            ready=self.ready,
            results=[each for results in drained(self.results) for each in results],
            said=drained(self.said.lines),
            error=error,
            **self.tally.take(),
        )

    def _work(self) -> None:
        logging.getLogger().addHandler(self.said)
        try:
            with self.build(self.place) as task:
                self.ready = True
                self.news.set()
                while (first := self.inbox.get()) is not None:
                    for results in task(AtHand(first, self.inbox), self.tally):
                        self.results.put(results)
                        self.news.set()
        except InputError as error:
            self._end(str(error))
        except BaseException as error:  # whatever it is, the driver must hear of it
            log.exception("%s ends", self.place.name)
            self._end(f"{type(error).__name__}: {error}")

    def _end(self, why: str) -> None:
        self.error = why
        self.news.set()


def drained(lines: "queue.SimpleQueue[Any]") -> list[Any]:
    return [lines.get() for _ in range(lines.qsize())]


class AtHand:
    """An iterator that ends where nothing lies at hand, and goes on if it is asked again when something does."""

    def __init__(self, first: Keyed, inbox: "queue.SimpleQueue[Keyed | None]") -> None:
        self.first: Keyed | None = first
        self.inbox = inbox

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Keyed:
        item, self.first = self.first, None
        try:
            item = item or self.inbox.get_nowait()
        except queue.Empty:
            raise StopIteration from None
        if item is None:  # no more will come
            self.inbox.put(None)
            raise StopIteration
        return item


class Said(logging.Handler):
    """Keeps warnings for the driver."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno < logging.ERROR:  # an error ends the worker, which says so itself
            self.lines.put(record.getMessage())
