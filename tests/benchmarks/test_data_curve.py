"""How many answer tokens a point of the curve trains in an epoch, and the line through the points."""

import math
from pathlib import Path
from typing import Any

import pytest
from data_curve import lengths, rule_of_thumb, trained_tokens

from eagle3.commands.train import build_training
from eagle3.features.joined import open_source
from tests.training.test_training import composed


@pytest.mark.parametrize("share, overrides", [(1.0, []), (0.4, ["data.share=0.4"])])
def test_the_tokens_of_an_epoch_are_those_of_the_samples_that_are_trained(
    store_path: Path, tmp_path: Path, share: float, overrides: list[str]
) -> None:
    data, _ = build_training(composed(tmp_path / "run", store_path, *overrides))
    trained = [ref.entry.answer_tokens for ref in data.train_samples]
    assert 0 < len(trained) < 60
    assert trained_tokens(open_source(str(store_path)).samples, share, data.val_fraction) == sum(trained)


def test_every_chain_and_temperature_has_a_length_of_each_seed() -> None:
    def seed(greedy: float, sampled: float) -> dict[str, Any]:
        chains = {"all, chain of 7, greedy": greedy, "all, chain of 7, T = 1": sampled}
        return {chain: {"prompts": 9, "a point": {"accept_length": each}} for chain, each in chains.items()}

    found = lengths([seed(2.5, 2.0), seed(2.6, 2.1)], "a point")
    assert found == {"chain of 7, greedy": [2.5, 2.6], "chain of 7, T = 1": [2.0, 2.1]}


def row(tokens: float, length: float, *, answers: int = 1, share: float = 1.0) -> dict[str, Any]:
    return {"answers": answers, "share": share, "answer_tokens": int(tokens), "accept_length": {"7": [length]}}


def test_the_rule_is_the_line_through_the_best_of_each_number_of_tokens() -> None:
    rows = [row(1e6 * 2**number, 2.5 + 0.1 * number) for number in range(-2, 5)]
    worse = [row(2e6, 2.0), row(1e6, 9.9, answers=8, share=0.125)]  # fewer epochs; fewer prompts
    found = rule_of_thumb([*rows, *worse], "7")
    assert found is not None
    assert found["a_doubling_adds"] == pytest.approx(0.1)
    assert found["at_one_million"] == pytest.approx(2.5)
    assert found["interval"] == pytest.approx([0.1, 0.1], abs=1e-6)
    assert rule_of_thumb(rows[:2], "7") is None


def test_points_beside_the_line_widen_the_interval() -> None:
    lengths = [2.0, 2.3, 2.2, 2.5, 2.4]
    low, high = rule_of_thumb([row(2**number, each) for number, each in enumerate(lengths, 10)], "7")["interval"]  # type: ignore[index]
    # Least squares by hand: the line is 2.08 + 0.1 x, and t of 3 degrees of freedom 3.182.
    error = math.sqrt(sum((each - 2.08 - 0.1 * place) ** 2 for place, each in enumerate(lengths)) / 3 / 10)
    assert (low, high) == pytest.approx((0.1 - 3.18245 * error, 0.1 + 3.18245 * error), rel=1e-4)
