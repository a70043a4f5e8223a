"""Workers on the nodes of a Ray cluster, one actor each.

Ray starts a lost actor again, on another node where its own is gone, and tells of both by the visit that failed.
"""

import logging
import os
import socket
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import eagle3
from eagle3.errors import InputError, require_packages
from eagle3.workers.bench import END_S, WAIT_S, Bench, Report
from eagle3.workers.crew import Driver
from eagle3.workers.meter import Progress
from eagle3.workers.task import Build, Keyed, Place

log = logging.getLogger(__name__)

LOOK_S = 5.0  # between two looks for new nodes
CONNECT_S = 10.0


class OnRay:
    """`Workers` on a cluster. Settings are the keys of conf/workers/ray.yaml."""

    def __init__(
        self, *, address: str | None, count: int | None, gpus: int, cpus: float, restarts: int, logs: Path
    ) -> None:
        """`gpus` and `cpus` of each; `count` None: as many as the cluster has room for, also later."""
        require_packages("ray", extra="ray", needed_by="workers=ray")
        self.address, self.count, self.restarts, self.logs = address, count, restarts, logs
        self.resources = {"GPU": gpus, "CPU": cpus}

    def __call__(
        self, build: Build, items: Iterable[Keyed], progress: Progress, *, ahead: int, total: int | None = None
    ) -> Iterator[list[Keyed]]:
        import ray

        connect(self.address)
        try:
            crew = Cluster(build, count=self.count, resources=self.resources, logs=self.logs)
            yield from Driver(crew, items, progress, ahead=ahead, total=total, restarts=self.restarts).results()
        except ray.exceptions.RaySystemError as error:
            reason = str(error).partition("\n")[0]
            raise InputError(f"the Ray cluster is gone ({reason}); run again: what is finished is kept") from None
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
    try:
        ray.init(address, runtime_env=code, log_to_driver=False, logging_level=logging.ERROR, configure_logging=True)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise InputError(no_cluster(address, str(error).partition("\n")[0])) from None


def unreachable(address: str) -> str | None:
    """Return why nobody answers at a host and port, which Ray itself tries for many minutes; None if somebody does."""
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
    way_out = "start one with `ray start --head`, or name the one that runs (host:port)"
    return f"workers.address={address}: no Ray cluster answers there ({reason}); {way_out}"


class Actor:
    """What a node runs."""

    def __init__(self, build: Build, place: Place, folder: str, log: Path) -> None:
        with suppress(OSError):  # where relative paths are from, if the nodes share a file system
            os.chdir(folder)
        log_to(log)
        self.bench = Bench(build, place)

    def visit(self, items: Sequence[Keyed] | None) -> Report:
        return self.bench.visit(items)


def log_to(path: Path) -> None:
    """Send everything that this process prints to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr, force=True
    )


class RayWorker:
    """A `Worker`."""

    def __init__(self, actor: Any, name: str) -> None:
        self.actor, self.name = actor, name
        self.report: Any = None
        self.ready = False

    def visit(self, items: Sequence[Keyed] | None) -> None:
        self.report = self.actor.visit.remote(items)

    def end(self) -> None:
        import ray

        self.report, self.ready = None, False
        with suppress(Exception):  # it may be gone, and its cluster with it
            ray.kill(self.actor)


class Cluster:
    """The `Crew` of a cluster."""

    def __init__(self, build: Build, *, count: int | None, resources: dict[str, float], logs: Path) -> None:
        self.build, self.count, self.logs = build, count, logs
        self.resources = {name: amount for name, amount in resources.items() if amount}
        self.workers: list[RayWorker] = []
        self.looked_at = float("-inf")

    def come(self) -> list[RayWorker]:
        if (self.count is not None and len(self.workers) >= self.count) or time.monotonic() - self.looked_at < LOOK_S:
            return []
        self.looked_at = time.monotonic()
        room = self._room()
        if not room and not self.workers:
            raise InputError(self._too_small())
        wanted = room if self.count is None else self.count
        new = [self._start(number) for number in range(len(self.workers), wanted)]
        self.workers += new
        return new

    def reports(self) -> list[tuple[RayWorker, Report | None]]:
        import ray

        visited = {worker.report: worker for worker in self.workers if worker.report is not None}
        done, _ = ray.wait([*visited], timeout=WAIT_S)
        done, _ = ray.wait([*visited], num_returns=len(visited), timeout=0) if done else (done, [])
        return [(visited[each], self._report(visited[each])) for each in done]

    def go_home(self) -> None:
        import ray

        last = [worker.actor.visit.remote(None) for worker in self.workers if worker.ready]
        if last:
            ray.wait(last, num_returns=len(last), timeout=END_S)
        for worker in self.workers:
            worker.end()

    def _report(self, worker: RayWorker) -> Report | None:
        import ray

        try:
            report = ray.get(worker.report)
        except ray.exceptions.RayActorError:
            report = None
        worker.ready = report is not None and report.ready
        return report

    def _room(self) -> int:
        """Return how many workers fit on the nodes that live."""
        import ray

        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        return sum(int(min(node.get(name, 0) // amount for name, amount in self.resources.items())) for node in nodes)

    def _start(self, number: int) -> RayWorker:
        import ray

        place = Place(number, one_of_many=True)
        options: Any = {"num_gpus": self.resources.get("GPU", 0), "num_cpus": self.resources.get("CPU", 0)}
        actor = ray.remote(Actor).options(max_restarts=-1, max_task_retries=0, **options)
        made = actor.remote(self.build, place, str(Path.cwd()), self.logs / f"worker-{number}.log")
        return RayWorker(made, place.name)

    def _too_small(self) -> str:
        import ray

        has = {name: ray.cluster_resources().get(name, 0) for name in self.resources}
        needs = ", ".join(f"{name} {amount:g}" for name, amount in self.resources.items())
        way_out = "; for a target on CPUs: workers.gpus=0" if not has.get("GPU", 1) else ""
        return f"workers=ray: a worker needs {needs}, and no node of the cluster has that ({has} in all){way_out}"
