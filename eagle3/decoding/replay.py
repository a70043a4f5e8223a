"""What drafts gain at every position of answers that are already known, from which any setting is replayed.

Drafts do not change what the target says, and what a round gains depends on where it begins, not on the rounds before
it. So one look at each position of the target's own answer decides all rounds that may begin there; and as the shape
of a tree depends on `topk` alone, fewer steps or fewer draft tokens just keep a part of it.

In float32 and float64 that gives what decoding does to the last digit. In bfloat16 answers and features come from
forwards of another shape than in decoding, and near-ties flip: docs/serving-results.md has numbers.

Shapes: P positions of an answer where a round may begin, K steps.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Self

from jaxtyping import Int
from torch import Tensor
from tqdm import tqdm

from eagle3.answers.generate import generate
from eagle3.decoding.grower import Grower
from eagle3.decoding.speculate import Speculator
from eagle3.target.capture import Capture
from eagle3.target.model import Target


@dataclass(frozen=True)
class Rounds:
    """Rounds of decoding some answers: their number, how many accepted at least 1, 2, … drafts, and the `tokens` of the
    answers that they gave: all but the first, which is prefill's."""

    verifications: int
    accepted: list[int]
    tokens: int

    @property
    def accept_length(self) -> float:
        return 1 + sum(self.accepted) / self.verifications

    @classmethod
    def of_all(cls, parts: Sequence["Rounds"]) -> Self:
        accepted = [sum(depth) for depth in zip(*(part.accepted for part in parts), strict=True)]
        return cls(sum(part.verifications for part in parts), accepted, sum(part.tokens for part in parts))


@dataclass(frozen=True)
class Recording:
    """Where the target's own tokens stand in the trees of each `topk`, one tensor for each answer.

    `places[topk][answer][p, s - 1, d - 1]`: that many of the candidates that s steps draft behind position p come
    before the one that is the d-th token of the answer there; all of them if it is no candidate."""

    places: dict[int, list[Int[Tensor, "_ K K"]]]

    def replay(self, *, steps: int, topk: int, draft_tokens: int) -> Rounds:
        """The rounds of decoding these answers so. `draft_tokens` counts the root, as SGLang's flag does."""
        return Rounds.of_all(self.replay_each(steps=steps, topk=topk, draft_tokens=draft_tokens))

    def replay_each(self, *, steps: int, topk: int, draft_tokens: int) -> list[Rounds]:
        """The same of every answer alone."""
        found = []
        for places in self.places[topk]:
            gained = (places[:, steps - 1, :steps] < draft_tokens - 1).sum(dim=1).tolist()
            position, verifications, accepted = 0, 0, [0] * steps
            while position < len(gained):
                verifications += 1
                for depth in range(gained[position]):
                    accepted[depth] += 1
                position += gained[position] + 1
            found.append(Rounds(verifications, accepted, len(gained)))
        return found


def record(
    speculator: Speculator,
    prompts: Sequence[list[int]],
    *,
    steps: int,
    topks: Iterable[int],
    max_new_tokens: int,
    temperature: float,
    seed: int,
    batch_size: int,
    progress: str | None,
) -> Recording:
    """Let the target answer every prompt, `batch_size` at once, seeded by its place, and grow the trees of `topks`
    behind every token of the answers. `progress` names the bar (None: no bar)."""
    capture = Capture(speculator.target, speculator.capture_layers)
    recording = Recording({topk: [] for topk in topks})
    with tqdm(total=len(prompts), desc=progress, unit="prompt", disable=progress is None) as bar:
        for start in range(0, len(prompts), batch_size):
            batch = [*prompts[start : start + batch_size]]
            said = _said(speculator.target, batch, seed + start, max_new_tokens, temperature, steps)
            for prompt, (text, beyond) in zip(batch, said, strict=True):
                grower = Grower(speculator, capture, text + beyond)
                for topk, places in recording.places.items():
                    places.append(grower.places(range(len(prompt), len(text) - 1), topk, steps))
                bar.update()
    return recording


def _said(
    target: Target, prompts: list[list[int]], seed: int, max_new_tokens: int, temperature: float, beyond: int
) -> Iterator[tuple[list[int], list[int]]]:
    """Each prompt with its answer, and what the target would say behind the end: the last round may draft that."""
    seeds = [*range(seed, seed + len(prompts))]
    say = partial(generate, target.model, seeds=seeds, temperature=temperature, top_p=1.0, top_k=0, pad_id=0)
    answers = say(prompts, max_new_tokens=max_new_tokens, stop_ids=target.stop_ids)
    texts = [prompt + answer.token_ids for prompt, answer in zip(prompts, answers, strict=True)]
    more = say(texts, max_new_tokens=beyond, stop_ids=frozenset())
    return zip(texts, (answer.token_ids for answer in more), strict=True)
