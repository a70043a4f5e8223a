"""Runs a task in a thread of a worker's process and buffers its results until the driver asks for them."""

import logging
import platform
import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from eagle3.errors import InputError
from eagle3.workers.meter import ProgressBuffer
from eagle3.workers.task import Build, Keyed, WorkerId

log = logging.getLogger(__name__)

WAIT_S = 1.0  # for news, before an empty report
END_S = 60.0  # for servers to stop


@dataclass(frozen=True)
class Report:
    """News of a worker since its last report. `error`: the worker has ended, and this is the reason."""

    host: str
    ready: bool
    results: list[Keyed] = field(default_factory=list)
    ended: int = 0
    tokens: int = 0
    warnings: list[str] = field(default_factory=list)
    error: str | None = None


class WorkerThread:
    """Makes a task with `build` and runs it on the items that the driver sends."""

    def __init__(self, build: Build, worker: WorkerId) -> None:
        self.build, self.worker = build, worker
        self.items: queue.SimpleQueue[Keyed | None] = queue.SimpleQueue()  # None: no more items will come
        self.results: queue.SimpleQueue[list[Keyed]] = queue.SimpleQueue()
        self.news = threading.Event()  # the worker is ready, has results or has failed
        self.progress, self.warnings = ProgressBuffer(), WarningBuffer()
        self.ready = self.all_taken = False
        self.error: str | None = None
        self.thread = threading.Thread(target=self._work, daemon=True, name=worker.name)
        self.thread.start()

    def exchange(self, items: Sequence[Keyed] | None) -> Report:
        """Queue items and report, at the latest after WAIT_S. None ends the worker once it has done all its items."""
        if items is None:
            self.items.put(None)
            self.thread.join(END_S)
        else:
            for item in items:
                self.items.put(item)
            self.news.wait(WAIT_S)
        self.news.clear()  # before reading the rest: whatever comes later sets it again
        error = self.error  # before reading the results, which were put before it
        return Report(
            host=platform.node(),
            ready=self.ready,
            results=[each for results in drained(self.results) for each in results],
            warnings=drained(self.warnings.lines),
            error=error,
            **self.progress.take(),
        )

    def _work(self) -> None:
        logging.getLogger().addHandler(self.warnings)
        try:
            with self.build(self.worker) as task:
                self.ready = True
                self.news.set()
                for results in task(self._take, self.progress):
                    self.results.put(results)
                    self.news.set()
        except InputError as error:
            self.error = str(error)
        except BaseException as error:  # the driver must hear of any
            log.exception("%s ends", self.worker.name)
            self.error = f"{type(error).__name__}: {error}"
        finally:
            logging.getLogger().removeHandler(self.warnings)
            self.news.set()

    def _take(self, count: int, *, wait: bool = True) -> list[Keyed]:
        """See `task.Take`."""
        taken: list[Keyed] = []
        while len(taken) < count and not self.all_taken:
            try:
                item = self.items.get(block=wait and not taken)
            except queue.Empty:
                break
            if item is None:
                self.all_taken = True
            else:
                taken.append(item)
        return taken


def drained(lines: "queue.SimpleQueue[Any]") -> list[Any]:
    return [lines.get() for _ in range(lines.qsize())]


class WarningBuffer(logging.Handler):
    """Keeps warnings for the driver. An error ends the worker, and is in its report."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno < logging.ERROR:
            self.lines.put(record.getMessage())
