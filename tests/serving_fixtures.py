"""What the tests of serving share: an interpreter that finds protocol_server.py under SGLang's name, and settings that
use it."""

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from random import SystemRandom
from typing import Any

from aiohttp import web
from protocol_server import ProtocolServer

from eagle3.compose import compose_run
from eagle3.settings.engine import LaunchSettings
from eagle3.settings.serving import BenchSettings

TESTS = Path(__file__).parent
NEEDED = {  # what conf/ leaves to the user
    "export": {"head": "HEAD"}, "check": {"head": "HEAD"}, "decode": {"head": "HEAD", "prompts.path": "PROMPTS"},
    "show": {"head": "HEAD", "prompts.path": "PROMPTS"},
    "compare": {"heads": "[HEAD]", "prompts.path": "PROMPTS"}, "tune": {"head": "HEAD", "prompts.path": "PROMPTS"},
}  # fmt: skip


def sglang_site(folder: Path, version: str = "0.5.17") -> Path:
    """A folder for PYTHONPATH with `sglang.launch_server`, and the package's metadata."""
    site = folder / "site"
    (site / "sglang").mkdir(parents=True, exist_ok=True)
    (site / "sglang" / "__init__.py").touch()
    (site / "sglang" / "launch_server.py").write_text("from protocol_server import main\nmain()\n")
    metadata = site / f"sglang-{version}.dist-info"
    metadata.mkdir(exist_ok=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: sglang\nVersion: {version}\n")
    return site


def environment(site: Path, fault: str) -> dict[str, str]:
    paths = f"{site}:{TESTS}:{TESTS.parent}"
    return {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "FAULT": fault}


def serve_run(action: str, *overrides: str) -> Any:
    """The checked run of an action, with values for the keys that it needs and a test does not give."""
    keys = {"run_dir": ".", **NEEDED.get(action, {})}
    given = {override.lstrip("+").partition("=")[0] for override in overrides}
    return compose_run(
        "serve", f"action={action}", *(f"{key}={value}" for key, value in keys.items() if key not in given), *overrides
    )


def launch_settings(site: Path, *, fault: str = "", **changes: Any) -> LaunchSettings:
    """conf/launch/default.yaml, changed where a test needs it."""
    own = {"port": free_port(), "env": environment(site, fault)}
    return replace(serve_run("launch").launch, **own | changes)


def bench_settings(**changes: Any) -> BenchSettings:
    """The group `bench` of conf/action/bench.yaml, changed where a test needs it."""
    return replace(serve_run("bench").bench, **changes)


def free_port() -> int:
    """Return a free port, with three more after it, below those that the system gives to connections."""
    while True:
        first = SystemRandom().randrange(10_000, 32_000)
        with suppress(OSError), ExitStack() as probes:
            for port in range(first, first + 4):
                probes.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first


def wait_until(holds: Callable[[], Any]) -> None:
    """However slow the machine is: what never holds runs into the time limit of a test."""
    while not holds():
        time.sleep(0.05)


@contextmanager
def serving(server: ProtocolServer) -> Iterator[str]:
    """The server's URL while a thread of this process runs it."""
    loop, port = asyncio.new_event_loop(), free_port()
    runner = web.AppRunner(server.application(), handler_cancellation=True, shutdown_timeout=1)

    async def listen() -> None:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()

    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        asyncio.run_coroutine_threadsafe(listen(), loop).result(timeout=10)
        yield f"http://127.0.0.1:{port}"
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(timeout=10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
