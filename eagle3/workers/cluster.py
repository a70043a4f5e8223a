"""Workers on the nodes of a Ray cluster, one actor each.

Ray restarts a lost actor, on another node if its own is gone; the failed call to the actor reports the loss.
"""

import logging
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Unpack

import eagle3
from eagle3.errors import InputError, first_line, printable, require_packages
from eagle3.settings.precomputing import RaySettings
from eagle3.workers.driver import Driver, Lost
from eagle3.workers.meter import Progress
from eagle3.workers.task import Build, Keyed, Total, WorkerId
from eagle3.workers.worker_thread import END_S, WAIT_S, Report, WorkerThread

log = logging.getLogger(__name__)

LOOK_S = 5.0  # between two searches for new nodes
CONNECT_S = 10.0
PROPERTY = re.compile(r"\t(class_name|actor_id|pid|name|namespace|ip): ")
LONGEST_REASON = 300


class OnRay:
    """`Workers` on a cluster. Settings are the keys of conf/workers/ray.yaml."""

    def __init__(self, *, logs: Path, **settings: Unpack[RaySettings]) -> None:
        require_packages("ray", extra="ray", needed_by="workers=ray")
        self.address, self.count = settings["address"], settings["count"]
        self.restarts, self.logs = settings["restarts"], logs
        self.resources: dict[str, Any] = {"GPU": settings["gpus"], "CPU": settings["cpus"]}  # of each worker

    def __call__(
        self, build: Build, items: Iterable[Keyed], progress: Progress, *, ahead: int, total: Total = None
    ) -> Iterator[list[Keyed]]:
        import ray

        connect(self.address)
        try:
            pool = RayPool(build, count=self.count, resources=self.resources, logs=self.logs)
            yield from Driver(pool, items, progress, ahead=ahead, total=total, restarts=self.restarts).results()
        except ray.exceptions.RaySystemError as error:
            raise InputError(
                f"the Ray cluster is gone ({first_line(error)}); run again: what is finished is kept"
            ) from None
        finally:
            ray.shutdown()


def connect(address: str | None) -> None:
    """Connect to a running cluster: RAY_ADDRESS or this machine's where `address` is None, and if there is none, make
    this machine one. Its workers run our own code, whatever a node has installed."""
    import ray

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    named = address or os.environ.get("RAY_ADDRESS")
    if named and (reason := unreachable(named)):
        raise InputError(no_cluster(named, reason))
    if not named and (noted := noted_cluster()) and unreachable(noted):
        log.warning("the last Ray cluster of this machine, at %s, is gone: this machine becomes a new one", noted)
        address = "local"
    code = {"py_modules": [str(Path(eagle3.__file__).parent)]}
    on_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address, runtime_env=code, log_to_driver=False, logging_level=logging.ERROR, configure_logging=True)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise InputError(no_cluster(address, first_line(error))) from None
    finally:
        in_main = threading.current_thread() is threading.main_thread()  # only it may set handlers
        if in_main and on_sigterm is not None:  # None: not set from Python
            signal.signal(signal.SIGTERM, on_sigterm)  # Ray's own prints a stack and aborts


def unreachable(address: str) -> str | None:
    """Return why a host and port are unreachable, which Ray itself tries for many minutes; None if they are not."""
    host, separator, port = address.removeprefix("ray://").rpartition(":")
    if separator:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()
        except (OSError, ValueError, OverflowError) as error:
            return str(error)
    return None


def noted_cluster() -> str | None:
    """Return the address of the last cluster that was started here: Ray takes it where none is named."""
    try:
        return Path(os.environ.get("RAY_TMPDIR", "/tmp"), "ray", "ray_current_cluster").read_text().strip()
    except OSError:
        return None


def no_cluster(address: str | None, reason: str) -> str:
    remedy = "start one with `ray start --head`, or name the one that runs (host:port)"
    return f"workers.address={address}: no Ray cluster answers there ({reason}); {remedy}"


def lost_actor_reason(message: str) -> str:
    """Return why Ray lost an actor, in a line: without the list of the actor's properties."""
    lines = [line.strip() for line in message.splitlines() if line.strip() and not PROPERTY.match(line)]
    return printable(" ".join(lines[1:] or lines))[:LONGEST_REASON]


