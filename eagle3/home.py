"""Home folders in paths: `~` and `~user`, which a shell expands only at the beginning of a word."""

import os
import re
import shlex

from eagle3.errors import InputError

# Keys whose values are paths, by the last part of the key or of its name: also keys of the user's own parts.
PATH_KEY = re.compile(
    r"(^|\.)([\w-]*[_-])?(path|dir|dirpath|folder|file|template|python)$"
    r"|(^|\.)(run|sweep|checkpoint|heads?|init_from|findings|out|results|checkpoint_copies|copies|memory)$"
    r"|(^|\.)(sources|benchmarks|known|sample|searchpath|bench\.prompts\.[^.]+)$"
)
# Of these, the ones that never name a bucket: as a path, s3://BUCKET/HEAD is a folder below the working directory.
LOCAL_KEY = re.compile(r"hydra\.(run|sweep)\.dir|run|sweep|checkpoint|heads?|init_from|findings|results")
HOME = re.compile(r"~[^/]*")
# A value of the command line: quoted texts and interpolations are left as they are. A path ends where Hydra's grammar
# ends a value without quotes.
VALUE = re.compile(
    r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|\$\{[^}]*\}"""
    r"""|(?P<before>(?:^|[,\[{(:])\s*)(?P<path>~(?:\\.|\$\{[^}]*\}|[^\\,\[\]{}()'"])*)"""
)
PLAIN = re.compile(r"[\w./:@%+|*?-]+")  # what Hydra reads as a text without quotes


def expand_home(path: str, key: str) -> str:
    """Return a path that begins with `~` with the home folder instead; `key` is the config key that it comes from."""
    home = HOME.match(path)
    if home is None:
        return path
    expanded = os.path.expanduser(path)
    if expanded != path:
        return expanded
    user = home[0][1:]
    if user:
        raise InputError(
            f"{key}={path}: this machine has no user {user}; give the whole path, or ./~{user} for a "
            f"folder of that name"
        )
    raise InputError(
        f"{key}={path}: this process has no home folder (HOME is not set, and user id {os.getuid()} has none); give "
        f"the whole path"
    )


def expand_override(word: str) -> str:
    """Expand each `~` that begins a value without quotes in a word of the command line. Hydra would refuse it."""
    key, separator, value = word.partition("=")

    def expand(found: re.Match[str]) -> str:
        if found["path"] is None:
            return found[0]
        path = re.sub(r"\\([\\()\[\]{}:=, \t])", r"\1", found["path"].rstrip())
        return found["before"] + quoted(expand_home(path, key.lstrip("+")))

    return f"{key}{separator}{VALUE.sub(expand, value)}"


def expand_option(word: str) -> str:
    """Expand `~` in a word like --config-dir=~/team, which bash leaves as it is."""
    option, separator, path = word.partition("=")
    return f"{option}={expand_home(path, option)}" if option.startswith("-") and separator else word


def quoted(text: str) -> str:
    """Write a text as Hydra's grammar reads it, with quotes only where they are necessary."""
    if PLAIN.fullmatch(text):
        return text
    # Backslashes are special only before a quote.
    escaped = re.sub(r'(\\*)("|$)', lambda found: found[1] * 2 + ('\\"' if found[2] else ""), text)
    return f'"{escaped}"'


def pasted(path: str | os.PathLike) -> str:
    """Write a path for the shell and for Hydra behind it, in a command to paste."""
    return shlex.quote(quoted(str(path)))
