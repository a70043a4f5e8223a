"""The stage `prompts` as precompute.py runs it, on rows written by a test; without a model for names."""

import json
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from scripts import composed

from eagle3.prompts import Prompt, Refused, source_at
from eagle3.prompts.reading.conversation import conversation
from eagle3.prompts.reading.formats import BLANK, chunk_rows, cut
from eagle3.prompts.reading.rows import read_prompt
from eagle3.prompts.reading.shapes import Layout, build_layout
from eagle3.prompts.rules import Rules
from eagle3.prompts.stage import prepare_prompts
from eagle3.settings.prompts import PromptSettings
from eagle3.settings.types import validated
from eagle3.storage.files import read_jsonl

OUTPUTS = ("prompts.jsonl", "rejects.jsonl", "ledger.json", "report.md", "attribution.txt")


def write(path: Path, rows: list) -> Path:
    """Rows as JSON Lines; a str is written as it stands."""
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def chat(*texts: str, **fields: Any) -> dict:
    """A row of user and assistant turns in alternation, under the MIT licence."""
    roles = ("user", "assistant")
    messages = [{"role": roles[index % 2], "content": text} for index, text in enumerate(texts)]
    return {"license": "MIT", "messages": messages, **fields}


def read_messages(row: dict, *, keep_answers: bool, shape: Layout | None = None) -> list[dict]:
    """The conversation of a row as the stage reads it."""
    return conversation((shape or build_layout(None, None)).read(row), keep_answers=keep_answers)


def read_file(path: Path | str, *, chunk_bytes: int = 100) -> list[Prompt | Refused]:
    """The rows of a file, read in chunks as the stage reads them, without its checks."""
    source = source_at("prompts", str(path))
    rows = [row for chunk in cut(str(path), chunk_bytes) for _, row in chunk_rows(chunk, source.shape)]
    return [read_prompt(row, source, keep_answers=False) for row in rows if row is not BLANK]


def users(*texts: str) -> list[dict]:
    return [{"role": "user", "content": text} for text in texts]


def some_rows(count: int) -> list:
    """Conversations with an empty line, a broken one, a refused one and a duplicate here and there."""
    rows: list = []
    for number in range(count):
        rows.append(chat(f"question {number}: {'ä' * (number % 7)}", "x", id=number))
        rows += {3: [""], 5: ["{broken"], 11: [chat("no licence", license=None)], 13: [rows[0]]}.get(number % 17, [])
    return rows


@cache
def _defaults() -> str:
    config = composed("precompute", "prompts/privacy=patterns", "prompts.processes=1")
    return json.dumps(OmegaConf.to_container(config.prompts, resolve=True))


def default_settings() -> dict[str, Any]:
    return json.loads(_defaults())


def prepared(out_dir: Path, *, keep_answers: bool = False, **config: Any) -> dict:
    """Run the stage; a dict in `config` changes some keys of a group, any other value is a key of conf/prompts."""
    settings = default_settings()
    for key, value in config.items():
        settings[key] = {**(settings[key] or {}), **value} if isinstance(value, dict) else value
    prompts = validated(PromptSettings, settings)
    rules = Rules(prompts, privacy=prompts.privacy.build())
    return prepare_prompts(prompts, rules, keep_answers=keep_answers, out_dir=out_dir)


class Prepare:
    """Calls the stage on rows or on what `config` names, and reads what it wrote.

    near: whether near duplicates are looked for, which takes longer than all the rest.
    """

    def __init__(self, root: Path, *, near: bool = False):
        self.root, self.out_dir, self.folder = root, root / "out", root / "out" / "prompts"
        self.near = near
        root.mkdir(exist_ok=True)

    def __call__(self, rows: list | None = None, **config: Any) -> dict:
        if rows is not None:
            config["path"] = str(write(self.root / "chats.jsonl", rows))
        config["duplicates"] = {"near": self.near} | config.get("duplicates", {})
        return prepared(self.out_dir, **config)

    def again(self, **config: Any) -> dict:
        """Run the stage once more on the same file, from the start."""
        (self.folder / "ledger.json").unlink(missing_ok=True)
        return self(path=str(self.root / "chats.jsonl"), **config)

    def prompts(self) -> list[dict]:
        return list(read_jsonl(self.folder / "prompts.jsonl"))

    def rejects(self) -> list[dict]:
        return list(read_jsonl(self.folder / "rejects.jsonl"))

    def outputs(self) -> dict[str, bytes]:
        return {name: (self.folder / name).read_bytes() for name in OUTPUTS}


def reasons(prepare: Prepare) -> list[str]:
    return [reject["reason"] for reject in prepare.rejects()]


def texts(prepare: Prepare) -> list[str]:
    """The first turn of every prompt."""
    return [prompt["messages"][0]["content"] for prompt in prepare.prompts()]
