"""Loss masks: which answer tokens are trained. Each takes a sample and returns its `turns` with the others set to 0.

Shapes: T tokens of a sample.
"""

import torch
from jaxtyping import Int
from torch import Tensor

from eagle3.errors import InputError
from eagle3.features.sample import Sample


class AllTurns:
    """Every answer token."""

    def check(self, made_from: dict) -> None:
        pass

    def __call__(self, sample: Sample) -> Int[Tensor, " T"]:
        return sample.turns


class LastTurn(AllTurns):
    """The last answer of a sample only."""

    def __call__(self, sample: Sample) -> Int[Tensor, " T"]:
        return torch.where(sample.turns == sample.turns.max(), sample.turns, 0)


class WithoutReasoning(AllTurns):
    """Answers without what lies between the reasoning markers, markers included."""

    start: list[int]
    end: list[int]

    def check(self, made_from: dict) -> None:
        self.start, self.end = made_from["reasoning_ids"] or ([], [])
        if not self.start or not self.end:
            raise InputError(
                "loss_mask=without_reasoning needs the token ids of the reasoning markers, and the store has none; "
                "set features.reasoning=[START,END] and rerun precompute.py stages=[features]"
            )

    def __call__(self, sample: Sample) -> Int[Tensor, " T"]:
        tokens, turns = sample.input_ids.tolist(), sample.turns.clone()
        position = find(tokens, self.start, 0)
        while position is not None:
            # A span that generation cut off reaches to the end of the sample.
            close = find(tokens, self.end, position + len(self.start))
            stop = len(tokens) if close is None else close + len(self.end)
            turns[position:stop] = 0
            position = find(tokens, self.start, stop)
        return turns


class Everything(AllTurns):
    """Every token, prompts included: an ablation, which serving never runs."""

    def check(self, made_from: dict) -> None:
        if made_from["teacher_rows"] != "all":
            raise InputError(
                f"loss_mask=everything needs the teacher at every row, and the store was made with "
                f"features.teacher_rows={made_from['teacher_rows']}; make one with features.teacher_rows=all"
            )

    def __call__(self, sample: Sample) -> Int[Tensor, " T"]:
        return torch.ones_like(sample.turns)


def find(tokens: list[int], pattern: list[int], start: int) -> int | None:
    """First position at or after `start` where `pattern` occurs."""
    for position in range(start, len(tokens) - len(pattern) + 1):
        if tokens[position : position + len(pattern)] == pattern:
            return position
    return None
