"""Answered conversations as tensors, and the work units of the features stage: the conversations of one shard each.

Units depend only on the answers and on the shards that exist already, so any number of workers makes the same store.

Shapes: T tokens of a conversation.
"""

import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Int
from torch import Tensor

from eagle3.answers.store import read_rows
from eagle3.features.sample import positions_with_teacher
from eagle3.features.turns import find_anchors

REST = 1024  # bytes of a sample's headers and ids


@dataclass(frozen=True)
class Conversation:
    """A row of answers.jsonl as tensors. `source` is its prompt's; `whole`: no answer was cut at a limit."""

    id: str
    input_ids: Int[Tensor, " T"]
    turns: Int[Tensor, " T"]
    source: str = ""
    whole: bool = True

    @property
    def sha256(self) -> str:
        """The hash of what a sample takes from its answer, by which a store notices that the answer is another now."""
        digest = hashlib.sha256(json.dumps([self.id, self.source, self.whole]).encode())
        for each in (self.input_ids, self.turns):
            digest.update(each.int().numpy().tobytes())
        return digest.hexdigest()


def read_conversations(
    answers: Path, *, max_length: int, too_long: str, left_out: Counter[str]
) -> Iterator[Conversation]:
    """Yield what is extracted of each row; rows with nothing to train are counted in `left_out` by reason."""
    for row in read_rows(answers):
        input_ids = torch.tensor(row.input_ids)
        turns = torch.zeros_like(input_ids)
        for number, (start, end) in enumerate(row.turns, start=1):
            turns[start:end] = number
        too_many = len(input_ids) > max_length
        if too_many:
            left_out[f"longer than features.max_length={max_length}: {too_long}"] += 1
            if too_long == "drop":
                continue
            input_ids, turns = input_ids[:max_length], turns[:max_length]
        if len(find_anchors(turns)) == 0:
            left_out["no answer of two tokens or more"] += 1
            continue
        whole = not too_many and "length" not in row.finish_reasons
        yield Conversation(row.id, input_ids, turns, source=row.source, whole=whole)


@dataclass(frozen=True)
class WorkUnit:
    """The conversations of one shard; `made_from` is the hash of the settings that decide its content."""

    made_from: str
    conversations: list[Conversation]


@dataclass(frozen=True, kw_only=True)
class SampleSizer:
    """Estimates the bytes of a conversation's sample in a shard: its hidden states, and REST for all else."""

    layers: int
    hidden_size: int
    dtype: torch.dtype
    teachers: str

    def __call__(self, item: Conversation) -> int:
        rows = len(item.input_ids) * self.layers + int(positions_with_teacher(item.turns, self.teachers).sum())
        return rows * self.hidden_size * self.dtype.itemsize + REST

    def tokens_in(self, num_bytes: float) -> float:
        """Return about how many tokens fit into so many bytes if all have a teacher."""
        return num_bytes / ((self.layers + 1) * self.hidden_size * self.dtype.itemsize)


def work_units(
    conversations: Iterator[Conversation],
    *,
    taken: Collection[int],
    made_from: str,
    sizer: SampleSizer,
    shard_bytes: float,
) -> Iterator[tuple[int, WorkUnit]]:
    """Yield a work unit for each full shard, with the free shard numbers from 0 up."""
    numbers = (number for number in itertools.count() if number not in taken)
    for held in filled(conversations, sizer, shard_bytes):
        yield next(numbers), WorkUnit(made_from, held)


def filled(
    conversations: Iterator[Conversation], sizer: Callable[[Conversation], int], least: float
) -> Iterator[list[Conversation]]:
    """Yield consecutive conversations as soon as their sizes add up to `least`; the last ones may be smaller."""
    held: list[Conversation] = []
    size = 0
    for conversation in conversations:
        held.append(conversation)
        size += sizer(conversation)
        if size >= least:
            yield held
            held, size = [], 0
    if held:
        yield held
