"""Prompts that a head is measured on: a file, the validation part of its feature store, or a few neutral questions."""

import logging
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedConfig

from eagle3.answers.chat import Chat, RefusedConversation
from eagle3.answers.store import ANSWERS, AnsweredRow, read_rows
from eagle3.decoding.replay import answer_all
from eagle3.errors import InputError
from eagle3.features.concat import open_recorded
from eagle3.features.sample import Sample
from eagle3.features.source import FeatureSource, as_setting
from eagle3.features.split import prompt_and_turn, split_fraction
from eagle3.features.turns import find_answer_spans
from eagle3.head_files.record import Origin
from eagle3.prompts import Refused, Source, read_prompts, source_at
from eagle3.serving.check.turns import Turn, first_turn, require_room
from eagle3.settings.serving import PromptFile, Turns
from eagle3.target.facts import TargetConfig
from eagle3.target.model import Target

log = logging.getLogger(__name__)

LATER = "later turns: "  # before the reason why a conversation is not measured to its end


@dataclass(frozen=True)
class Conversations:
    """Conversations of a file by their first turns: later prompts may need the target's answers.

    `origin` is the key that they come from. `sources` say of each where it is from, as far as its row tells. `left_out`
    counts the others by reason."""

    origin: str
    turns: Turns
    first: list[Turn]
    sources: list[str]
    left_out: Counter[str]


@dataclass(frozen=True)
class PromptSet:
    """Prompts as token ids, each with the number of its conversation and its source, and how many were left out for
    what reason. `turns` is the rule by which they were chosen.

    `from_validation`: they were also used for validation during training."""

    origin: str
    turns: Turns
    prompts: list[list[int]]
    conversations: list[int]
    sources: list[str]
    left_out: dict[str, int]
    from_validation: bool = False

    @property
    def num_conversations(self) -> int:
        """The number of conversations."""
        return len({*self.conversations})

    def __str__(self) -> str:
        of = f"{len(self.prompts)} prompts of {self.num_conversations} conversations"
        return f"{of} ({self.origin}, prompts.turns={self.turns})"

    @classmethod
    def of(
        cls,
        origin: str,
        turns: Turns,
        prompts: Sequence[Sequence[list[int]]],
        left_out: Counter[str],
        sources: Sequence[str],
    ) -> "PromptSet":
        """Take the prompts of each conversation, and its source."""
        numbers = [number for number, of_one in enumerate(prompts) for _ in of_one]
        flat = [ids for of_one in prompts for ids in of_one]
        return cls(origin, turns, flat, numbers, [sources[number] for number in numbers], dict(left_out))


def longest_prompt(config: PreTrainedConfig | TargetConfig, *, max_new_tokens: int, steps: int) -> int:
    """Return how many tokens of the target's context a prompt may have, next to its answer and the drafts.

    Raises InputError if they leave no room for one."""
    context = config.max_position_embeddings
    room = context - max_new_tokens - steps - 1
    if room < 1:
        raise InputError(
            f"max_new_tokens={max_new_tokens} and {steps} drafts leave no room for a prompt in the target's "
            f"context of {context} tokens; set max_new_tokens={context // 2} or less"
        )
    return room


# --- a file ----------------------------------------------------------------------------------------------------------


def prompt_source(settings: PromptFile) -> Source | None:
    """Turn `prompts.path` into a source; InputError if there is nothing there."""
    if settings.path is None:
        return None
    entry = {name: getattr(settings, name) for name in ("path", "config", "split", "fields")} | {"tools": "keep"}
    return source_at("prompts", entry, keeps_history=True)


