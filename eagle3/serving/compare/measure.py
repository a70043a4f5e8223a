"""Gains of every head on every prompt, in every way of decoding.

Shapes: N prompts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from eagle3.decoding.paired import Gains
from eagle3.decoding.replay import Answered, Rounds, answer_all, record
from eagle3.decoding.speculate import Speculator, nothing_verified
from eagle3.draft_shape import Shape
from eagle3.progress import Bar
from eagle3.settings.serving import CompareRun, CompareSettings, TokenSampling
from eagle3.target.model import Target

ALL = "all"  # positions, and sources


class Way(NamedTuple):
    """One way to decode: how the target chooses its tokens, and the shape of the drafts."""

    sampling: TokenSampling
    shape: Shape


class Measured(NamedTuple):
    """The gains of a head as SGLang counts them, and `kept`, without drafts accepted after a stop token."""

    gains: Gains
    kept: Gains


Gained = dict[Way, dict[str, Measured]]  # of a head, by position in the text


def answers_at(target: Target, prompts: Sequence[list[int]], run: CompareRun) -> dict[TokenSampling, list[Answered]]:
    """Let the target answer the prompts with each sampling, in batches; a prompt is seeded by its place.

    Raises InputError where with some sampling no answer is longer than the token that prefill gives."""
    found = {
        sampling: answer_all(
            target,
            prompts,
            max_new_tokens=run.max_new_tokens,
            seed=run.seed,
            beyond=run.compare.most_steps,
            batch_size=run.compare.batch_size,
            batch_tokens=run.compare.batch_tokens,
            progress=f"answers, {sampling}",
            **asdict(sampling),
        )
        for sampling in dict.fromkeys(run.compare.samplings)
    }
    if any(all(len(each.answer) < 2 for each in answered) for answered in found.values()):
        raise nothing_verified(len(prompts))
    return found


def measure_head(
    speculator: Speculator,
    answers: Mapping[TokenSampling, Sequence[Answered]],
    conversations: Sequence[int],
    settings: CompareSettings,
    name: str,
) -> Gained:
    """Replay the head in every shape on the answers (eagle3/decoding/replay.py): by position, as `of_rounds` does.
    `conversations` has the number of each prompt's."""
    measured = {}
    shapes, window = settings.drafts(), settings.draft_window
    topks = sorted({shape.topk for shape in shapes})
    for sampling, answered in answers.items():
        bar = Bar(answered, desc=name, unit="prompt")
        recording = record(speculator, bar, steps=settings.most_steps, topks=topks, draft_window=window)
        for shape in shapes:
            rounds = recording.replay_each(**shape._asdict())
            measured[Way(sampling, shape)] = of_rounds(
                rounds, answered, np.array(conversations), settings.positions or []
            )
    return measured


def of_rounds(
    rounds: Sequence[Rounds],
    answered: Sequence[Answered],
    conversations: Int[np.ndarray, " N"],
    positions: Sequence[int],
) -> dict[str, Measured]:
    """Count the drafts of ALL rounds, and of those that begin between `positions` (see conf/serve/compare.yaml).

    Tokens after a stop token come from the last round alone: it made them, the answer lacks them."""
    gained = [np.array(each.gained, np.int64) for each in rounds]
    made = [gains + 1 for gains in gained]
    kept = [gains.copy() for gains in gained]
    for gains, tokens, each, one in zip(kept, made, rounds, answered, strict=True):
        if one.stopped and len(gains):
            gains[-1] -= tokens.sum() - each.tokens
    # Tokens of the text when a round begins: the prompt, prefill's token, and what the rounds before it made.
    lengths = [len(one.prompt) + 1 + tokens.cumsum() - tokens for one, tokens in zip(answered, made, strict=True)]

    def counted(low: float, high: float) -> Measured:
        inside = [(low <= each) & (each < high) for each in lengths]
        number = _array([int(each.sum()) for each in inside])
        accepted, in_answer = (
            _array([int(each[chosen].sum()) for each, chosen in zip(gains, inside, strict=True)])
            for gains in (gained, kept)
        )
        return Measured(Gains(accepted, number, conversations), Gains(in_answer, number, conversations))

    edges = [0, *positions, np.inf] if positions else []
    spans = {span_name(low, high): counted(low, high) for low, high in pairwise(edges)}
    return {ALL: counted(0, np.inf), **spans}


def span_name(low: float, high: float) -> str:
    if not low:
        return f"below {high:,}"
    return f"{low:,} and more" if high == np.inf else f"{low:,} to {high - 1:,}"


def _array(values: list[int]) -> Float[np.ndarray, " N"]:
    return np.array(values, dtype=np.float64)
