"""Prompts that a head is measured on: a file, the validation part of its feature store, or a few neutral questions."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from eagle3.answers.chat import Chat, RefusedConversation
from eagle3.answers.store import ANSWERS, read_rows
from eagle3.errors import InputError
from eagle3.features.concat import open_recorded
from eagle3.features.source import as_setting
from eagle3.features.split import split_fraction
from eagle3.head_files.record import Origin
from eagle3.prompts import Prompt, Refused, Source, plain_source, read_prompts
from eagle3.settings.serving import PromptFile


@dataclass(frozen=True)
class PromptSet:
    """Prompts as token ids, the key or folder that they come from, and how many were left out for what reason.

    `from_validation`: they were also used for validation during training. `sources` says of
    each where it is from, as far as the row of a file tells."""

    origin: str
    prompts: list[list[int]]
    left_out: dict[str, int]
    sources: list[str]
    from_validation: bool = False


def longest_prompt(context: int, *, max_new_tokens: int, steps: int) -> int:
    """Return how many tokens of the target's `context` a prompt may have, next to its answer and the drafts.

    Raises InputError if they leave no room for one."""
    room = context - max_new_tokens - steps - 1
    if room < 1:
        raise InputError(
            f"max_new_tokens={max_new_tokens} and {steps} drafts leave no room for a prompt in the target's "
            f"context of {context} tokens; set max_new_tokens={context // 2} or less"
        )
    return room


def prompt_source(settings: PromptFile) -> Source | None:
    """Turn `prompts.path` into a source; InputError if there is nothing there."""
    if settings.path is None:
        return None
    return plain_source("prompts", vars(settings) | {"tools": "keep"}, split="train")


def file_prompts(chat: Chat, source: Source, *, limit: int | None, max_length: int) -> PromptSet:
    """Read conversations of any shape up to their first user turn. They are never kept: no licence is asked for."""
    left_out: Counter[str] = Counter()
    conversations = _first_turns((found for _, found in read_prompts(source)), left_out)
    prompts = _encoded(chat, conversations, left_out)
    path = source.path.removeprefix(f"{Path.cwd()}/")  # below the working directory as the user may have typed it
    return _prompt_set(f"prompts.path={path}", prompts, left_out, max_length, limit)


def question_prompts(chat: Chat, questions: list[str], *, max_length: int) -> PromptSet:
    left_out: Counter[str] = Counter()
    conversations = (("questions", {"messages": [{"role": "user", "content": question}]}) for question in questions)
    return _prompt_set("check.questions", _encoded(chat, conversations, left_out), left_out, max_length)


def validation_prompts(trained_on: Origin, *, limit: int | None, max_length: int) -> PromptSet:
    """Read prompts that training held out, from the store or the answers that it recorded; InputError if they are there
    no more.

    Validation is the lowest shares of the split, so they are taken from the bottom up."""
    path = trained_on.path
    if isinstance(path, str) and Path(path, ANSWERS).is_file():
        of_answers = _held_out_answers(Path(path), trained_on.val_fraction)
        found = _prompt_set(f"validation prompts of {path}", of_answers, Counter(), max_length, limit)
        return replace(found, from_validation=True)
    features = open_recorded(trained_on.path, trained_on.hash, trained_on.shards)
    if features.fingerprint != trained_on.hash:
        raise InputError(f"{as_setting(features.location)} is no longer the store of the training")
    shares, firsts = np.unique(features.samples.split, return_index=True)  # the first sample of each prompt
    held_out = (features.samples[int(first)] for first in firsts[shares < trained_on.val_fraction])
    samples = (features.read(ref) for ref in held_out)
    prompts = (("validation", each.input_ids[: int((each.turns > 0).int().argmax())].tolist()) for each in samples)
    origin = f"validation prompts of {as_setting(features.location)}"
    return replace(_prompt_set(origin, prompts, Counter(), max_length, limit), from_validation=True)


def _held_out_answers(folder: Path, val_fraction: float) -> Iterator[tuple[str, list[int]]]:
    first: dict[float, list[int]] = {}  # of each prompt, by its share of the split
    for row in read_rows(folder):
        if (share := split_fraction(row.id)) < val_fraction:
            first.setdefault(share, row.input_ids[: row.turns[0][0]])
    return (("validation", first[share]) for share in sorted(first))


def _first_turns(found: Iterable[Prompt | Refused], left_out: Counter[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    for prompt in found:
        if isinstance(prompt, Refused):
            left_out[prompt.reason] += 1
            continue
        roles = [message["role"] for message in prompt.messages]
        yield prompt.source, prompt.record() | {"messages": prompt.messages[: roles.index("user") + 1]}


def _encoded(
    chat: Chat, conversations: Iterable[tuple[str, dict[str, Any]]], left_out: Counter[str]
) -> Iterator[tuple[str, list[int]]]:
    for source, prompt in conversations:
        try:
            yield source, chat.for_prompt(prompt).prompt_ids(prompt["messages"])
        except RefusedConversation as refused:
            left_out[str(refused)] += 1


def _prompt_set(
    origin: str,
    prompts: Iterable[tuple[str, list[int]]],
    left_out: Counter[str],
    max_length: int,
    limit: int | None = None,
) -> PromptSet:
    """Take the first `limit` prompts that are not too long."""
    found: list[tuple[str, list[int]]] = []
    for source, ids in prompts:
        if 0 < len(ids) <= max_length:
            found.append((source, ids))
        else:
            left_out[f"empty, or longer than the target's context less the answer: {max_length} tokens"] += 1
        if len(found) == limit:
            break
    if not found:
        reasons = ", ".join(f"{reason}: {number}" for reason, number in left_out.items()) or "it is empty"
        raise InputError(f"{origin} gives no prompt to measure on ({reasons}); name other prompts")
    return PromptSet(origin, [ids for _, ids in found], left_out, [source for source, _ in found])
