"""From a pool of prompts to the mix of production traffic: what is measured, chosen and reported."""

import logging
from collections import Counter
from typing import Any

import numpy as np
import pytest
from omegaconf import OmegaConf
from stores import CONF

from eagle3.errors import InputError
from eagle3.prompts.reading.prompt import Prompt
from eagle3.prompts.traffic.grid import measure
from eagle3.prompts.traffic.mix import Margin, TrafficMix, rake, whole_counts

DEFAULTS = OmegaConf.to_container(OmegaConf.load(CONF / "prompts/traffic/production.yaml"))
PLAIN = {"turns": 1, "characters": 0, "code_share": 0.0, "language": "en", "tools": "without",
         "system_prompt": "without"}  # fmt: skip
Measured = dict[str, Any]


def mix(**config: Any) -> TrafficMix:
    return TrafficMix(**{**DEFAULTS, **config})


def drawn(chosen: TrafficMix, pool: list[Measured], sample: list[Measured]) -> tuple[list[Measured], dict]:
    """The first rows of each cell, as many as the mix asks for, and its report."""
    cells = [chosen.grid.cell(row) for row in pool]
    wanted, report = chosen.choose(Counter(cells), sample=Counter(map(chosen.grid.cell, sample)))
    places: Counter[int] = Counter()
    kept = []
    for cell, row in zip(cells, pool, strict=True):
        places[cell] += 1
        kept += [row] if places[cell] <= wanted[cell] else []
    return kept, report


def share(rows: list[Measured], **values: Any) -> float:
    return sum(values.items() <= row.items() for row in rows) / len(rows)


def traffic(count: int, seed: int, *, turns: float, length: float, code: float, english: float, tools: float):
    """Measured rows of a made-up service: the arguments shift the mix of every feature."""
    random = np.random.default_rng(seed)
    with_tools = random.random(count) < tools
    columns = {
        "turns": random.geometric(turns, count).tolist(),
        "characters": np.exp(random.normal(length, 1.0, count)).astype(int).tolist(),
        "code_share": np.where(random.random(count) < code, random.random(count), 0).tolist(),
        "language": random.choice(["en", "de", "unknown"], count, p=[english, 0.9 - english, 0.1]).tolist(),
        "tools": np.where(with_tools, "with", "without").tolist(),
        "system_prompt": np.where(random.random(count) < 0.3 + 0.4 * with_tools, "with", "without").tolist(),
    }
    return rows(**columns)


