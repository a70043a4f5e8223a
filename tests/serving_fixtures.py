"""What the tests of serving share: an interpreter that finds protocol_server.py under SGLang's name."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from aiohttp import web
from hydra import compose, initialize_config_dir
from protocol_server import ProtocolServer

from eagle3 import cli
from eagle3.serving.bench.loads import BenchSettings
from eagle3.serving.server.command import LaunchSettings

TESTS = Path(__file__).parent
SHORT_WAITS = {"start_timeout_s": 120, "stop_timeout_s": 10}


def sglang_site(folder: Path, version: str = "0.5.17") -> Path:
    """A folder for PYTHONPATH with `sglang.launch_server` and the package's metadata."""
    site = folder / "site"
    (site / "sglang").mkdir(parents=True, exist_ok=True)
    (site / "sglang" / "__init__.py").touch()
    (site / "sglang" / "launch_server.py").write_text("from protocol_server import main\nmain()\n")
    metadata = site / f"sglang-{version}.dist-info"
    metadata.mkdir(exist_ok=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: sglang\nVersion: {version}\n")
    return site


def environment(site: Path, fault: str) -> dict[str, str]:
    return {"PYTHONPATH": f"{site}:{TESTS}:{TESTS.parent}", "OMP_NUM_THREADS": "1", "FAULT": fault}


def launch_settings(site: Path, *, fault: str = "", **changes: Any) -> LaunchSettings:
    """conf/serve/launch.yaml, changed where a test needs it."""
    with initialize_config_dir(cli.CONF, version_base="1.3"):
        settings = cli.plain(compose("serve", overrides=["action=launch"]).launch)
    own = {"port": free_port(), "env": environment(site, fault), **SHORT_WAITS}
    return LaunchSettings(**settings | own | changes)


def bench_settings(**changes: Any) -> BenchSettings:
    """conf/serve/bench.yaml, changed where a test needs it."""
    with initialize_config_dir(cli.CONF, version_base="1.3"):
        settings = cli.plain(compose("serve", overrides=["action=bench"]).bench)
    return BenchSettings(**settings | {"timeout_s": 30} | changes)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


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