class Actor(WorkerThread):
    """A worker in a process on a node."""

    def __init__(self, build: Build, worker: WorkerId, folder: str, log: Path) -> None:
        with suppress(OSError):  # where relative paths are from, if the nodes share a file system
            os.chdir(folder)
        log_to(log)
        super().__init__(build, worker)


def log_to(path: Path) -> None:
    """Send everything that this process prints to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr, force=True
    )


class RayPool:
    """The `WorkerPool` of a cluster."""

    def __init__(self, build: Build, *, count: int | None, resources: dict[str, float], logs: Path) -> None:
        import ray  # an extra

        self.ray, self.build, self.count, self.logs = ray, build, count, logs
        self.resources = {name: amount for name, amount in resources.items() if amount}
        self.actors: dict[str, Any] = {}  # also those that have been stopped
        self.calls: dict[Any, str] = {}  # workers by the calls to them that have not returned
        self.ready: set[str] = set()
        self.looked_at = float("-inf")

    def new_workers(self) -> list[str]:
        if (self.count is not None and len(self.actors) >= self.count) or time.monotonic() - self.looked_at < LOOK_S:
            return []
        self.looked_at = time.monotonic()
        capacity = self._capacity()
        if not capacity and not self.actors:
            raise InputError(self._too_small())
        wanted = capacity if self.count is None else self.count
        return [self._start(number) for number in range(len(self.actors), wanted)]

    def send(self, worker: str, items: Sequence[Keyed]) -> None:
        self.calls[self.actors[worker].exchange.remote(items)] = worker

    def reports(self) -> list[tuple[str, Report | Lost]]:
        if not self.calls:  # all workers are lost, and wait
            time.sleep(WAIT_S)
            return []
        done, _ = self.ray.wait([*self.calls], timeout=WAIT_S)
        done, _ = self.ray.wait([*self.calls], num_returns=len(self.calls), timeout=0) if done else (done, [])
        return [self._report(call) for call in done]

    def stop(self, worker: str) -> None:
        self.ready.discard(worker)
        self.calls = {call: other for call, other in self.calls.items() if other != worker}
        with suppress(Exception):  # it may be gone, and its cluster with it
            self.ray.kill(self.actors[worker])

    def shutdown(self) -> None:
        last = [self.actors[worker].exchange.remote(None) for worker in self.ready]
        if last:
            self.ray.wait(last, num_returns=len(last), timeout=END_S)
        for worker in self.actors:
            self.stop(worker)

    def _report(self, call: Any) -> tuple[str, Report | Lost]:
        worker = self.calls.pop(call)
        try:
            report = self.ray.get(call)
        except self.ray.exceptions.RayActorError as error:
            report = Lost(lost_actor_reason(str(error)))
            if error.actor_init_failed:  # Ray does not try again: e.g. its log cannot be written there
                reason = str(error).strip().splitlines()[-1]
                report = Report("an unknown node", ready=False, error=f"it cannot start ({reason})")
        if isinstance(report, Report) and report.ready:
            self.ready.add(worker)
        else:
            self.ready.discard(worker)
        return worker, report

    def _capacity(self) -> int:
        """Return how many workers fit on the nodes that are alive."""
        nodes = [node["Resources"] for node in self.ray.nodes() if node["Alive"]]
        return sum(int(min(node.get(name, 0) // amount for name, amount in self.resources.items())) for node in nodes)

    def _start(self, number: int) -> str:
        worker = WorkerId(number, one_of_many=True)
        options: Any = {"num_gpus": self.resources.get("GPU", 0), "num_cpus": self.resources.get("CPU", 0)}
        actor = self.ray.remote(Actor).options(max_restarts=-1, max_task_retries=0, **options)
        log = self.logs / f"worker-{number}.log"
        self.actors[worker.name] = actor.remote(self.build, worker, str(Path.cwd()), log)
        return worker.name

    def _too_small(self) -> str:
        has = {name: self.ray.cluster_resources().get(name, 0) for name in self.resources}
        needs = ", ".join(f"{name} {amount:g}" for name, amount in self.resources.items())
        remedy = "; for a target on CPUs: workers.gpus=0" if not has.get("GPU", 1) else ""
        return f"workers=ray: a worker needs {needs}, and no node of the cluster has that ({has} in all){remedy}"