def file_conversations(
    chat: Chat, source: Source, *, turns: Turns, limit: int | None, max_length: int
) -> Conversations:
    """Read the first `limit` conversations of any shape whose first prompt is not longer than `max_length`. They are
    never kept: no licence is asked for."""
    left_out: Counter[str] = Counter()

    def readable() -> Iterator[tuple[Turn, str]]:
        for _, found in read_prompts(source):
            if isinstance(found, Refused):
                left_out[found.reason] += 1
                continue
            try:
                yield first_turn(chat, found.record(), turns, max_length), found.source
            except RefusedConversation as refused:
                left_out[str(refused)] += 1

    path = source.path.removeprefix(f"{Path.cwd()}/")  # below the working directory as the user may have typed it
    origin = f"prompts.path={path}"
    read = [*islice(readable(), limit)]
    _require_some(read, origin, left_out)
    sources = [name for _, name in read]
    if (column := source.shape.grouped_by) and {*sources} == {source.name}:
        raise InputError(
            f"prompts.fields={{source: {column}}}: no prompt of {path} has that column; name one of its own"
        )
    return Conversations(origin, turns, [turn for turn, _ in read], sources, left_out)


def with_history(
    target: Target,
    found: Conversations,
    *,
    max_new_tokens: int,
    batch_size: int = 1,
    batch_tokens: float = math.inf,
) -> PromptSet:
    """Return the prompts of all turns. Where the row has no answer for a later prompt, it has the target's greedy one,
    as in a chat with this `max_new_tokens`."""
    batches: dict[str, Any] = {"batch_size": batch_size, "batch_tokens": batch_tokens}
    talks, left_out = [[turn] for turn in found.first], found.left_out.copy()
    continued = talks
    while playing := [talk for talk in continued if not talk[-1].is_last]:
        answers = _own_answers(target, [talk[-1] for talk in playing], max_new_tokens=max_new_tokens, **batches)
        continued = [talk for talk, ids in zip(playing, answers, strict=True) if _continue(talk, ids, left_out)]
    prompts = [[turn.ids for turn in talk] for talk in talks]
    return PromptSet.of(found.origin, found.turns, prompts, left_out, found.sources)


def _own_answers(target: Target, turns: list[Turn], *, max_new_tokens: int, **batches: Any) -> list[list[int]]:
    """Return the target's greedy answers to the turns that need one, and nothing for the others."""
    asked = [turn.ids for turn in turns if turn.needs_answer]
    greedy: Any = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "seed": 0}
    progress = "history" if asked else None
    found = answer_all(target, asked, max_new_tokens=max_new_tokens, beyond=0, progress=progress, **batches, **greedy)
    if cut := sum(not each.stopped for each in found):
        log.warning(
            "%d of %d answers that later prompts need were cut at max_new_tokens=%d, as in a chat with this limit; for "
            "whole ones raise it",
            cut, len(found), max_new_tokens,
        )  # fmt: skip
    answers = iter(found)
    return [next(answers).answer if turn.needs_answer else [] for turn in turns]


def _continue(talk: list[Turn], answer_ids: list[int], left_out: Counter[str]) -> bool:
    """Add the turn after an answer; where there can be none, count why, and return False."""
    try:
        talk.append(talk[-1].following(answer_ids))
    except RefusedConversation as refused:
        left_out[f"{LATER}{refused}"] += 1
        return False
    return True


# --- others ----------------------------------------------------------------------------------------------------------


def question_prompts(chat: Chat, questions: list[str], *, turns: Turns, max_length: int) -> PromptSet:
    left_out: Counter[str] = Counter()
    asked = ([{"role": "user", "content": question}] for question in questions)
    found = [*filter(None, (_fitting(map(chat.prompt_ids, [each]), max_length, left_out) for each in asked))]
    _require_some(found, "check.questions", left_out)
    return PromptSet.of("check.questions", turns, found, left_out, ["questions"] * len(found))


