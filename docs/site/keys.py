"""The page of every configuration key: python docs/site/keys.py prints it. It is made of conf/ and its comments."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

from eagle3.settings.help import read_key_comments

CONF = Path(__file__).parents[2] / "conf"
COMMANDS = ("precompute", "train", "serve")
NO_KEYS = ("hydra/help", "hydra/job_logging")  # ours, for --help and log=
LONGEST = 100  # characters of a value that is shown
Key = tuple[str, ...]


@dataclass(frozen=True)
class Setting:
    key: str
    value: str
    comment: str
    group: str  # what the comment is about: the key itself, or keys that it is one of; "" without a comment


@dataclass(frozen=True)
class Option:
    """A YAML file: an option of a group, or a command's own keys."""

    name: str
    about: str
    target: str  # its class
    settings: list[Setting]


def page() -> str:
    """Return the page in Markdown."""
    lines = [
        "# Every key\n",
        "Made from the comments of `conf/` when these pages are built; `--help` behind a command shows the same with",
        "the values that are chosen. Values that do not fit are refused in the first second. `null` means what the",
        "line says, `???` that the key must be given.\n",
    ]
    for command in COMMANDS:
        lines += [f"## {command}.py\n", *_of(read(CONF / f"{command}.yaml")), ""]
    folder = None
    for path in sorted(CONF.rglob("*.yaml"), key=lambda path: (path.parent, path.stem != "default", path.stem)):
        group = path.parent.relative_to(CONF).as_posix()
        if group == "." or group in NO_KEYS:
            continue
        if group != folder:
            lines += [f"## {group}\n"]
        folder = group
        option = read(path)
        lines += [f"### {option.name}\n", *_of(option), ""]
    return "\n".join(lines)


def _of(option: Option) -> Iterator[str]:
    if option.about:
        yield f"{_text(option.about)}\n"
    if option.target:
        yield f"Class: `{option.target}`\n"
    if option.settings:
        yield "| key | value | what |\n| --- | --- | --- |"
        group = ""
        for setting in option.settings:
            if setting.group not in (group, setting.key):
                yield f"| `{setting.group}.*` | | {_text(setting.comment)} |"
            group = setting.group
            comment = setting.comment if group == setting.key else ""
            yield f"| `{setting.key}` | {_value(setting.value)} | {_text(comment)} |"


def _value(value: str) -> str:
    return f"`{value}`".replace("|", "\\|") if value else ""


def _text(comment: str) -> str:
    """Return a comment as Markdown, in which what stands between angle brackets is no tag."""
    return re.sub(r"([|*<\\])", r"\\\1", comment)


def read(path: Path) -> Option:
    """Return what an option's file says. Keys that a file takes over from another one have that one's comment."""
    text = path.read_text()
    name = path.relative_to(CONF).with_suffix("").as_posix()
    group, _, option = name.rpartition("/")
    package = _package(text, group)
    root = yaml.compose(text)
    nodes = root.value if isinstance(root, yaml.MappingNode) else []
    said = {key: comment for other in _neighbours(path) for key, comment in _read_file_comments(other)}
    said |= dict(read_key_comments(package, text))
    classes = [value.value for key, value in nodes if key.value == "_target_"]
    about = " ".join(_head(text))
    settings = list(_settings(nodes, package, said, text))
    is_option = group and group != "serve"  # whose files are parts of several actions
    return Option(f"{group}={option}" if is_option else name, about, "".join(classes), settings)


def _read_file_comments(path: Path) -> Iterator[tuple[Key, str]]:
    text, group = path.read_text(), path.parent.relative_to(CONF).as_posix()
    return read_key_comments(_package(text, group), text)


def _neighbours(path: Path) -> list[Path]:
    """Return the options of the same group; an experiment sets keys of all groups."""
    if path.parent.name == "experiment":
        return sorted(CONF.glob("*/*.yaml"))
    return [] if path.parent == CONF else sorted(path.parent.glob("*.yaml"))


def _package(text: str, group: str) -> Key:
    stated = re.match(r"# @package (\S+)", text)
    name = stated[1] if stated else group.replace("/", ".")
    return () if name in ("_global_", "") else tuple(name.split("."))


def _head(text: str) -> Iterator[str]:
    """Yield the comment at the head of a file."""
    for line in text.splitlines():
        if not line.startswith("#"):
            return
        if "@package" not in line:
            yield line.lstrip("# ").strip()


def _settings(nodes: list, place: Key, said: dict[Key, str], text: str) -> Iterator[Setting]:
    for name, value in nodes:
        key = (*place, str(name.value))
        if key[-1] in ("defaults", "_target_") or key == ("hydra",):
            continue
        inside = isinstance(value, yaml.MappingNode) and not value.flow_style and value.value
        if inside and not _is_part(value):
            yield from _settings(value.value, key, said, text)
            continue
        shown = "" if inside else text[value.start_mark.index : value.end_mark.index]
        shown = shown if len(shown) <= LONGEST and "\n" not in shown else "…"
        about = next((key[:length] for length in range(len(key), 0, -1) if key[:length] in said), ())
        yield Setting(".".join(key), shown, said.get(about, ""), ".".join(about))
        if inside:
            yield from _settings(value.value, key, said, text)


def _is_part(value: yaml.MappingNode) -> bool:
    """Whether a mapping is a class with its arguments, e.g. a callback or a logger."""
    return any(key.value == "_target_" for key, _ in value.value)


if __name__ == "__main__":
    print(page())
