"""Ctrl-C, and SIGTERM, which schedulers send, while a command has nothing to save: from its first line until it works,
and when it has said why it ends.

Modules that are imported then may swallow a KeyboardInterrupt, take it for an error of their own, or crash at the exit.
"""

import os
import signal
import threading
import time
from functools import cache
from types import FrameType

STATUS = 130
LOOK_S = 5.0  # between two looks at the parent process
_started = False


def end_at_once() -> None:
    """Let both signals end this process, from the first line of a command on."""
    global _started
    _started = True
    _handle_by(_end)


def end_silently() -> None:
    """Let both signals end a command that has ended or has said why it ends. Nothing in another program."""
    if _started:
        _handle_by(_end_silently)


def raise_interrupts() -> None:
    """Let them raise KeyboardInterrupt from now on: a command has something to save or to stop."""
    if signal.getsignal(signal.SIGTERM) is _end:
        _handle_by(signal.default_int_handler)
        signal.signal(signal.SIGTERM, end_like_ctrl_c)


def end_by_default() -> None:
    """Let the system end this process: no handler of Python runs while torch waits for other ranks."""
    _handle_by(signal.SIG_DFL)


def in_command() -> bool:
    """Say whether this process is a command, and not a worker that a launcher has started."""
    return _started


@cache  # once for all jobs of a worker
def end_with_parent() -> None:
    """Send this process SIGTERM when its parent is gone: a launcher's workers would outlive a sweep that is killed."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(LOOK_S)
        while True:  # a training saves at the first, and a worker that waits for its next job ends at the second
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(LOOK_S)

    threading.Thread(target=watch, daemon=True).start()


def end_like_ctrl_c(number: int, frame: FrameType | None) -> None:
    """Call SIGINT's handler of that moment: asyncio's own ends its tasks first."""
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler):  # ignored, as in a shell's background
        handler = signal.default_int_handler
    handler(number, frame)


def _handle_by(handler: signal.Handlers | object) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as Ctrl-C in a shell's background
            signal.signal(number, handler)  # type: ignore[arg-type]


def _end(number: int, frame: FrameType | None) -> None:
    os.write(2, b"error: interrupted\n")
    os._exit(STATUS)


def _end_silently(number: int, frame: FrameType | None) -> None:
    os._exit(STATUS)