def validation_prompts(trained_on: Origin, *, turns: Turns, limit: int | None, max_length: int) -> PromptSet:
    """Read prompts that training held out, from the store or the answers that it recorded; InputError if they are there
    no more.

    Validation is the lowest shares of the split, so they are taken from the bottom up. Later prompts have the answers
    before them that training had."""
    if answers := _answers_without_features(trained_on):
        talks, location = _held_out_answers(answers, trained_on.val_fraction), ",".join(map(str, answers))
    else:
        features = _recorded_store(trained_on)
        talks, location = _held_out(features, trained_on.val_fraction), as_setting(features.location)
    left_out: Counter[str] = Counter()
    first = 1 if turns == "first" else None
    prompts = (_fitting(islice(talk, first), max_length, left_out) for talk in talks)
    found = [*islice(filter(None, prompts), limit)]
    origin = f"validation prompts of {location}"
    _require_some(found, origin, left_out)
    sources = ["validation"] * len(found)
    return replace(PromptSet.of(origin, turns, found, left_out, sources), from_validation=True)


def held_out_samples(trained_on: Origin) -> Iterator[Sample]:
    """Read the first sample of each prompt that training held out; InputError if its store is there no more."""
    if answers := _answers_without_features(trained_on):
        raise InputError(f"{answers[0]} has no features: they were made while training")
    features = _recorded_store(trained_on)
    shares, firsts = np.unique(features.samples.split, return_index=True)
    return (features.read(features.samples[int(first)]) for first in firsts[shares < trained_on.val_fraction])


def _answers_without_features(trained_on: Origin) -> list[Path]:
    """Return the folders of answers of a training with data=live; none if it had stores."""
    paths = [trained_on.path] if isinstance(trained_on.path, str) else trained_on.path
    return [Path(path) for path in paths if Path(path, ANSWERS).is_file()]


def _recorded_store(trained_on: Origin) -> FeatureSource:
    features = open_recorded(trained_on.path, trained_on.hash, trained_on.shards)
    if features.fingerprint != trained_on.hash:
        raise InputError(f"{as_setting(features.location)} is no longer the store of the training")
    return features


def _held_out(features: FeatureSource, val_fraction: float) -> Iterator[Iterator[list[int]]]:
    """Yield the prompts of each held-out conversation; where several stores have it, those of one."""
    split = features.samples.split
    order = np.argsort(split, kind="stable")
    for _, places in groupby(order[split[order] < val_fraction].tolist(), key=lambda place: split[place]):
        refs = [features.samples[place] for place in places]
        own = [ref for ref in refs if ref.store == refs[0].store]
        by_turn = sorted(own, key=lambda ref: prompt_and_turn(ref.entry.id)[1])
        samples = map(features.read, by_turn)
        yield (each.input_ids[:begin].tolist() for each in samples for begin, _ in find_answer_spans(each.turns))


def _held_out_answers(folders: list[Path], val_fraction: float) -> Iterator[Iterator[list[int]]]:
    """Yield the prompts of each held-out conversation; where several folders have it, those of one."""
    held_out: dict[float, tuple[Path, list[AnsweredRow]]] = {}
    for folder in folders:
        for row in read_rows(folder):
            if (share := split_fraction(row.id)) < val_fraction:
                of, rows = held_out.setdefault(share, (folder, []))
                if of == folder:
                    rows.append(row)
    for _, (_, rows) in sorted(held_out.items()):
        by_turn = sorted(rows, key=lambda row: prompt_and_turn(row.id)[1])
        yield (row.input_ids[:begin] for row in by_turn for begin, _ in row.turns)


def _fitting(prompts: Iterable[list[int]], max_length: int, left_out: Counter[str]) -> list[list[int]]:
    """Return the prompts of a conversation up to the first that has no room, which is counted."""
    found: list[list[int]] = []
    try:
        for ids in prompts:
            found.append(require_room(ids, max_length))
    except RefusedConversation as refused:
        left_out[f"{LATER if found else ''}{refused}"] += 1
    return found


def _require_some(found: Sequence[object], origin: str, left_out: Counter[str]) -> None:
    if not found:
        reasons = ", ".join(f"{reason}: {number}" for reason, number in left_out.items()) or "it is empty"
        raise InputError(f"{origin} gives no prompt to measure on ({reasons}); name other prompts")
