"""One SGLang server process: start until it answers, log, stop."""

import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Self

from eagle3.engine.client import api_key, responds
from eagle3.engine.log import failure_reason, last_stage
from eagle3.errors import InputError
from eagle3.interrupts import end_like_ctrl_c
from eagle3.progress import Bar
from eagle3.settings.engine import LaunchSettings

log = logging.getLogger(__name__)

POLL_S = 0.5
ONE_TOKEN = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1}}
OPEN_HOSTS = ("0.0.0.0", "::")  # all addresses of the machine
END_S = 5  # from the last sign of life to the end of the process
# A guard process of each server. When our process is gone, even killed, it stops the server and deletes its scratch
# and the file of the key. It is no child of ours: a Ray worker that is stopped kills its children, and would kill the
# guard first.
GUARD = """
import contextlib, os, shutil, signal, sys, time
if os.fork():
    os._exit(0)
if sys.stdin.read():  # our process has stopped the server
    os._exit(0)
with contextlib.suppress(OSError):
    os.unlink(sys.argv[3])
server, patience = int(sys.argv[1]), float(sys.argv[2])
with contextlib.suppress(ProcessLookupError):
    os.kill(server, signal.SIGTERM)
    end = time.monotonic() + patience
    while time.monotonic() < end:
        os.kill(server, 0)
        time.sleep(0.2)
with contextlib.suppress(ProcessLookupError):
    os.killpg(server, signal.SIGKILL)
for folder in sys.argv[4:]:
    shutil.rmtree(folder, ignore_errors=True)
"""


class Server:
    """A server's process, which runs inside the `with` block; everything it prints goes to the file `log`.

    Progress and errors call it `name`. If this process is killed, the folder `scratch` is deleted with the server."""

    scratch: Path | None = None

    def __init__(self, settings: LaunchSettings, command: list[str], *, log: Path, name: str) -> None:
        self.settings = settings
        self.command = command
        self.log = log
        self.name = name
        host = "127.0.0.1" if settings.host in OPEN_HOSTS else settings.host
        self.url = f"http://[{host}]:{settings.port}" if ":" in host else f"http://{host}:{settings.port}"
        self.process: subprocess.Popen[bytes] | None = None
        self.guard: subprocess.Popen[bytes] | None = None
        self.asked_to_stop = False

    def __enter__(self) -> Self:
        end_with_the_terminal()
        require_free_port(self.settings.host, self.settings.port)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        try:
            with ThreadPoolExecutor(1) as thread:  # where Ctrl-C does not come between the start and self.process
                thread.submit(self._start).result()
            self._wait_until_healthy()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def failure(self) -> InputError:
        """Return what to raise once the server is no longer alive or does not answer."""
        assert self.process is not None
        status = None
        with contextlib.suppress(subprocess.TimeoutExpired):  # its connections close a moment before it ends
            status = self.process.wait(END_S)
        ended = "no longer answers" if status is None else f"has ended (exit status {status})"
        return InputError(f"{self.name} {ended}: {failure_reason(self.log, status)}; its log is {self.log}")

    def ask_to_stop(self) -> None:
        """Send SIGTERM, once: a second one would cut short how the server ends."""
        if self.process is not None and self.process.poll() is None and not self.asked_to_stop:
            log.info(f"stopping {self.name}")
            self.asked_to_stop = True
            self.process.terminate()

    def stop(self) -> None:
        """Send SIGTERM, give it time to free the GPU, then send SIGKILL to the whole process group."""
        self._key_file.unlink(missing_ok=True)
        if self.process is None:
            return
        self.ask_to_stop()
        process, self.process = self.process, None
        try:
            process.wait(self.settings.stop_timeout_s)
        except subprocess.TimeoutExpired:
            pass
        finally:  # also on a second Ctrl-C
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if self.guard is not None:
                self.guard.communicate(b"stopped")

    def follow(self) -> Iterator[str]:
        """Yield the lines that the log gets from now on, until the server ends."""
        with self.log.open(encoding="utf-8", errors="replace") as file:
            file.seek(0, os.SEEK_END)
            alive = True
            while alive:
                alive = self.alive()  # asked before reading: the last lines are not lost
                yield from (line.rstrip("\n") for line in file)
                time.sleep(POLL_S if alive else 0)

    def _start(self) -> None:
        command = [*self.command]
        if key := api_key():  # in a file: every user can read command lines
            with _own_file(self._key_file) as file:
                file.write(json.dumps({"api-key": key}).encode())
            command += ["--config", str(self._key_file)]
        with _own_file(self.log) as file:  # SGLang logs keys
            try:
                self.process = subprocess.Popen(
                    command,
                    env=self.settings.environment,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # Ctrl-C is for us; we stop the server
                )
            except OSError as error:
                raise InputError(f"launch.python={self.command[0]} cannot be run: {error.strerror}") from error
        scratch = [self.scratch] if self.scratch else []
        watched = [self.process.pid, self.settings.stop_timeout_s, self._key_file, *scratch]
        guard = [sys.executable, "-S", "-c", GUARD, *map(str, watched)]
        self.guard = subprocess.Popen(guard, stdin=subprocess.PIPE, start_new_session=True)

    def _wait_until_healthy(self) -> None:
        deadline = time.monotonic() + self.settings.start_timeout_s
        with Bar(bar_format="{desc} [{elapsed}]", desc=f"start {self.name}") as progress:
            while not _healthy(self.url, timeout_s=max(deadline - time.monotonic(), POLL_S)):
                if not self.alive():
                    raise self.failure()
                if time.monotonic() > deadline:
                    limit = f"launch.start_timeout_s={self.settings.start_timeout_s}"
                    raise InputError(f"{limit}: {self.name} does not answer yet; raise it, or read {self.log}")
                progress.set_description_str(f"start {self.name}: {last_stage(self.log)}")
                time.sleep(POLL_S)
            progress.set_description_str(f"{self.name} is up")
        self._key_file.unlink(missing_ok=True)

    @property
    def _key_file(self) -> Path:
        return self.log.with_suffix(".key.yaml")


def _own_file(path: Path) -> IO[bytes]:
    """Open a file that only its owner can read."""
    path.unlink(missing_ok=True)
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")


def end_with_the_terminal() -> None:
    """Let a closed terminal end us like Ctrl-C, and the server with us; `nohup` keeps both."""
    in_main = threading.current_thread() is threading.main_thread()  # only it may set handlers
    if in_main and signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
        signal.signal(signal.SIGHUP, end_like_ctrl_c)


def require_free_port(host: str, port: int) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port that was just released is free
        try:
            probe.bind((host, port))
        except OSError as error:
            fix = "stop the process that listens there or take another port, e.g. launch.port=30001"
            raise InputError(f"launch.host={host} launch.port={port}: {error.strerror}; {fix}") from None


def _healthy(url: str, *, timeout_s: float) -> bool:
    """Return whether it makes a token within `timeout_s`: /health may answer before the first kernels are compiled."""
    has_started = responds(f"{url}/health", timeout_s=timeout_s)
    return has_started and responds(f"{url}/generate", ONE_TOKEN, timeout_s=timeout_s)
