"""The server's process, for real: it starts, answers, ends, and says why when it does not."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from protocol_server import ProtocolServer
from serving_fixtures import launch_settings, serving, sglang_site, wait_until
from stores import ROOT

from eagle3.engine.client import KEY, ServerFailed, ask_now
from eagle3.engine.command import launch_command
from eagle3.engine.endpoint import is_reachable
from eagle3.engine.process import Server
from eagle3.errors import InputError

Start = Callable[..., Server]


@pytest.fixture
def start(tmp_path: Path, tiny_path: Path) -> Start:
    """A server of the tiny target, alone, that has not started yet."""

    def prepared(fault: str = "", **changes: Any) -> Server:
        settings = launch_settings(sglang_site(tmp_path), fault=fault, **changes)
        command = launch_command(settings, SimpleNamespace(path=str(tiny_path), revision=None), None)
        return Server(settings, command, log=tmp_path / "logs" / "server.log", name="the plain server")

    return prepared


def test_a_server_answers_inside_its_block_and_is_gone_behind_it(start):
    with start("scripted") as server:
        assert server.alive() and is_reachable(server.url)
        assert ask_now(f"{server.url}/server_info")["version"] == "0.5.17"
        process = server.process
        assert process is not None
        assert "fired up" in server.log.read_text()
    assert not server.alive()
    assert process.returncode == 0  # it was asked to end, not killed
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
    assert not is_reachable(server.url)
    with pytest.raises(ServerFailed, match="Cannot connect"):
        ask_now(f"{server.url}/server_info")


def test_ctrl_c_between_the_start_of_the_process_and_its_name_leaves_no_server(start, monkeypatch):
    started: list[subprocess.Popen[bytes]] = []

    class Interrupted(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            started.append(self)
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    with pytest.raises(KeyboardInterrupt), start():
        pass
    monkeypatch.undo()
    assert started[0].wait(10) is not None


def test_a_taken_port_is_one_line_before_anything_starts(start):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        server = start(port=other.getsockname()[1])
        with pytest.raises(InputError, match=r"launch\.port=\d+: Address already in use; .*launch\.port=30001"), server:
            pass
    assert server.process is None


@pytest.mark.parametrize(("host", "url"), [("0.0.0.0", "http://127.0.0.1:30000"), ("::1", "http://[::1]:30000")])
def test_the_url_is_one_that_this_machine_can_ask(start, host, url):
    assert start(host=host, port=30000).url == url


def test_a_server_that_ends_at_its_start_gives_the_reason_of_its_log(start, monkeypatch):
    monkeypatch.setenv("EAGLE3_API_KEY", "secret")
    server = start(fault="start")
    with pytest.raises(InputError) as failed, server:
        pass
    message = str(failed.value)
    assert "RuntimeError: Not enough memory" in message
    assert "raise launch.mem_fraction_static" in message
    assert str(server.log) in message and "exit status 1" in message and "\n" not in message
    assert [*server.log.parent.iterdir()] == [server.log]  # no file with the key stays


SILENT = """
import sys, time
from http.server import BaseHTTPRequestHandler, HTTPServer
class Silent(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def do_POST(self):
        print("asked", flush=True)
        time.sleep(600)
HTTPServer(("127.0.0.1", int(sys.argv[1])), Silent).serve_forever()
"""


def test_a_server_that_takes_a_request_and_never_answers_it_ends_at_the_time_limit(start, monkeypatch):
    """However long it takes to start: the clock of the limit stands still until the request has come."""
    server = start(start_timeout_s=1, stop_timeout_s=1)
    server.command = [sys.executable, "-c", SILENT, str(server.settings.port)]

    def seconds() -> float:
        return 2.0 if server.log.exists() and "asked" in server.log.read_text() else 0.0

    monkeypatch.setattr("eagle3.engine.process.time", SimpleNamespace(monotonic=seconds, sleep=time.sleep))
    with pytest.raises(InputError, match=r"launch\.start_timeout_s=1: the plain server does not answer yet"), server:
        pass
    assert "asked" in server.log.read_text() and not server.alive()


def test_a_server_that_ignores_sigterm_is_killed(start):
    with start(fault="stubborn", stop_timeout_s=0.5) as server:
        process = server.process
        assert process is not None
    assert process.returncode == -signal.SIGKILL


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_what_a_server_has_started_ends_with_it(start):
    """As SGLang's schedulers, which hold the GPU, must."""
    server = start()
    child = "import subprocess, time; print(subprocess.Popen(['sleep', '60']).pid, flush=True); time.sleep(60)"
    server.command = [sys.executable, "-c", child]
    server.log.parent.mkdir()
    server._start()
    wait_until(server.log.read_text)
    pid = int(server.log.read_text())
    assert is_running(pid)
    server.stop()
    wait_until(lambda: not is_running(pid))


ORPHANED = """
import sys, time
from pathlib import Path
from eagle3.engine.process import Server
from serving_fixtures import launch_settings
folder = Path(sys.argv[1])
sleep = [sys.executable, "-c", "import time; time.sleep(600)"]  # takes no notice of --config
server = Server(launch_settings(folder, stop_timeout_s=1), sleep, log=folder / "server.log", name="it")
server.scratch = folder / "scratch"
server._start()
print(server.process.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.slow
@pytest.mark.parametrize("with_children", [False, True])
def test_a_server_ends_with_a_parent_that_is_killed_and_its_files_are_deleted(tmp_path, with_children):
    """Ray kills the children of a worker that it stops."""
    (tmp_path / "scratch").mkdir()
    (tmp_path / "scratch/rows.safetensors").touch()
    path = f"{ROOT}:{ROOT / 'tests'}"
    with subprocess.Popen(
        [sys.executable, "-c", ORPHANED, tmp_path],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": path, KEY: "k3y-0123456789"},
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert is_running(pid) and (tmp_path / "server.key.yaml").exists()
        if with_children:
            children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children")
            wait_until(lambda: [each for each in map(int, children.read_text().split()) if is_running(each)] == [pid])
            os.kill(pid, signal.SIGKILL)
        parent.kill()
    left = (tmp_path / "scratch", tmp_path / "server.key.yaml")
    wait_until(lambda: not is_running(pid) and not any(path.exists() for path in left))


def test_a_server_of_ours_is_not_asked_through_the_users_proxy(monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # nothing listens there
    monkeypatch.delenv("no_proxy", raising=False)
    with serving(ProtocolServer(lambda prompt_ids, sampling: {}, {})) as url:
        assert ask_now(f"{url}/server_info")


def test_an_interpreter_that_is_not_there_is_one_line(start):
    with pytest.raises(InputError, match=r"launch\.python=/no/python cannot be run"), start(python="/no/python"):
        pass


def test_following_the_log_gives_each_line_up_to_the_last(start, tmp_path):
    server = start()
    server.command = [sys.executable, "-c", "import time\nfor n in range(3):\n  time.sleep(.1)\n  print(n, flush=True)"]
    server.log.parent.mkdir()
    server._start()
    assert list(server.follow()) == ["0", "1", "2"]
    server.stop()
