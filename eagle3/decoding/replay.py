"""Records the drafts at every position of known answers, from which any draft setting can be replayed.

Drafts do not change the target's answer, and the drafts that a round accepts depend on where it begins, not on earlier
rounds. So one tree per position of the target's answer determines every round that may begin there. The shape of a tree
depends only on `topk`: fewer steps or fewer draft tokens keep a part of it.

In float32 and float64 the result equals decoding to the last digit. In bfloat16, answers and features come from
forwards of another shape than in decoding, and near-ties flip: docs/results/serving.md has numbers.

Shapes: P positions of an answer where a round may begin, K steps.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Unpack

from jaxtyping import Int
from torch import Tensor

from eagle3.answers.generate import generate
from eagle3.decoding.batched_trees import BatchedTrees, SteppedTrees
from eagle3.decoding.speculate import Speculator
from eagle3.decoding.verifier import Sampling
from eagle3.head.eagle3 import Eagle3
from eagle3.head.registry import kind_named
from eagle3.head.simulate_decoding import rounds_of_turn
from eagle3.progress import Bar
from eagle3.target.batches import batches_by_tokens
from eagle3.target.capture import Capture
from eagle3.target.model import Target


@dataclass(frozen=True)
class Rounds:
    """Rounds of decoding an answer: how many drafts each accepted, in order, and the `tokens` of the answer except the
    first, which comes from prefill. Rounds of 2, 0 and 1 drafts make 3 + 1 + 2 tokens, the last may be past the end."""

    gained: list[int]
    tokens: int

    @property
    def verifications(self) -> int:
        return len(self.gained)


@dataclass(frozen=True)
class Recording:
    """Ranks of the target's own tokens in the trees of each `topk`, one tensor per answer.

    `places[topk][answer][p, s - 1, d - 1]` is the rank of the answer's d-th token after position p among the candidates
    that s steps draft there, or the number of candidates if the token is not one of them. In a tree of two steps and
    topk=2, which has 2 + 4 candidates, the ranks may be

        [0, 4]    both tokens are candidates: draft_tokens=6, the root and the 5 best, accepts 2, draft_tokens=4 one
        [1, 6]    only the first is a candidate: draft_tokens=3 or more accepts it, draft_tokens=2 nothing

    A child never ranks above its parent, so the tokens that are among the best form the beginning of the answer."""

    places: dict[int, list[Int[Tensor, "_ K K"]]]

    def replay_each(self, *, steps: int, topk: int, draft_tokens: int) -> list[Rounds]:
        """Return the rounds of decoding each answer. `draft_tokens` counts the root, as SGLang's flag does."""
        found = []
        for places in self.places[topk]:
            is_accepted = places[:, steps - 1, :steps] < draft_tokens - 1  # (P, steps)
            accepted = is_accepted.sum(dim=1).tolist()
            found.append(Rounds(rounds_of_turn(accepted), len(accepted)))
        return found


@dataclass(frozen=True)
class Answered:
    """A prompt with the target's answer, and the tokens `beyond` its end, which the last round may draft.

    `stopped`: the answer ends with a stop token."""

    prompt: list[int]
    answer: list[int]
    beyond: list[int]
    stopped: bool


def record(
    speculator: Speculator,
    answers: Iterable[Answered],
    *,
    steps: int,
    topks: Iterable[int],
    draft_window: int | None = None,
) -> Recording:
    """Draft the trees of `topks` at every token of answers that continue `steps` tokens or more beyond their ends."""
    own_decode = type(kind_named(speculator.head.kind)).cached is not Eagle3.cached
    make_trees = SteppedTrees if own_decode else BatchedTrees
    capture = Capture(speculator.target, speculator.capture_layers)
    recording = Recording({topk: [] for topk in topks})
    for each in answers:
        text = each.prompt + each.answer
        trees = make_trees(speculator, capture, text + each.beyond[:steps], window=draft_window)
        for topk, places in recording.places.items():
            places.append(trees.places(range(len(each.prompt), len(text) - 1), topk, steps))
    return recording


def answer_all(
    target: Target,
    prompts: Sequence[list[int]],
    *,
    max_new_tokens: int,
    beyond: int,
    seed: int,
    batch_size: int,
    batch_tokens: float = math.inf,
    progress: str | None,
    **sampling: Unpack[Sampling],
) -> list[Answered]:
    """Let the target answer every prompt, seeded by its place, and continue for `beyond` tokens; prompts of similar
    lengths form a batch, which has room for their answers in `batch_tokens`."""

    def length(place: int) -> int:
        return len(prompts[place]) + max_new_tokens

    answered: dict[int, Answered] = {}
    by_length = sorted(range(len(prompts)), key=length)
    with Bar(total=len(prompts), desc=progress, unit="prompt", disable=progress is None) as bar:
        for batch in batches_by_tokens(by_length, length, most_tokens=batch_tokens, most_rows=batch_size):
            texts, seeds = [prompts[place] for place in batch], [seed + place for place in batch]
            found = answer(target, texts, seeds=seeds, max_new_tokens=max_new_tokens, beyond=beyond, **sampling)
            answered.update(zip(batch, found, strict=True))
            bar.update(len(batch))
    return [answered[place] for place in range(len(prompts))]


def answer(
    target: Target,
    prompts: list[list[int]],
    *,
    seeds: list[int],
    max_new_tokens: int,
    beyond: int,
    **sampling: Unpack[Sampling],
) -> list[Answered]:
    """Let the target answer a batch of prompts, and continue for `beyond` tokens."""
    say = partial(generate, target.model, seeds=seeds, pad_id=0, **sampling)
    answers = say(prompts, max_new_tokens=max_new_tokens, stop_ids=target.stop_ids)
    texts = [prompt + answer.token_ids for prompt, answer in zip(prompts, answers, strict=True)]
    drawn = [len(answer.token_ids) for answer in answers]
    more = say(texts, max_new_tokens=beyond, stop_ids=frozenset(), drawn=drawn) if beyond else []
    rest = [each.token_ids for each in more] or [[] for _ in texts]
    return [
        Answered(prompt, answer.token_ids, behind, stopped=answer.finish_reason == "stop")
        for prompt, answer, behind in zip(prompts, answers, rest, strict=True)
    ]
