"""SGLang servers on this machine, started for one stage and stopped with it: one for each group of GPUs."""

import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from eagle3.engine.command import Draft, launch_command
from eagle3.engine.process import END_S, POLL_S, Server, end_with_the_terminal, require_free_port
from eagle3.engine.versions import count_gpus, find_sglang
from eagle3.errors import InputError
from eagle3.settings.engine import LaunchSettings
from eagle3.target.files import TargetFiles
from eagle3.workers.task import WorkerId

PORTS = 8  # reserved for each worker: one for each server on its machine


def build_servers(
    settings: LaunchSettings,
    count: int | None,
    *,
    target: TargetFiles,
    draft: Draft | None,
    folder: Path,
    make_flags: Callable[[int], Mapping[str, Any]] = lambda number: {},
) -> list[Server]:
    """Return servers that have not started yet, on consecutive ports from `launch.port`.

    `count` None means one server for every `launch.tp_size` GPUs. `make_flags` gives the flags that
    the stage itself needs, by the number of the server, once all ports are known to be free; launch.extra_flags
    override them. InputError where SGLang, GPUs or ports are missing."""
    if settings.check:
        find_sglang(settings)
        gpus = count_gpus(settings, servers=count or 1)
        count = count or gpus // settings.tp_size
    count = count or 1
    for number in range(count):
        require_free_port(settings.host, settings.port + number)
    servers = []
    for number in range(count):
        own = replace(settings, port=settings.port + number)
        flags = {**make_flags(number), "base-gpu-id": number * settings.tp_size or None}
        command = launch_command(own, target, draft, flags)
        servers.append(Server(own, command, log=folder / f"server-{number}.log", name=f"server {number}"))
    return servers


def for_worker(settings: LaunchSettings, worker: WorkerId) -> LaunchSettings:
    """Give each worker its own ports, because several workers on one machine start servers.

    Waits for servers that a lost worker has left on these ports: they are about to end (process.GUARD)."""
    own = replace(settings, port=settings.port + worker.number * PORTS)
    end = time.monotonic() + own.stop_timeout_s + END_S
    while worker.one_of_many and time.monotonic() < end:
        with suppress(InputError):
            require_free_port(own.host, own.port)
            break
        time.sleep(POLL_S)
    return own


@contextmanager
def serving(servers: list[Server]) -> Iterator[list[Server]]:
    """Start all servers at once, because each takes minutes; stop all of them, also if one does not start."""
    end_with_the_terminal()

    def ask_to_stop() -> None:  # all, before one is waited for
        for server in servers:
            server.ask_to_stop()

    with ExitStack() as started:
        for server in servers:
            started.callback(server.stop)
        started.callback(ask_to_stop)
        with ThreadPoolExecutor(len(servers)) as threads:
            starts = [threads.submit(server.__enter__) for server in servers]
            try:
                for start in starts:
                    start.result()
            except BaseException:
                started.close()  # so that nothing waits for the others to come up
                raise
        yield servers
