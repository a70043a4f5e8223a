"""Loss masks: select the answer tokens to train on. A mask returns a sample's `turns` with all other tokens set to 0.

Shapes: T tokens of a sample.
"""

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from eagle3.errors import InputError
from eagle3.features.manifest import MadeFrom
from eagle3.features.sample import Sample
from eagle3.features.samples import Samples
from eagle3.features.split import prompt_and_turn
from eagle3.features.turns import find_answer_spans


class AllTurns:
    """Every answer token."""

    def check(self, made_from: MadeFrom) -> None:
        pass

    def select(self, samples: Samples) -> Samples:
        """Return the samples that are trained on at all."""
        return samples

    def __call__(self, sample: Sample) -> Int[Tensor, " T"]:
        return sample.turns


class LastTurn(AllTurns):
    """The last answer of each conversation, which is several samples if its template rewrites earlier answers."""

    def select(self, samples: Samples) -> Samples:
        last: dict[tuple[str, str], tuple[int, int]] = {}  # (store, prompt) -> (turn, position in samples)
        for position, (store, sample_id) in enumerate(samples.names()):
            prompt, turn = prompt_and_turn(sample_id)
            if last.get((store, prompt), (-1, 0))[0] < turn:
                last[store, prompt] = turn, position
        return samples.take(np.array([position for _, position in last.values()], np.int64))

    def __call__(self, sample: Sample) -> Int[Tensor, " T"]:
        return torch.where(sample.turns == sample.turns.max(), sample.turns, 0)


class WithoutReasoning(AllTurns):
    """Answers without their reasoning and its markers."""

    start: list[int]
    end: list[int]

    def check(self, made_from: MadeFrom) -> None:
        self.start, self.end = made_from.reasoning_ids or ([], [])
        if not self.start or not self.end:
            raise InputError(
                "loss_mask=without_reasoning needs the token ids of the reasoning markers, and the store has none; "
                "write a store that has them: precompute.py 'stages=[features]' 'features.reasoning=[START,END]'"
            )

    def __call__(self, sample: Sample) -> Int[Tensor, " T"]:
        tokens, turns = sample.input_ids.tolist(), sample.turns.clone()
        for first, end in find_answer_spans(turns):
            # Opened at the end of the generation prompt; a start marker before that is one that a user typed.
            position = find(tokens, self.start, max(0, first - len(self.start) - 1), first)
            if position is None:
                position = find(tokens, self.start, first, end)
            while position is not None:
                # A span that generation cut off reaches to the end of its answer.
                close = find(tokens, self.end, position + len(self.start), end)
                stop = end if close is None else close + len(self.end)
                turns[position:stop] = 0
                position = find(tokens, self.start, stop, end)
        return turns


class Everything(AllTurns):
    """Every token, prompt tokens too. An ablation: a server never drafts at prompt tokens."""

    def check(self, made_from: MadeFrom) -> None:
        if made_from.teachers != "all":
            raise InputError(
                f"loss_mask=everything needs the teacher at every row, and the store was made with "
                f"features.teachers={made_from.teachers}; make one with features.teachers=all"
            )

    def __call__(self, sample: Sample) -> Int[Tensor, " T"]:
        return torch.ones_like(sample.turns)


def find(tokens: list[int], pattern: list[int], start: int, stop: int) -> int | None:
    """Return the first position of the whole `pattern` between `start` and `stop`."""
    for position in range(start, stop - len(pattern) + 1):
        if tokens[position : position + len(pattern)] == pattern:
            return position
    return None
