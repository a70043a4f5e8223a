"""The three scripts as commands: real processes with output, signals and an exit status of their own.

They are forked from a process that has imported PyTorch and Lightning, which takes a command five seconds by itself.
From Python's own beginning commands run in tests/test_help.py, test_install.py, test_wheel.py, as the ranks of
trainer=ddp and the jobs of launchers, and in the way through of tests/test_cli.py.
"""

import atexit
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import IO, Any

from stores import ROOT

PRELOADED = [
    "scripts", "eagle3.commands.precompute", "eagle3.answers.build", "eagle3.features.build", "eagle3.commands.train",
    "eagle3.commands.serve", "transformers.models.llama.modeling_llama",
]  # fmt: skip


class Script:
    """`python NAME.py ARGUMENTS` in the folder `cwd`; what it says goes to files, or to those that are given."""

    def __init__(
        self,
        name: str,
        *arguments: str,
        cwd: Path = ROOT,
        env: Mapping[str, str] | None = None,
        stdout: IO[Any] | int | None = None,
        stderr: IO[Any] | int | None = None,
        own_session: bool = False,
    ) -> None:
        self.args = [f"{name}.py", *arguments]
        self._said = _new_file(), _new_file()
        given = [self._said[number] if each is None else each for number, each in enumerate((stdout, stderr))]
        streams = [each if isinstance(each, int) else each.fileno() for each in given]
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        environment = {**os.environ, **(env or {})}
        self._process = context.Process(
            target=_be_script, args=(self.args, str(cwd), environment, *map(_Handed, streams), own_session)
        )
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self) -> int:
        self._process.join()
        assert self._process.exitcode is not None
        return self._process.exitcode

    def communicate(self) -> tuple[str, str]:
        """Wait for the end; return what it said."""
        self.wait()
        out, error = (os.pread(file, os.fstat(file).st_size, 0).decode() for file in self._said)
        return out, error

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def __del__(self) -> None:
        for file in self._said:
            os.close(file)


def _new_file() -> int:
    descriptor, path = tempfile.mkstemp()
    os.unlink(path)
    return descriptor


class _Handed:
    """A file's descriptor on its way to another process."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __reduce__(self) -> Any:
        return _taken, (DupFd(self.descriptor),)


def _taken(handed: Any) -> int:
    return handed.detach()


def run_script(
    name: str, *arguments: str, cwd: Path = ROOT, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    script = Script(name, *arguments, cwd=cwd, env=env)
    out, error = script.communicate()
    assert script.returncode is not None
    return subprocess.CompletedProcess(script.args, script.returncode, out, error)


def move_to(cwd: str, environment: Mapping[str, str], stdout: int, stderr: int) -> None:
    """Give a forked process a folder, an environment and streams of its own."""
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    for given, stream in ((stdout, 1), (stderr, 2)):
        os.dup2(given, stream)
        os.close(given)


def _be_script(
    command: list[str], cwd: str, environment: dict[str, str], stdout: int, stderr: int, own_session: bool
) -> None:
    """In the new process: be `python COMMAND`, from its environment to what is registered for its end."""
    # Lightning ignores Ctrl-C in a process whose training was interrupted, as one of the tests before may have been.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if own_session:
        os.setsid()
    move_to(cwd, environment, stdout, stderr)
    path = Path(command[0]) if Path(command[0]).exists() else ROOT / command[0]
    sys.argv = [str(path), *command[1:]]
    installed = (each for each in sys.path if "site-packages" in each or not each.startswith(str(ROOT)))
    sys.path[:] = [str(path.resolve().parent), *installed, str(ROOT)]  # without what pytest adds
    try:
        runpy.run_path(str(path), run_name="__main__")
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
