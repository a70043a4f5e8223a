"""What heads that were trained in several ways are compared by."""

import random

import pytest
from scipy import stats
from training_ways import change, parsed, summary


def test_a_change_is_a_mean_of_pairs_with_students_interval():
    generator = random.Random(0)
    base = [2 + generator.random() for _ in range(5)]
    other = [length * (1.01 + 0.02 * generator.random()) for length in base]
    shares = [new / old - 1 for old, new in zip(base, other, strict=True)]
    low, high = stats.t.interval(0.95, 4, loc=sum(shares) / 5, scale=stats.sem(shares))
    found = change(base, other)
    assert found["accept_length_change"] == pytest.approx(sum(shares) / 5)
    assert found["interval"] == pytest.approx([low, high])
    assert change(base[:1], other[:1]) == {"accept_length_change": pytest.approx(shares[0]), "interval": None}


def test_overrides_may_follow_the_held_out_files():
    options = parsed(["ways.yaml", "--folder=F", "--out=O", "--held-out", "a.jsonl", "b.jsonl", "trainer=gpu"])
    assert (options.held_out, options.overrides) == (["a.jsonl", "b.jsonl"], ["trainer=gpu"])


def test_ways_are_held_against_the_first_seed_by_seed():
    def seed(first: float, second: float) -> dict[str, object]:
        ways = {"prompts": 9, "plain": {"accept_length": first}, "new": {"accept_length": second}}
        return {f"heldout: {source}, chain of 3, greedy": ways for source in ("all", "small", "code")}

    found = summary([seed(2.0, 2.2), seed(3.0, 3.0)])
    assert found["changes"]["heldout: code, chain of 3, greedy"].keys() == {"new"}
    assert found["changes"]["heldout: all, chain of 3, greedy"]["new"]["accept_length_change"] == pytest.approx(0.05)
    assert [list(each) for each in found["seeds"]] == [["heldout: all, chain of 3, greedy"]] * 2
