"""Answered conversations as tensors: what is extracted from.

Shapes: T tokens of a conversation.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Int
from torch import Tensor

from eagle3.answers.rows import AnsweredRow
from eagle3.answers.store import MAKE_ANSWERS, read_rows
from eagle3.errors import InputError
from eagle3.features.turns import anchors_of


@dataclass(frozen=True)
class Conversation:
    """A row of answers.jsonl as tensors. `source` is its prompt's; `whole`: no answer was cut at a limit."""

    id: str
    input_ids: Int[Tensor, " T"]
    turns: Int[Tensor, " T"]
    source: str = ""
    whole: bool = True


def read_conversations(
    answers: Path, *, max_length: int, too_long: str, left_out: Counter[str]
) -> Iterator[Conversation]:
    """Yield rows with something to train; the others are counted in `left_out` by reason."""
    if not (answers / "answers.jsonl").is_file():
        raise InputError(f"{answers}/answers.jsonl does not exist; make it with: {MAKE_ANSWERS}")
    for row in read_rows(answers):
        conversation = conversation_of(row, max_length=max_length, too_long=too_long, left_out=left_out)
        if conversation is not None:
            yield conversation


def conversation_of(row: AnsweredRow, *, max_length: int, too_long: str, left_out: Counter[str]) -> Conversation | None:
    """Return what is extracted of a row; None, counted in `left_out`, if nothing can be trained on it."""
    input_ids = torch.tensor(row.input_ids)
    turns = torch.zeros_like(input_ids)
    for number, (start, end) in enumerate(row.turns, start=1):
        turns[start:end] = number
    too_many = len(input_ids) > max_length
    if too_many:
        left_out[f"longer than features.max_length={max_length}: {too_long}"] += 1
        if too_long == "drop":
            return None
        input_ids, turns = input_ids[:max_length], turns[:max_length]
    if len(anchors_of(turns)) == 0:
        left_out["no answer of two tokens or more"] += 1
        return None
    return Conversation(
        row.id, input_ids, turns, source=row.source, whole=not too_many and "length" not in row.finish_reasons
    )
