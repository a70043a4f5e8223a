"""protocol_server.py as a process that is forked from one that has imported PyTorch, which takes a server five seconds.

What a launch starts as SGLang asks for it at a door (a Unix socket), hands signals on to it, and ends with it.
tests/engine/test_process.py starts it from Python's own beginning.
"""

import atexit
import contextlib
import importlib
import json
import multiprocessing
import os
import select
import shutil
import signal
import socket
import sys
import tempfile
from functools import cache
from typing import Any


def main() -> None:
    """Run as sglang.launch_server: this process imports no more than it needs to ask."""
    if os.environ.get("FAULT") in ("start", "deaf") or "DOOR" not in os.environ:
        from protocol_server import main as serve

        return serve()
    asking = socket.socket(socket.AF_UNIX)
    asking.connect(os.environ["DOOR"])
    request = {"words": sys.argv, "environment": dict(os.environ), "folder": os.getcwd(), "paths": sys.path}
    socket.send_fds(asking, [json.dumps(request).encode() + b"\n"], [1, 2])
    answers = asking.makefile()
    server = int(answers.readline())
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, _: os.kill(server, number))
    status = int(answers.readline())
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


@cache
def open_door() -> str:
    """The path of the door, behind which a process waits as long as this one lives."""
    from scripts import PRELOADED

    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = f"{folder}/door"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen()
        context.Process(target=_open_to_all, args=(listening, folder), daemon=True).start()
    return path


def _open_to_all(listening: socket.socket, folder: str) -> None:
    for needed in ("aiohttp.web", "standin_engine", "eagle3.head_files.format", "eagle3.target.model"):
        importlib.import_module(needed)
    parent = multiprocessing.parent_process()
    assert parent is not None
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while parent.sentinel not in (ready := select.select([listening, parent.sentinel], [], [])[0]):
        for each in ready:
            asking, _ = each.accept()
            if os.fork() == 0:
                listening.close()
                try:
                    _keep(asking)
                finally:
                    os._exit(1)
            asking.close()
    shutil.rmtree(folder, ignore_errors=True)  # workers of pytest-xdist do not come to what is registered for their end


def _keep(asking: socket.socket) -> None:
    """Start the server that is asked for, tell how it ends; kill it once nobody wants to know."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    message, streams, _, _ = socket.recv_fds(asking, 1 << 20, 2)
    while not message.endswith(b"\n"):
        more = asking.recv(1 << 20)
        assert more, "who asked is gone"
        message += more
    request = json.loads(message)
    ended, alive = os.pipe()  # the server holds its other end
    server = os.fork()
    if server == 0:
        asking.close()
        _be_server(request, streams)
    os.close(alive)
    for each in streams:
        os.close(each)
    with contextlib.suppress(BrokenPipeError):
        asking.sendall(b"%d\n" % server)
    if ended not in select.select([asking, ended], [], [])[0]:
        os.kill(server, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(server, 0)[1])
    with contextlib.suppress(BrokenPipeError):
        asking.sendall(b"%d\n" % status)
    os._exit(0)


def _be_server(request: dict[str, Any], streams: list[int]) -> None:
    from scripts import move_to

    os.setsid()
    move_to(request["folder"], request["environment"], *streams)
    sys.argv, sys.path[:] = request["words"], request["paths"]
    status = 1
    try:
        from protocol_server import main as serve

        serve()
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
