"""Servers that a stage starts for itself: one for each group of GPUs, all at once, and stopped with the stage."""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from eagle3.engine.command import LaunchSettings, launch_command
from eagle3.engine.draft import Draft
from eagle3.engine.installation import find_sglang, require_devices
from eagle3.engine.process import Server, end_with_the_terminal
from eagle3.errors import InputError


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
