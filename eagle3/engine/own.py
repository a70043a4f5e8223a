"""Servers that a stage starts for itself: one for each group of GPUs, all at once, and stopped with the stage."""

import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from eagle3.engine.command import LaunchSettings, launch_command
from eagle3.engine.draft import Draft
from eagle3.engine.installation import find_sglang, require_devices
from eagle3.engine.process import END_S, POLL_S, Server, end_with_the_terminal, is_free_port
from eagle3.errors import InputError
from eagle3.workers.task import Place

PORTS = 8  # of one worker: servers for the GPUs of a machine


def servers_of(
    settings: LaunchSettings,
    count: int | None,
    *,
    target: str,
    revision: str | None,
    draft: Draft | None,
    folder: Path,
    flags_of: Callable[[int], Mapping[str, Any]] = lambda place: {},
) -> list[Server]:
    """Return servers on ports from `launch.port` on; `count` None: one for every `launch.tp_size` GPUs.

    InputError where SGLang or GPUs are missing. `flags_of` gives what the stage needs of a server, by its place;
    launch.extra_flags go first."""
    number = count or 1
    if settings.check:
        installation = find_sglang(settings)
        require_devices(installation, settings)
        most = installation.devices // settings.tp_size
        number = count or most
        if number > most:
            raise InputError(
                f"{number} servers of launch.tp_size={settings.tp_size} need {number * settings.tp_size} GPUs, "
                f"PyTorch of {settings.interpreter} sees {installation.devices}; lower one of the two"
            )
    servers = []
    for place in range(number):
        flags = {**flags_of(place), "base-gpu-id": place * settings.tp_size or None, **(settings.extra_flags or {})}
        own = replace(settings, port=settings.port + place, extra_flags=flags)
        command = launch_command(own, target=target, revision=revision, draft=draft)
        servers.append(Server(own, command, log=folder / f"server-{place}.log", name=f"server {place}"))
    return servers


def for_place(settings: LaunchSettings, place: Place) -> LaunchSettings:
    """Give each worker ports of its own, as others of its machine have servers, too; waits for servers that a lost one
    has left there, which are about to end (process.GUARD)."""
    own = replace(settings, port=settings.port + place.number * PORTS)
    end = time.monotonic() + own.stop_timeout_s + END_S
    while place.one_of_many and not is_free_port(own.host, own.port) and time.monotonic() < end:
        time.sleep(POLL_S)
    return own


@contextmanager
def serving(servers: list[Server]) -> Iterator[list[Server]]:
    """Start all together, as each takes minutes; stop all, also where one does not start."""
    end_with_the_terminal()
    with ExitStack() as started:
        for server in servers:
            started.callback(server.stop)
        with ThreadPoolExecutor(len(servers)) as threads:
            starts = [threads.submit(server.__enter__) for server in servers]
            try:
                for start in starts:
                    start.result()
            except BaseException:
                for server in servers:  # ends the waiting of the others
                    server.stop()
                raise
        yield servers
