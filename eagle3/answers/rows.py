"""A line of answers.jsonl and one of errors.jsonl."""

import re
from dataclasses import dataclass, field, replace
from typing import Any

from eagle3.storage.records import Record


@dataclass(frozen=True, kw_only=True)
class AnsweredRow(Record):
    """Token ids of a conversation, with the answers between `turns` [begin, end).

    A prompt has several rows where a later prompt does not begin with the tokens of the turns before it.
    """

    id: str
    prompt_id: str
    source: str
    license: str | None
    input_ids: list[int] = field(default_factory=list)
    turns: list[tuple[int, int]] = field(default_factory=list)
    finish_reasons: list[str] = field(default_factory=list)
    seeds: list[int | None] = field(default_factory=list)
    messages: list[dict[str, Any]] = field(default_factory=list)
    last_of_prompt: bool = False  # without it, a killed run has left the prompt's rows incomplete

    def with_turn(
        self,
        prompt_ids: list[int],
        answer_ids: list[int],
        finish_reason: str,
        seed: int | None,
        messages: list[dict[str, Any]],
    ) -> "AnsweredRow":
        input_ids = prompt_ids + answer_ids
        return replace(
            self,
            input_ids=input_ids,
            turns=[*self.turns, (len(prompt_ids), len(input_ids))],
            finish_reasons=[*self.finish_reasons, finish_reason],
            seeds=[*self.seeds, seed],
            messages=list(messages),
        )


@dataclass(frozen=True, kw_only=True)
class AnswerError(Record):
    """A turn without an answer. `retry`: a later run tries the prompt again, unless rows of it are on disk.

    `prompt_tokens`: of a prompt that was too long, which is tried again once sampling.max_prompt_tokens allows it."""

    prompt_id: str
    source: str
    turn: int
    reason: str
    retry: bool
    prompt_tokens: int | None = None

    @property
    def kind(self) -> str:
        """The reason without what is in brackets, which differs by row."""
        return re.sub(r" \((?:[^()]|\([^()]*\))*\)", "", self.reason)


def new_row(prompt: dict[str, Any], turn: int) -> AnsweredRow:
    return AnsweredRow(
        id=f"{prompt['id']}#{turn}", prompt_id=prompt["id"], source=prompt["source"], license=prompt["license"]
    )


def error_row(
    prompt: dict[str, Any], turn: int, reason: str, *, retry: bool, prompt_tokens: int | None = None
) -> AnswerError:
    return AnswerError(
        prompt_id=prompt["id"],
        source=prompt["source"],
        turn=turn,
        reason=reason,
        retry=retry,
        prompt_tokens=prompt_tokens,
    )


def too_long(prompt_ids: list[int], limit: int | None) -> str | None:
    if limit is None or len(prompt_ids) <= limit:
        return None
    return (
        f"the prompt is longer than sampling.max_prompt_tokens, or leaves no room for sampling.max_new_tokens in the "
        f"target's context ({len(prompt_ids)} tokens, at most {limit})"
    )
