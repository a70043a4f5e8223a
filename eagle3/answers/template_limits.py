"""Limits for a chat template, which is a program that came with the model.

Every conversation is rendered in a process of its own, which the system stops at the limits. A template that exceeds
them for a plain conversation is refused when a `Chat` is made; one that does so for others costs those conversations.
"""

import atexit
import json
import os
import resource
import signal
import subprocess
import sys
from functools import cache
from math import ceil
from threading import Lock
from typing import Any

from jinja2 import TemplateSyntaxError

from eagle3.errors import InputError

CPU_SECONDS = 10  # for a conversation; a usual template takes less than a millisecond
MEMORY_BYTES = 2**30  # more than the process has before the first rendering
MOST_CHARACTERS = 2**24  # of a rendered conversation
MOST_STOPPED = 10  # conversations at which a process was stopped, each after CPU_SECONDS
ANOTHER = "give another with chat.template=FILE.jinja"


class TemplateFailed(Exception):
    """The template raised an error, of the class with this name."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(message)
        self.name = name


class Unbounded(Exception):
    """The template exceeded a limit; the message says which."""


class Renderer:
    """Renders templates in a process of its own, which is started again after a limit has stopped it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._sent: str | None = None  # the template that the process has
        self._lock, self._stopped = Lock(), 0
        atexit.register(self.close)

    def render(self, template: str, messages: list[dict[str, Any]], options: dict[str, Any]) -> str:
        """Return the text of a conversation. Raises TemplateFailed, TemplateSyntaxError or Unbounded."""
        work = {"messages": messages, "options": options, "cpu_seconds": CPU_SECONDS}
        with self._lock:
            answer = self._answer(template, work)
        if "text" in answer:
            return answer["text"]
        if "line" in answer:
            raise TemplateSyntaxError(answer["message"], answer["line"])
        raise TemplateFailed(**answer) if "name" in answer else Unbounded(answer["unbounded"])

    def _answer(self, template: str, work: dict[str, Any]) -> dict[str, Any]:
        if self._process is None:
            self._process, self._sent = _started(), None
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        if template != self._sent:  # some are longer than most conversations
            work["template"] = self._sent = template
        try:
            process.stdin.write(json.dumps(work, default=str).encode() + b"\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = b""
        except BaseException:  # a later reader must not get this answer
            self.close()
            raise
        if line.endswith(b"\n"):
            return json.loads(line)
        self.close()  # its process has ended
        self._stopped += 1
        reason = _reason(process.returncode)
        if self._stopped == MOST_STOPPED:
            raise InputError(f"the chat template {reason} for {self._stopped} conversations by now; {ANOTHER}")
        return {"unbounded": reason}

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()  # one that has ended keeps its status
            process.communicate()


def _started() -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", __name__],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )


def _reason(status: int) -> str:
    if status == -signal.SIGXCPU:
        return f"does not end within {CPU_SECONDS} seconds"
    return f"breaks Python (status {status})"


@cache
def renderer() -> Renderer:
    return Renderer()


# --- in the process that renders -------------------------------------------------------------------------------------


def _serve() -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal: the end of the other process ends this one
    _limit_memory()
    template = ""
    for line in sys.stdin.buffer:
        work = json.loads(line)
        template = work.get("template", template)
        _limit_cpu(work["cpu_seconds"])
        try:
            text = render_jinja_template([work["messages"]], chat_template=template, **work["options"])[0][0]
            answer: dict[str, Any] = {"text": text}
            if len(text) > MOST_CHARACTERS:
                answer = {"unbounded": f"writes more than {MOST_CHARACTERS} characters"}
        except MemoryError:
            answer = {"unbounded": f"takes more than {MEMORY_BYTES >> 20} MiB of memory"}
        except TemplateSyntaxError as error:
            answer = {"message": error.message or "", "line": error.lineno}
        except Exception as error:  # it may fail in any way
            answer = {"name": type(error).__name__, "message": str(error)}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def _limit_cpu(seconds: int) -> None:
    used = resource.getrusage(resource.RUSAGE_SELF)
    _lower(resource.RLIMIT_CPU, ceil(used.ru_utime + used.ru_stime) + seconds)


def _limit_memory() -> None:
    _lower(resource.RLIMIT_CORE, 0)
    if os.path.exists("/proc/self/statm"):  # elsewhere the memory that is taken now is not known
        with open("/proc/self/statm") as sizes:
            pages = int(sizes.read().split()[0])
        _lower(resource.RLIMIT_AS, pages * resource.getpagesize() + MEMORY_BYTES)


def _lower(limit: int, value: int) -> None:
    _, hard = resource.getrlimit(limit)
    resource.setrlimit(limit, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


if __name__ == "__main__":
    _serve()
