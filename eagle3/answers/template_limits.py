"""Limits for a chat template, which is a program that came with the model.

Before a template renders prompts in this process, it renders conversations of several shapes in a process of its own,
which the system stops at the limits. This does not find a template that exceeds them only for conversations of another
shape or content: there, the length of the text alone is checked, once it is written.
"""

import json
import os
import resource
import signal
import subprocess
import sys
from functools import cache
from itertools import product
from math import ceil
from typing import Any

from eagle3.errors import InputError

CPU_SECONDS = 10  # for all conversations; a usual template takes milliseconds
MEMORY_BYTES = 2**30  # more than the process has before the first rendering
MOST_CHARACTERS = 2**24  # of a rendered conversation
TOO_LONG, TOO_LARGE = 3, 4  # exit statuses

# With the roles of turns, and how often they are repeated.
SHAPES = (
    *((roles.split(), 1) for roles in ("user", "user assistant", "user assistant user", "system user")),
    *((roles.split(), 1) for roles in ("system user assistant", "system user assistant user assistant user")),
    (["user", "assistant"], 24),
)
TEXTS = ("Two and two?", "Two words and 3 numbers: 1.5, 22.\n" * 100)
TOOLS = [{"type": "function", "function": {"name": "sum", "description": "Adds.", "parameters": {}}}]
OPTIONS: tuple[dict[str, Any], ...] = (
    {"add_generation_prompt": False},
    {"add_generation_prompt": True},
    {"add_generation_prompt": True, "tools": TOOLS},
)


@cache
def require_bounded(template: str, variables: str) -> None:
    """Raise InputError for a template that does not end within the limits; `variables` are a JSON object."""
    work = {"template": template, "variables": json.loads(variables), "cpu_seconds": CPU_SECONDS}
    child = subprocess.run(
        [sys.executable, "-m", __name__],
        input=json.dumps(work),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
    )
    if child.returncode == 0:
        return
    reason = {
        TOO_LONG: f"writes more than {MOST_CHARACTERS} characters",
        TOO_LARGE: f"takes more than {MEMORY_BYTES >> 20} MiB of memory",
        -signal.SIGXCPU: f"does not end within {CPU_SECONDS} seconds",
    }.get(child.returncode, f"breaks Python (status {child.returncode}: {child.stderr.strip()[-200:]})")
    raise InputError(f"the chat template {reason} for a plain conversation; give another with chat.template=FILE.jinja")


def _render_all(template: str, variables: dict[str, Any], cpu_seconds: int) -> int:
    from transformers.utils.chat_template_utils import render_jinja_template

    _limit(cpu_seconds)
    for (roles, times), text, in_parts, options in product(SHAPES, TEXTS, (False, True), OPTIONS):
        content = [{"type": "text", "text": text}] if in_parts else text
        messages = [{"role": role, "content": content} for role in roles * times]
        try:
            rendered = render_jinja_template([messages], chat_template=template, **options, **variables)[0]
        except MemoryError:
            return TOO_LARGE
        except Exception:  # refused: each conversation of a run shows it
            continue
        if len(rendered[0]) > MOST_CHARACTERS:
            return TOO_LONG
    return 0


def _limit(cpu_seconds: int) -> None:
    used = resource.getrusage(resource.RUSAGE_SELF)
    _lower(resource.RLIMIT_CPU, ceil(used.ru_utime + used.ru_stime) + cpu_seconds)
    _lower(resource.RLIMIT_CORE, 0)
    if os.path.exists("/proc/self/statm"):  # elsewhere the memory that is taken now is not known
        with open("/proc/self/statm") as sizes:
            pages = int(sizes.read().split()[0])
        _lower(resource.RLIMIT_AS, pages * resource.getpagesize() + MEMORY_BYTES)


def _lower(limit: int, value: int) -> None:
    _, hard = resource.getrlimit(limit)
    resource.setrlimit(limit, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


if __name__ == "__main__":
    sys.exit(_render_all(**json.load(sys.stdin)))
