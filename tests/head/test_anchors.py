"""Which anchors are trained at which step, against the sentence that defines it."""

from itertools import pairwise, product

import torch
from heads import ttt_batch
from stores import random_sample

from eagle3.head.anchors import anchors_and_steps, runs

PATTERNS = [
    [0, 0, 1, 1, 1, 0],
    [0, 1, 1, 0, 0, 2, 2, 2, 2],
    [1, 1, 1, 0],
    [0, 1],
    [0, 1, 0, 2, 2],
    [0, 0, 0],
    [1, 1, 2, 2, 2],
    [1] * 9,
    *(
        [number if number % 2 else 0 for number, run in enumerate(runs) for _ in range(run)]
        for runs in torch.randint(0, 5, (20, 8), generator=torch.Generator().manual_seed(0)).tolist()
    ),
]


def by_definition(turns: list[int], ttt_steps: int) -> dict[int, int]:
    """Anchor t is trained at step k iff x_{t+1} … x_{t+2+k} all are answer tokens of the same turn."""
    steps_of = {}
    for anchor in range(len(turns)):
        steps = 0
        for step in range(ttt_steps):
            needed = turns[anchor + 1 : anchor + 3 + step]
            if len(needed) < 2 + step or needed[0] == 0 or len(set(needed)) > 1:
                break
            steps += 1
        if steps:
            steps_of[anchor] = steps
    return steps_of


def test_anchors_and_their_steps_are_those_of_the_definition():
    for turns, ttt_steps in product(PATTERNS, (1, 2, 7)):
        anchors, steps = anchors_and_steps(torch.tensor(turns), ttt_steps)
        assert dict(zip(anchors.tolist(), steps.tolist(), strict=True)) == by_definition(turns, ttt_steps), turns


def test_each_run_of_anchors_is_that_of_one_turn():
    for turns in PATTERNS:
        anchors, _ = anchors_and_steps(torch.tensor(turns), 7)
        bounds, ends = runs(anchors)
        found = [anchors[first:stop].tolist() for first, stop in pairwise(bounds)]
        by_turn: dict[int, list[int]] = {}
        for anchor in anchors.tolist():
            by_turn.setdefault(turns[anchor + 1], []).append(anchor)
        assert found == [by_turn[turn] for turn in sorted(by_turn)], turns
        assert list(ends) == [run[-1] + 1 for run in found]


def test_answers_that_touch_in_a_pack_stay_apart():
    """A sample's last turn has the next one's number, the one after it, or another of its own."""
    patterns = [[0, 1, 1, 0, 2, 2, 2], [1, 1, 1, 0, 3, 3], [1, 1, 0, 2, 2], [2, 2, 2, 2], [0, 1, 1]]
    samples = [random_sample(turns, seed=number) for number, turns in enumerate(patterns)]
    batch, expected = ttt_batch(samples, ttt_steps=4), {}
    for start, turns in zip(batch.pack.token_bounds, patterns, strict=False):
        expected |= {start + anchor: steps for anchor, steps in by_definition(turns, 4).items()}
    assert dict(zip(batch.anchors.tolist(), batch.anchor_steps.tolist(), strict=True)) == expected
