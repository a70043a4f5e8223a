"""Runs Python scripts as forks of one process that has imported the package and its libraries: that takes seconds.

A script has its own arguments, folder, environment and output, as with `python SCRIPT`.
"""

import atexit
import gc
import json
import os
import runpy
import subprocess
import sys
import threading
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any


class Forked:
    """A script that runs; it ends like a child of this process, and takes signals by its `pid`."""

    def __init__(
        self, script: str, *arguments: str, cwd: Path, env: Mapping[str, str], files: tuple[str, str],
        own_session: bool = False,
    ) -> None:  # fmt: skip
        words = [script, *arguments]
        started = {"words": words, "cwd": str(cwd), "env": dict(env), "files": files, "own_session": own_session}
        self.pid, self.returncode = asked(started), None

    def poll(self) -> int | None:
        return self._ended(os.WNOHANG)

    def wait(self) -> int:
        return self._ended(0)

    def _ended(self, options: int) -> Any:
        if self.returncode is None:
            self.returncode = asked({"pid": self.pid, "options": options})
        return self.returncode


def run_forked(
    script: str, *arguments: str, cwd: Path, env: Mapping[str, str], merged: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run a script to its end; merged: what it writes to stderr comes with stdout."""
    with NamedTemporaryFile("r") as out, NamedTemporaryFile("r") as error:
        files = (out.name, out.name if merged else error.name)
        status = Forked(script, *arguments, cwd=cwd, env=env, files=files).wait()
        return subprocess.CompletedProcess([script, *arguments], status, out.read(), error.read())


def asked(request: dict[str, Any]) -> Any:
    process = parent()
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(f"{json.dumps(request)}\n")
        process.stdin.flush()
        return json.loads(process.stdout.readline())
    except BaseException:  # the time limit of a test: the next script must not get this one's answer
        process.kill()
        parent.cache_clear()
        raise


@cache
def parent() -> subprocess.Popen[str]:
    """The process that forks, until this one ends."""
    quiet = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}  # read by their imports
    started = subprocess.Popen(
        [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | quiet
    )
    atexit.register(started.communicate)  # the end of its input is its end
    return started


def serve() -> None:
    """For each line of stdin, fork and answer with the process, or answer how one has ended."""
    import pandas  # noqa: F401  # by DuckDB
    import s3fs  # noqa: F401  # by fsspec, which Lightning asks for its file systems
    from parsed_configs import parse_configs_once
    from transformers import AutoModelForCausalLM, LlamaForCausalLM  # noqa: F401

    import eagle3.commands.serve
    import eagle3.commands.train
    import eagle3.prompts.stage
    import eagle3.training.curves  # noqa: F401
    from eagle3.compose import compose_run

    parse_configs_once()
    compose_run("train", "run_dir=RUN")
    compose_run("precompute", "out_dir=DIR")
    gc.freeze()  # else the first collection of a child would copy the memory of all libraries
    for line in sys.stdin:
        request = json.loads(line)
        if "pid" in request:
            pid, status = os.waitpid(request["pid"], request["options"])
            print(json.dumps(os.waitstatus_to_exitcode(status) if pid else None), flush=True)
            continue
        child = os.fork()
        if not child:
            os._exit(ended(request))
        print(child, flush=True)


def ended(request: dict[str, Any]) -> int:
    """Run a script and end as Python does, but for freeing all objects: the child would copy all memory for that."""
    status: Any = 0
    try:
        run(**request)
    except SystemExit as stopped:
        status = stopped.code
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        status = 1
    if isinstance(status, str):
        print(status, file=sys.stderr)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return status if isinstance(status, int) else int(status is not None)


def set_for_process(env: dict[str, str]) -> None:
    """Set what modules read when they are imported, which they were before the fork."""
    from lightning.pytorch.utilities import rank_zero_only

    import eagle3.cli

    eagle3.cli.PARENT = os.getppid()
    rank_zero_only.rank = int(env.get("RANK") or env.get("LOCAL_RANK") or 0)  # type: ignore[attr-defined]


def run(words: list[str], cwd: str, env: dict[str, str], files: list[str], own_session: bool) -> None:
    set_for_process(env)
    if own_session:
        os.setsid()
    for descriptor, file in enumerate([os.devnull, *files]):
        os.dup2(os.open(file, os.O_RDWR | os.O_APPEND | os.O_CREAT), descriptor)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.path[:1] = [os.path.dirname(os.path.realpath(words[0])), *filter(None, env.get("PYTHONPATH", "").split(":"))]
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    serve()
