"""Text of --help: the command, its groups with their options, each key with its comment from conf/."""

import ast
import re
import shutil
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf

from eagle3 import ROOT
from eagle3.adapters.hydra import group_options, option_files
from eagle3.settings.flat import flattened
from eagle3.settings.types import shown

COLUMN = 40  # where comments begin
FLAGS = """\
Flags:
  --cfg job             print the composed config as YAML; with --resolve, references are replaced by their values
  --config-dir FOLDER   add a folder with options of your own; modules next to it can be imported
  -m, --multirun        run a job for each combination of values: optim.lr=1e-4,3e-4
  --hydra-help          show Hydra's own flags; hydra/launcher and hydra/sweeper choose where jobs run
"""

Key = tuple[str, ...]


def help_page(config: DictConfig) -> str:
    """Return the help page of a composed config: it shows the options that the command line chooses."""
    texts = [
        (tuple(part for part in package.split(".") if part and part != "_global_"), file.read_text())
        for package, file in option_files(config)
    ]
    said = {key: comment for package, text in texts for key, comment in read_key_comments(package, text)}
    groups = {_group(key[-1]): comment for key, comment in said.items() if key[-2:-1] == ("defaults",)}
    page = [
        _about(config.hydra.job.config_name, config.get("action")),
        "Groups, GROUP=OPTION (* marks the current option):",
        *_groups(config, groups),
        "",
    ]
    values: Any = OmegaConf.to_container(config, resolve=False)
    del values["hydra"]
    lines = (line for key, value in flattened(values, groups=True) for line in _line(key, value, said))
    page += ["Keys, KEY=VALUE:", *lines]
    return "\n".join([*page, "", FLAGS]).replace("$", "$$")  # Hydra makes $$ to $


def _about(script: str, action: str | None) -> str:
    """Return the docstring of the script, which shows commands to paste; of serve.py with an action those of that."""
    path = ROOT / f"{script}.py"
    text = ast.get_docstring(ast.parse(path.read_text())) if path.is_file() else None
    if text and action:
        first = about_option(ROOT / "conf" / "action" / f"{action}.yaml")
        return "\n".join([first, "", *(line for line in text.splitlines() if f"action={action} " in line), ""])
    return f"{text}\n" if text else ""


def about_option(path: Path) -> str:
    """Return the first comment of an option's file."""
    comments = [line for line in path.read_text().splitlines() if line.startswith("# ") and "@package" not in line]
    return comments[0].removeprefix("# ") if comments else ""


# --- conf/ -----------------------------------------------------------------------------------------------------------


def _groups(config: DictConfig, said: dict[str, str]) -> Iterator[str]:
    for group, chosen in config.hydra.runtime.choices.items():
        if group.startswith("hydra/"):
            continue
        taken = re.findall(r"\w+", str(chosen))
        options = [f"*{each}" if each in taken else each for each in group_options(group)]
        words = f"  {group:<23} {' '.join(options)}"
        yield from textwrap.wrap(words, _width(), subsequent_indent=" " * 26, break_on_hyphens=False)
        if group in said:
            yield from textwrap.wrap(said[group], _width(), initial_indent=" " * 28, subsequent_indent=" " * 28)


def _line(key: str, value: Any, said: dict[Key, str]) -> list[str]:
    comment = said.get(tuple(key.split(".")))
    is_group = isinstance(value, dict) and bool(value)  # its comment is about all keys below
    words = f"  {key}.*" if is_group else f"  {key}={shown(value)}"
    if comment is None:
        return [] if is_group else [words]
    indent = " " * COLUMN
    if len(words) < COLUMN - 1:
        return textwrap.wrap(comment, _width(), initial_indent=words.ljust(COLUMN), subsequent_indent=indent)
    return [words, *textwrap.wrap(comment, _width(), initial_indent=indent, subsequent_indent=indent)]


def _width() -> int:
    return max(shutil.get_terminal_size((120, 24)).columns, 2 * COLUMN)


# --- comments of a YAML file -----------------------------------------------------------------------------------------

BEHIND = re.compile(r"\s*#\s*(.*)")


def read_key_comments(package: Key, text: str) -> Iterator[tuple[Key, str]]:
    """Yield the keys of a YAML file that have a comment: the one after the value, else the one above the key."""
    root = yaml.compose(text)
    if isinstance(root, yaml.MappingNode):
        yield from _of_mapping(root, package, text.splitlines())


def _of_mapping(node: yaml.MappingNode, place: Key, lines: list[str]) -> Iterator[tuple[Key, str]]:
    for name, value in node.value:
        key = (*place, str(name.value))
        inside = isinstance(value, yaml.MappingNode)
        mark = name.end_mark if inside and not value.flow_style else value.end_mark
        comment = _behind(lines, mark) or _above(lines, name.start_mark.line)
        if comment:
            yield key, comment
        items = value.value if isinstance(value, yaml.SequenceNode) else [value]
        for item in items:
            if isinstance(item, yaml.MappingNode):  # in a list, such as the defaults: of its keys
                yield from _of_mapping(item, key, lines)


def _group(entry: str) -> str:
    """Return the group of an entry of a defaults list."""
    return entry.removeprefix("optional ").removeprefix("override ").strip("/")


def _behind(lines: list[str], mark: yaml.Mark) -> str:
    rest = lines[mark.line][mark.column :].removeprefix(":") if mark.line < len(lines) else ""
    found = BEHIND.fullmatch(rest)
    return found[1] if found else ""


def _above(lines: list[str], line: int) -> str:
    first = line
    while first and lines[first - 1].lstrip().startswith("#"):
        first -= 1
    if first == 0:  # the head of the file is about all of it
        return ""
    return " ".join(each.strip().lstrip("# ") for each in lines[first:line])
