"""Reads SGLang's log: the stage of its start, and the reason for a failed one, in one line."""

import re
import signal
from pathlib import Path

from eagle3.errors import printable

PREFIX = re.compile(r"^\[\d{4}-\d\d-\d\d [^\]]*\]\s*")  # time and rank of a log line
EXCEPTION = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception|Interrupt|Exit)\b(?::|$)")
CHAINED = ("During handling of the above exception", "The above exception was the direct cause")
TRACEBACK = "Traceback (most recent call last)"
# A process of SGLang that dies reports so, and its parent then fails for another, meaningless reason.
LAST_WORDS = "hit an exception"
ADVICE = {
    "set_eagle3_layers_to_capture": "SGLang cannot capture hidden states from this target's model class: "
    "take a target that it can serve with EAGLE-3",
    "out of memory": "the GPU's memory does not suffice: lower launch.mem_fraction_static or "
    "launch.max_running_requests, or raise launch.tp_size",
    "Not enough memory": "raise launch.mem_fraction_static or lower launch.max_running_requests",
    "No module named 'sglang'": "install SGLang in the environment of launch.python",
}
LONGEST = 300  # characters of a reason
TAIL_BYTES = 1_000_000  # of a log that may have grown for days


def failure_reason(log: Path, status: int | None) -> str:
    """Return the exception that ended the server, with advice where there is some; else how it ended; else its last
    line."""
    lines = _tail(log)
    advised = [advice for sign, advice in ADVICE.items() if any(sign in line for line in lines)]
    refused = [line for line in lines if re.match(r"^\S*: error: ", line)]  # argparse
    ended = f"ended by {signal.Signals(-status).name}" if status is not None and status < 0 else ""
    found = _exception(lines) or next(iter(refused), "") or ended or next(reversed(lines), "it printed nothing")
    return " — ".join([found[:LONGEST], *advised[:1]])


def last_stage(log: Path) -> str:
    """Return the last line, short enough for a progress bar."""
    return next(reversed(_tail(log, num_bytes=4096)), "no output yet")[:100]


def _tail(log: Path, num_bytes: int = TAIL_BYTES) -> list[str]:
    """Return the lines that are not blank, without time stamps."""
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, 2) - num_bytes))
        text = file.read().decode(errors="replace")
    # Progress bars rewrite their line with \r.
    lines = [PREFIX.sub("", printable(line)).rstrip() for line in re.split(r"[\r\n]+", text)]
    return [line for line in lines if line]


def _exception(lines: list[str]) -> str:
    """Return the last line of the first traceback that a process reports as its end, else of the last one at all."""
    tracebacks = [number for number, line in enumerate(lines) if TRACEBACK in line]
    reported = [number for number in tracebacks if LAST_WORDS in lines[number]]
    chosen = reported[:1] or tracebacks[-1:]
    return _end_of_chain(lines[chosen[0] + 1 :]) if chosen else ""


def _end_of_chain(lines: list[str]) -> str:
    found = ""
    for number, line in enumerate(lines):
        if EXCEPTION.match(line):
            found = line
            following = lines[number + 1] if number + 1 < len(lines) else ""
            if not following.startswith(CHAINED):
                break
    return found
