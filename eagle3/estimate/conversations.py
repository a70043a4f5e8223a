"""A sample of the conversations that the features stage will get: answered ones, or prompts with stand-ins for answers.

Of a stand-in nothing counts but its length, and that it comes through the chat template as an answer does.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from eagle3.answers.answerer import Answer
from eagle3.answers.chat import Chat
from eagle3.answers.dialogue import Dialogue
from eagle3.answers.rows import ResponseRow
from eagle3.answers.store import MAKE_PROMPTS, read_responses, read_rows
from eagle3.errors import InputError
from eagle3.features.split import hash64
from eagle3.storage.files import read_jsonl
from eagle3.target.files import TargetFiles
from eagle3.target.identity import require_same_target
from eagle3.target.model import config_hash, identity_of

WORD = "the"  # one token of any tokenizer, with or without a space before it
RowsOf = Callable[[dict[str, Any]], list[ResponseRow]]  # of a line of prompts.jsonl


@dataclass(frozen=True)
class Expected:
    """Rows of some prompts. `scale`: how many times as much all prompts are; `answers` says where theirs come from."""

    rows: list[ResponseRow]
    prompts: int
    scale: float
    answers: str


def expected_conversations(out_dir: Path, files: TargetFiles, sample: int, rows_of: RowsOf, answers: str) -> Expected:
    """Take about `sample` prompts of DIR/prompts: with their answers where DIR/responses holds some, else `rows_of`."""
    path = out_dir / "prompts" / "prompts.jsonl"
    if not (path.is_file() and path.stat().st_size):
        raise InputError(f"{path} does not exist or is empty, and an estimate needs prompts; make it: {MAKE_PROMPTS}")
    with path.open("rb") as lines:
        count = sum(1 for _ in lines)
    found = answered(out_dir / "responses", files, count, sample)
    if found is not None:
        return found
    prompts = [prompt for prompt in read_jsonl(path) if chosen(prompt["id"], sample / count)]
    rows = [*chain.from_iterable(map(rows_of, prompts))]
    return Expected(rows, count, count / max(1, len(prompts)), answers)


def answered(folder: Path, files: TargetFiles, prompts: int, sample: int) -> Expected | None:
    """Take rows of a responses stage that has ended, or that is under way."""
    if not (folder / "manifest.json").exists():
        return None
    manifest = read_responses(folder)
    theirs = manifest.target
    ours = identity_of(files.path, files.config, config_hash(files.config_dict), files.tokenizer, theirs.weights_hash)
    require_same_target(
        theirs,
        ours.with_template(theirs.template_hash),
        expected_from=str(folder),
        actual_from=f"target.path={files.path}",
    )
    kept, seen, finished = [], 0, 0
    for row in read_rows(folder):
        seen += 1
        finished += row.last_of_prompt
        if chosen(row.prompt_id, sample / prompts):
            kept.append(row)
    if not kept:
        return None
    scale = seen / len(kept) * (1 if manifest.complete else prompts / max(1, finished))
    return Expected(kept, prompts, scale, f"those of {finished} prompts in {folder}")


def chosen(prompt_id: str, share: float) -> bool:
    """Decide by the id, so that no order of the prompts makes a sample of one source."""
    return hash64("estimate", prompt_id) < share * 2**64


def stand_ins(chat: Chat, *, tokens: int, cut: bool, max_prompt_tokens: int | None) -> RowsOf:
    """Return what gives every turn of a prompt an answer of so many tokens; one that is `cut` ends its conversation."""
    answer = Answer(stand_in(chat, tokens), "length" if cut else "stop")

    def rows_of(prompt: dict[str, Any]) -> list[ResponseRow]:
        dialogue = Dialogue(prompt, chat, seed=0, max_prompt_tokens=max_prompt_tokens, on_length="keep")
        while dialogue.waiting:
            dialogue.answer(answer)
        return dialogue.rows

    return rows_of


def stand_in(chat: Chat, tokens: int) -> list[int]:
    """Return ids of words, with the end of a reasoning in the middle where the template knows one, and of the turn."""
    end = end_of_turn(chat)
    reasoning = chat.encode(f" {chat.reasoning.end}") if chat.reasoning else []
    words = chat.encode(" ".join([WORD] * tokens))
    if tokens < len(reasoning) + len(end) + 4:
        return words[: tokens - len(end)] + end
    left = tokens - len(reasoning) - len(end)
    return words[: left // 2] + reasoning + words[: left - left // 2] + end


def end_of_turn(chat: Chat) -> list[int]:
    """Return the id that the template writes behind an answer, of all that may end one."""
    turns = [{"role": "user", "content": WORD}, {"role": "assistant", "content": WORD}]
    written = chat.encode(chat.render(turns, add_generation_prompt=False))
    return [token for token in written if token in chat.stop_ids][-1:]