def rows(**columns: list) -> list[Measured]:
    """Measured rows that differ from PLAIN in these columns only."""
    return [PLAIN | dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


# What is measured


@pytest.mark.parametrize(
    ("messages", "measured"),
    [
        ([("user", "What is the capital of France?")], (1, 30, 0, "en", "without", "without")),
        ([("user", "¿Cómo se llama la capital de Francia?")], (1, 37, 0, "es", "without", "without")),
        ([("user", "x = 1")], (1, 5, 1, "unknown", "without", "without")),
        ([("system", "Be brief."), ("user", "7")], (1, 10, 0, "unknown", "without", "with")),
        ([("system", '[{"type": "function"}]'), ("user", "7")], (1, 23, 0, "unknown", "with", "with")),
        ([("user", "7"), ("assistant", "x = 1, <tools>"), ("user", "8")], (2, 2, 0, "unknown", "without", "without")),
    ],
)
def test_a_prompt_is_measured_without_its_answers(messages, measured):
    turns = [{"role": role, "content": text} for role, text in messages]
    found = measure(Prompt(id="1", source="a", license="MIT", messages=turns))
    assert tuple(found.values()) == measured


# What is chosen


def test_a_skewed_pool_comes_within_two_percent_of_a_production_sample():
    pool = traffic(30_000, 1, turns=0.6, length=5.5, code=0.2, english=0.8, tools=0.1)
    production = traffic(2_000, 2, turns=0.75, length=6.2, code=0.4, english=0.5, tools=0.3)
    kept, report = drawn(mix(sample="x", size=1_500), pool, production)
    assert max(feature["distance_before"] for feature in report["features"].values()) > 0.25
    assert 1_490 < len(kept) == report["kept"] <= 1_500  # a few prompts of the sample have no like in the pool
    assert max(feature["distance_after"] for feature in report["features"].values()) < 0.02


def test_other_features_are_matched_inside_the_strata():
    tools = ["with", *["without"] * 9] * 100 + ["without", *["with"] * 9] * 100
    pool = rows(turns=[1] * 1000 + [2] * 1000, tools=tools)
    sample = rows(turns=[1, 1, 2, 2], tools=["with", "without"] * 2)
    kept, report = drawn(mix(sample="x", size=100, strata=["turns"]), pool, sample)
    assert share(kept, turns=1) == 0.5 and report["features"]["tools"]["distance_after"] < 0.02
    # A tenth of the prompts of one turn have tools, nine tenths of the others: raking keeps that slant.
    assert 0 < share(kept, turns=1, tools="with") < 0.1


def test_a_feature_outside_the_strata_that_the_pool_lacks_shrinks_nothing(caplog):
    sample = rows(turns=[1, 1], language=["en", "ja"])
    with caplog.at_level(logging.WARNING):
        kept, report = drawn(mix(sample="x", size=50), rows(turns=[1] * 50), sample)
    assert len(kept) == 50 and report["unfilled"] == [] and not caplog.text
    assert report["features"]["language"]["distance_after"] == 0.5


def test_what_is_reported_as_kept_is_drawn_also_from_tiny_pools_and_where_a_cell_is_too_small():
    for count in (1, 2, 3):
        pool = rows(characters=[5] * count)
        kept, report = drawn(mix(sample="x", size=count), pool, pool[:1])
        assert kept == pool and report["kept"] == count
    for seed in range(12):
        settings = {"bins": {"turns": [1, 2]}, "strata": ["turns"], "size": 8, "seed": seed}
        chosen = mix(sample="x", **settings)
        kept, report = drawn(chosen, rows(turns=[1] * 40 + [2] * 2), rows(turns=[1] * 7 + [2] * 3))
        assert report["kept"] == len(kept)


def test_an_empty_pool_and_one_without_the_targets_bins_are_errors():
    for pool in ([], rows(turns=[2, 3])):
        with pytest.raises(InputError, match=r"none of \d prompts is in a bin of the sample"):
            drawn(mix(sample="x", size=1), pool, rows(turns=[1]))


# What the pool cannot give


def test_a_quota_that_the_pool_cannot_fill_is_reported_and_no_other_stratum_grows(caplog):
    pool = rows(turns=[1] * 900 + [2] * 20 + [3] * 10)
    with caplog.at_level(logging.WARNING):
        kept, report = drawn(mix(sample="x", size=150, strata=["turns"]), pool, rows(turns=[1, 2, 3]))
    assert Counter(row["turns"] for row in kept) == {1: 50, 2: 20, 3: 10}
    assert report["unfilled"] == [  # the largest gap first
        {"stratum": {"turns": "3 to 4"}, "wanted": 50.0, "in_pool": 10, "kept": 10},
        {"stratum": {"turns": "2"}, "wanted": 50.0, "in_pool": 20, "kept": 20},
    ]
    assert report["shortfall"] == pytest.approx(70 / 150, abs=1e-6)
    assert "turns 3 to 4: 10 of 50; turns 2: 20 of 50" in caplog.text


# Raking and rounding


def slow_rake(pool: dict, margins: list[tuple[int, dict]], size: float, sweeps: int) -> dict:
    """Textbook iterative proportional fitting over a dict of cells; a margin is an axis and its wanted shares."""
    cells = dict(pool)
    for _ in range(sweeps):
        for axis, shares in margins:
            for bin, share in shares.items():
                total = sum(value for cell, value in cells.items() if cell[axis] == bin)
                for cell in cells:
                    if cell[axis] == bin and total:
                        cells[cell] *= share * size / total
    return cells


def test_raking_equals_the_textbook_loop():
    random = np.random.default_rng(0)
    pool = random.integers(50, 100, size=12)
    row, column = np.unravel_index(np.arange(12), (3, 4))
    shares = [random.dirichlet(np.ones(3)), random.dirichlet(np.ones(4))]
    margins = [Margin(["row"], row, shares[0]), Margin(["column"], column, shares[1])]
    cells = rake(pool, margins, size=10, sweeps=500, tolerance=1e-12)
    axes = [(axis, dict(enumerate(wanted))) for axis, wanted in enumerate(shares)]
    slow = slow_rake(dict(zip(zip(row, column, strict=True), pool.astype(float), strict=True)), axes, 10, 500)
    assert cells == pytest.approx(list(slow.values()), rel=1e-6)


def test_raking_never_asks_for_more_than_a_cell_holds_and_still_meets_the_margins():
    half = np.array([0.5, 0.5])
    margins = [Margin(["row"], np.array([0, 0, 1, 1]), half), Margin(["column"], np.array([0, 1, 0, 1]), half)]
    cells = rake(np.array([2, 100, 100, 100]), margins, size=100, sweeps=1000, tolerance=1e-9)
    assert cells == pytest.approx([2, 48, 48, 2], abs=0.01)


def test_whole_counts_round_each_cell_and_each_run_of_cells_up_or_down_and_favour_no_cell():
    random = np.random.default_rng(0)
    expected = random.random(1000) * 3
    expected *= 1500 / expected.sum()
    counts = whole_counts(expected, random)
    assert counts.sum() == 1500
    assert np.abs(counts - expected).max() < 1
    assert np.abs(np.cumsum(counts) - np.cumsum(expected)).max() < 1
    few = [whole_counts(np.array([0.3, 0.3, 0.3, 1.05]), np.random.default_rng(seed)) for seed in range(400)]
    assert {each.sum() for each in few} == {2}
    assert np.mean(few, axis=0) == pytest.approx([0.3, 0.3, 0.3, 1.1], abs=0.07)


def test_a_sample_without_prompts_is_an_error():
    with pytest.raises(InputError, match=r"prompts\.traffic\.sample=x has no prompt"):
        drawn(mix(sample="x", size=1), rows(turns=[1]), [])
