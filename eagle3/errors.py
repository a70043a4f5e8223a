"""The one exception for what a user can fix. Entry scripts print it as one line, without a traceback."""

import re
from importlib.util import find_spec

# What messages recommend for prompts that are not there.
MAKE_PROMPTS = "python precompute.py 'stages=[prompts]' prompts.path=FILE.jsonl out_dir=DIR prompts=in_house"


class InputError(ValueError):
    """Bad config or bad data: the message names the config key or row, the value, the rule and how to fix it.

    It is one line; what would steer a terminal, such as an escape in the name of a tensor, is shown as an escape."""

    def __init__(self, message: str = "") -> None:
        super().__init__(escaped(message))


class Interrupted(Exception):
    """The user or the scheduler asked to stop and the state is saved; the message says how to resume."""


def first_line(error: BaseException) -> str:
    """Return the message's first line, with the next one after a colon, or the name of the error if it has none."""
    first, *more = filter(None, map(str.strip, (str(error).strip() or type(error).__name__).splitlines()))
    return f"{first} {more[0]}" if first.endswith(":") and more else first


def escaped(text: str) -> str:
    """Return a text from a file with escapes for line breaks and whatever else does not print."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def printable(text: str) -> str:
    """Return the text of another program without what would steer a terminal: colours, line breaks, bells."""
    return "".join(each if each.isprintable() else " " for each in re.sub(r"\x1b\[[0-?]*[ -/]*[@-~]", "", text))


def require_packages(*names: str, extra: str, needed_by: str) -> None:
    """Raise InputError when one of these packages cannot be imported; `extra` of pyproject.toml brings them all."""
    missing = next((name for name in names if find_spec(name) is None), None)
    if missing is not None:
        raise InputError(
            f"{needed_by} needs the package {missing}; install all that it needs: {install_command(extra)}"
        )


def install_command(extra: str) -> str:
    """Return the command that installs an extra of pyproject.toml. The package index does not have this project: what
    is called eagle3 there is somebody else's."""
    return f"pip install -c constraints.txt -e '.[{extra}]' in the clone"
