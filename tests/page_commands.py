"""Runs the commands of the pages: each page in a folder of its own that looks like a clone."""

import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import tables
from forks import run_forked
from stores import ASSETS, ROOT

from eagle3.storage.files import read_jsonl

OTHERS = ("benchmarks/README.md", "AGENTS.md", "CHANGELOG.md", "CONTRIBUTING.md")
PAGES = [*tables.PAGES, *(ROOT / name for name in OTHERS)]
CLONE = ("precompute.py", "train.py", "serve.py", "conf", "eagle3", "tests", "benchmarks")
FENCE = re.compile(r"^( *)```(\w+)([^\n]*)\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
SCRIPT = re.compile(r"python ([\w/]+\.py|-m [\w.]+) (.*)")
SMALL = {  # what a command does not set itself, so that a page takes seconds
    "precompute": ("sampling.max_new_tokens=16", "features.shard_mb=1", "prompts.processes=1"),
    "train": (
        "data.val_fraction=0.2", "trainer.max_epochs=1", "trainer.log_every_n_steps=1", "trainer.precision=32-true",
        "callbacks.curves=null",
    ),
    "serve": ("max_new_tokens=16", "limit=2"),
}  # fmt: skip
FEWER = " prompts.limit=12 prompts.from_target.max_new_tokens=64"  # prompts than a page lets the target write


@dataclass(frozen=True)
class Block:
    page: str
    language: str
    title: str
    text: str

    @property
    def is_command(self) -> bool:
        return self.language in ("bash", "console", "sh", "shell")

    @property
    def needs(self) -> str:
        """What a machine needs to run it, where it is not run in a test."""
        return self.title.removeprefix("needs: ") if self.title.startswith("needs: ") else ""


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path) -> list[Block]:
    found = []
    for _, language, rest, text in FENCE.findall(page.read_text()):
        title = re.search(r'title="([^"]*)"', rest)
        found.append(Block(name(page), language, title[1] if title else "", text))
    return found


def clone(folder: Path) -> Path:
    """Make a folder in which the commands of the pages find what a clone holds."""
    folder.mkdir(exist_ok=True)
    for name in CLONE:
        (folder / name).symlink_to(ROOT / name)
    (folder / "TARGET").symlink_to(ROOT / "tests" / "assets" / "tiny")
    return folder


def write_files(page: Path, folder: Path) -> None:
    """Write the files that a page shows."""
    for block in blocks(page):
        if block.language in ("python", "yaml") and "/" in block.title:
            path = folder / block.title
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text)


def own_rows(count: int) -> list[str]:
    """Return lines of JSON as of a company's own chats: without a licence."""
    rows = islice(read_jsonl(ASSETS / "prompts" / "train.jsonl"), count)
    return [json.dumps({key: value for key, value in row.items() if key != "license"}) + "\n" for row in rows]


def run_block(text: str, folder: Path) -> tuple[int, str]:
    """Run a block's commands one after the other, with less work, until one fails; return its exit status and what all
    of them said."""
    said = ""
    for command in commands(text):
        script = SCRIPT.fullmatch(command)
        if script and not set(";|&<>$(){*?~\\") & set(re.sub(r"'[^']*'", "", command)):  # it needs no shell
            command += smaller(script[1].removesuffix(".py"), script[2])
            status, output = run_python(command, folder)
        else:
            status, output = run_bash(command, folder)
        said += output
        if status:
            return status, said
    return 0, said


def smaller(script: str, arguments: str) -> str:
    """Return overrides for less work: of keys that a command does not set, and of the prompts by the target."""
    given = {word.partition("=")[0] for word in shlex.split(arguments)}
    less = () if script == "serve" and "action=launch" in arguments else SMALL.get(script, ())
    checks = ("check.min_accept_length=1.0",) if re.search("action=(export|check)", arguments) else ()
    words = "".join(f" {word}" for word in (*less, *checks) if word.partition("=")[0] not in given)
    return words + FEWER if "prompts=from_target" in arguments else words


def commands(text: str) -> list[str]:
    """Split a block into commands: lines that a backslash joins, without comments; what is quoted stays whole."""
    joined = re.sub(r"\\\n\s*", " ", text)
    if re.search(r"^(for|if|while)\b|<<", joined, flags=re.MULTILINE) or re.search(r'"[^"\n]*\n', joined):
        return [joined]
    lines = (re.sub(r"(^|\s)#.*$", "", line).strip() for line in joined.splitlines())
    return [line for line in lines if line]


def run_python(command: str, folder: Path) -> tuple[int, str]:
    done = run_forked(*shlex.split(command)[1:], cwd=folder, env=environment(), merged=True)
    return done.returncode, done.stdout


def run_bash(command: str, folder: Path) -> tuple[int, str]:
    said = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run(["bash", "-c", command], cwd=folder, env=environment(), **said)  # type: ignore[call-overload]
    return done.returncode, done.stdout


def environment() -> dict[str, str]:
    return os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "COLUMNS": "120",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }
