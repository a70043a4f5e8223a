"""Finds the commands that users are shown: on pages and in the notebook, in docstrings of scripts, in comments of
conf/, in docs/recipes, and in messages of the code.

A command is complete where it is there to be pasted: in a block, in a script's docstring, in a recipe, and in a message
that begins it with `python`; unless it has an ellipsis. All others (`train.py init_from=HEAD`) show a part of one.
"""

import ast
import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from page_commands import FENCE, PAGES, blocks, name
from stores import CONF, ROOT

from eagle3.messages import PLUGINS

GIVEN = "???"  # stands for a value that a message fills in
SCRIPTS = ("train", "precompute", "serve")
REST = r"((?:\s+(?!#|`|\||;)[^\n;`]*)?)"
OURS = re.compile(rf"(?<![\w/.-])(python |sbatch docs/recipes/)?(train|precompute|serve)\.(?:py|sbatch){REST}")
PROGRAM = re.compile(rf"(?<![\w/.`-])(eagle3) (train|precompute|serve){REST}")


@dataclass(frozen=True)
class Command:
    """One of our scripts with its overrides."""

    where: str
    script: str
    words: tuple[str, ...]
    complete: bool

    def __str__(self) -> str:
        return f"{self.where}: {self.script}.py {' '.join(self.words)}"


@dataclass(frozen=True)
class Text:
    """What a user reads in one place. Commands in it are there to be `pasted`, or part of a sentence or message."""

    where: str
    text: str
    pasted: bool
    message: bool = False


def commands_in(shown: Text) -> Iterator[Command]:
    """Lines that end in a backslash are one."""
    joined = re.sub(r"  #.*", "", re.sub(r"\\\n[#\s]*", " ", shown.text))
    for prefix, script, rest in [*OURS.findall(joined), *PROGRAM.findall(joined)]:
        try:
            words = shlex.split(rest, comments=True)
        except ValueError as error:
            raise AssertionError(f"{shown.where}: {script}.py{rest}: {error}") from None
        whole = shown.pasted or (shown.message and prefix == "python ")
        ellipsis = any(word.strip(".…") == "" for word in words)
        overrides = tuple(word for word in words if "=" in word and not word.startswith("-"))
        if overrides and "--config-dir" not in words:  # those run, with the options that they name: test_pages.py
            yield Command(shown.where, script, overrides, complete=whole and not ellipsis)


def of_a_plugin(word: str) -> bool:
    """Whether Hydra's plugins, which tests may run without, decide what this is; our option has to be there."""
    group, _, option = word.partition("=")
    if group in ("hydra/sweeper", "hydra/launcher"):
        assert option in PLUGINS or (CONF / group / f"{option}.yaml").is_file(), word
    return group.startswith(("hydra/sweeper", "hydra/launcher", "hydra.sweeper", "hydra.launcher"))


# --- where they stand ------------------------------------------------------------------------------------------------


def page_texts(page: Path) -> Iterator[Text]:
    """Blocks that tests/test_pages.py runs are left out."""
    where, text = name(page), page.read_text()
    for block in blocks(page):
        if not block.is_command:
            yield Text(where, block.text, pasted=False)
        elif block.needs:
            yield Text(where, block.text, pasted=True)
    text = FENCE.sub("", text)
    for indented in re.findall(r"(?:^ {4,}\S.*\n)+", text, flags=re.MULTILINE):
        yield Text(where, indented, pasted=True)
    for inline in re.findall(r"(?<!`)`([^`]+)`(?!`)", re.sub(r"^ {4,}\S.*$", "", text, flags=re.MULTILINE)):
        yield Text(where, inline, pasted=False)


def notebook_texts(path: Path) -> Iterator[Text]:
    for cell in json.loads(path.read_text())["cells"]:
        if cell["cell_type"] == "markdown":
            yield Text(name(path), "".join(cell["source"]), pasted=False)


def python_texts(path: Path) -> Iterator[Text]:
    """The docstring of a file, and its other strings as messages: what they fill in is a value that is given."""
    where, tree = name(path), ast.parse(path.read_text())
    yield Text(where, ast.get_docstring(tree) or "", pasted=path.parent == ROOT or path.name == "__main__.py")
    seen = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # docstrings
    for node in ast.walk(tree):  # a string with values comes before its parts
        if isinstance(node, ast.JoinedStr):
            seen |= {id(part) for part in ast.walk(node)}
            yield Text(where, "".join(_filled(part) for part in node.values), pasted=False, message=True)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in seen:
            yield Text(where, node.value, pasted=False, message=True)


def _filled(part: ast.expr) -> str:
    return part.value if isinstance(part, ast.Constant) else GIVEN


def yaml_texts(path: Path) -> Iterator[Text]:
    """A colon ends a command there: `python serve.py action=check: what is wrong with a head`."""
    for comment in re.findall(r"(?:^|\s)# (.*)", path.read_text()):
        for part in comment.split(": "):
            yield Text(name(path), part, pasted=False)


def recipe_texts(path: Path) -> Iterator[Text]:
    """Variables of the shell are numbers of machines and GPUs, and arguments of the recipe itself."""
    text = re.sub(r'"?\$(\w+)"?', "2", path.read_text().replace('"$@"', "…"))
    yield Text(name(path), re.sub(r"(?<=\S)\n +(?=\w+\.py |[\w./]+=|--)", " ", text), pasted=True)


@cache
def all_texts() -> tuple[Text, ...]:
    code = [*sorted((ROOT / "eagle3").rglob("*.py")), *(ROOT / f"{name}.py" for name in SCRIPTS)]
    return (
        *(text for page in PAGES for text in page_texts(page)),
        *(text for path in sorted((ROOT / "docs").rglob("*.ipynb")) for text in notebook_texts(path)),
        *(text for path in code for text in python_texts(path)),
        *(text for path in sorted(CONF.rglob("*.yaml")) for text in yaml_texts(path)),
        *(text for path in sorted((ROOT / "docs" / "recipes").iterdir()) for text in recipe_texts(path)),
    )
