"""Workers on this machine: a process for each GPU, or for some cores."""

import logging
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path

from eagle3.errors import InputError
from eagle3.workers.bench import END_S, WAIT_S, Bench, Report
from eagle3.workers.crew import Driver
from eagle3.workers.meter import Progress
from eagle3.workers.task import Build, Keyed, Place

SPAWN = multiprocessing.get_context("spawn")  # a fork would share CUDA, locks and threads
VISIBLE = "CUDA_VISIBLE_DEVICES"


class Processes:
    """`Workers` in processes of their own. Settings are the keys of conf/workers/processes.yaml."""

    def __init__(self, *, count: int | None, gpus: int, restarts: int, logs: Path) -> None:
        """`gpus` of each; `count` None: as many as there are GPUs for."""
        devices = visible_devices() if gpus else []
        most = len(devices) // gpus if gpus else None
        if count is None and most is None:
            raise InputError("workers.count=null and no GPU is to be used; say how many: workers.count=2")
        self.count = most if count is None else count
        if not self.count or (most is not None and self.count > most):
            raise InputError(
                f"workers.count={self.count}: this machine has {len(devices)} GPUs, and each worker takes {gpus}; "
                f"choose fewer, or workers=here"
            )
        self.devices = [devices[place * gpus : (place + 1) * gpus] if gpus else None for place in range(self.count)]
        self.restarts, self.logs = restarts, logs

    def __call__(
        self, build: Build, items: Iterable[Keyed], progress: Progress, *, ahead: int, total: int | None = None
    ) -> Iterator[list[Keyed]]:
        workers = [
            Process(build, Place(number, one_of_many=True), devices, self.logs)
            for number, devices in enumerate(self.devices)
        ]
        driver = Driver(Room(workers), items, progress, ahead=ahead, total=total, restarts=self.restarts)
        return driver.results()


def visible_devices() -> list[str]:
    """Return the GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    import torch  # seconds

    count = torch.cuda.device_count()
    named = [each for each in os.environ.get(VISIBLE, "").split(",") if each]
    return named[:count] if named else [str(number) for number in range(count)]


class Process:
    """A `Worker`, started with its first visit and with the first after it was lost."""

    def __init__(self, build: Build, place: Place, devices: list[str] | None, logs: Path) -> None:
        self.build, self.place, self.devices = build, place, devices
        self.name = place.name
        self.log = logs / f"worker-{place.number}.log"
        self.process: multiprocessing.process.BaseProcess | None = None
        self.connection: Connection | None = None
        self.ready = False

    def visit(self, items: Sequence[Keyed] | None) -> None:
        if self.process is None:
            self._start()
        assert self.connection is not None
        with suppress(OSError):  # it is gone: `reports` finds out
            self.connection.send(items)

    def report(self) -> Report | None:
        """Return what the visit ended with, None if it did not."""
        assert self.connection is not None
        try:
            report: Report = self.connection.recv()
        except (EOFError, OSError):
            self.end()
            return None
        self.ready = report.ready
        return report

    def end(self) -> None:
        process, self.process, self.ready = self.process, None, False
        if process is not None:
            process.kill()
            process.join()
            assert self.connection is not None
            self.connection.close()

    def _start(self) -> None:
        self.connection, theirs = SPAWN.Pipe()
        arguments = (theirs, self.build, self.place, self.devices, self.log)
        self.process = SPAWN.Process(target=work, args=arguments, name=self.name, daemon=True)
        self.process.start()
        theirs.close()


class Room:
    """The `Crew` of this machine's processes."""

    def __init__(self, workers: list[Process]) -> None:
        self.workers = workers
        self.new = list(workers)

    def come(self) -> list[Process]:
        new, self.new = self.new, []
        return new

    def reports(self) -> list[tuple[Process, Report | None]]:
        by_connection = {worker.connection: worker for worker in self.workers if worker.process is not None}
        told = wait([each for each in by_connection if each is not None], timeout=WAIT_S)
        return [(by_connection[each], by_connection[each].report()) for each in told if isinstance(each, Connection)]

    def go_home(self) -> None:
        for worker in self.workers:
            if worker.ready:
                worker.visit(None)
        for worker in self.workers:
            if worker.ready and worker.process is not None:
                worker.process.join(END_S)
            worker.end()


def work(connection: Connection, build: Build, place: Place, devices: list[str] | None, log: Path) -> None:
    """Be a worker until the driver sends None or is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the driver
    log_to(log)
    if devices is not None:
        os.environ[VISIBLE] = ",".join(devices)
    bench = Bench(build, place)
    try:
        while True:
            items = connection.recv()
            report = bench.visit(items)
            if items is None:
                return
            connection.send(report)
    except (EOFError, OSError):
        os._exit(1)  # servers have a guard of their own


def log_to(path: Path) -> None:
    """Let all that this process prints go to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr, force=True
    )
