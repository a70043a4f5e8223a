"""Accept length over answer tokens and epochs, and over several answers to a prompt against more prompts.

    python precompute.py -m 'out_dir=DATA/${responses.seed}' 'responses.seed=range(24)' target.path=TARGET …
    python benchmarks/data_curve.py --folder DIR --out benchmarks/results/data_curve.json --stores DATA/*/features \\
        --target TARGET --held-out FILE --experiment head_quality optim=muon optim.weight_decay=0.1

Each of the stores holds an answer to each prompt. A point is [answers to a prompt, share of the prompts, epochs]; those
that need more stores than there are are left out, and named in the result. Heads are trained, exported and held against
those of the first point as in training_ways.py. The rule of thumb, for each chain and temperature, is a line through
accept length over the logarithm of answer tokens, where the best number of epochs counts for each number of tokens, and
points with fewer prompts and several answers do not.
"""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from result import write_result
from training_ways import add_arguments, trained_and_compared

from eagle3.features.joined import open_source
from eagle3.features.samples import Samples
from eagle3.features.split import share_fractions

POINTS = [
    [1, 1, 1], [1, 1, 2], [1, 1, 4], [1, 1, 8], [1, 1, 16],
    [1, 0.25, 1], [1, 0.25, 4], [1, 0.25, 16], [1, 0.5, 1], [1, 0.5, 4], [1, 0.5, 16],
    [2, 1, 1], [2, 1, 4], [4, 1, 1], [4, 1, 4], [8, 1, 1], [8, 1, 2], [16, 1, 1], [24, 1, 1],
    [4, 0.25, 1], [8, 0.125, 1], [8, 0.125, 4],
]  # fmt: skip


@dataclass(frozen=True)
class Point:
    answers: int
    share: float
    epochs: int

    def __str__(self) -> str:
        prompts = "all prompts" if self.share == 1 else f"{self.share:g} of the prompts"
        return f"{self.answers} answers to {prompts} for {self.epochs} epochs"


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--stores", type=Path, nargs="+", required=True)
    parser.add_argument("--experiment", default="quickstart")
    parser.add_argument("--val-fraction", type=float, default=0.08)
    parser.add_argument("--points", type=json.loads, default=POINTS, help="as JSON")
    parser.add_argument("overrides", nargs="*", help="of train.py for every point")
    add_arguments(parser)
    options = parser.parse_intermixed_args(arguments)
    stores = [str(path.resolve()) for path in options.stores]
    asked = [Point(*each) for each in options.points]
    points = [point for point in asked if point.answers <= len(stores)]
    general = [f"experiment={options.experiment}", f"data.val_fraction={options.val_fraction}", *options.overrides]
    runs = {
        (str(point), seed): [
            *general,
            f"data.path=[{','.join(stores[: point.answers])}]",
            f"data.share={point.share if point.share < 1 else 'null'}",
            f"trainer.max_epochs={point.epochs}",
            f"seed={seed}",
        ]
        for seed in range(options.seeds)
        for point in points
    }
    found = trained_and_compared(options.folder.resolve(), runs, options)
    samples = [open_source(store).samples for store in stores]
    rows: list[dict[str, Any]] = []
    for point in points:
        tokens = sum(trained_tokens(each, point.share, options.val_fraction) for each in samples[: point.answers])
        rows.append({**vars(point), "answer_tokens": tokens, "accept_length": lengths(found["seeds"], str(point))})
    rules = {chain: rule_of_thumb(rows, chain) for chain in rows[0]["accept_length"]}
    left_out = [str(point) for point in asked if point not in points]
    facts = {"experiment": options.experiment, "target": Path(options.target).name, "left_out": left_out}
    result = {**facts, "points": rows, "rule_of_thumb": rules, "changes": found["changes"]}
    write_result(options.out, result, arguments)
    print(json.dumps({"points": rows, "rule_of_thumb": rules}, indent=1))


def trained_tokens(samples: Samples, share: float, val_fraction: float) -> int:
    """Count the answer tokens of an epoch, as train.py splits and chooses."""
    used = samples.take((share_fractions(samples.split) < share) & (samples.split >= val_fraction))
    return sum(ref.entry.answer_tokens for ref in used)


def lengths(seeds: Sequence[dict[str, Any]], point: str) -> dict[str, list[float]]:
    """Return what a point's heads accept, by chain and temperature: a number for each seed."""
    return {chain.removeprefix("all, "): [seed[chain][point]["accept_length"] for seed in seeds] for chain in seeds[0]}


def rule_of_thumb(rows: Sequence[dict[str, Any]], chain: str) -> dict[str, Any] | None:
    """Fit what each doubling of the answer tokens adds, with a 95 % interval over points; None with fewer than 3."""
    from scipy import stats

    best: dict[int, float] = {}
    for row in rows:
        if row["share"] == 1 or row["answers"] == 1:  # fewer prompts with several answers are another question
            tokens, length = row["answer_tokens"], mean(row["accept_length"][chain])
            best[tokens] = max(length, best.get(tokens, 0))
    if len(best) < 3:
        return None
    line = stats.linregress([math.log2(tokens) for tokens in best], [*best.values()])
    half = line.stderr * float(stats.t.ppf(0.975, len(best) - 2))
    return {
        "a_doubling_adds": line.slope,
        "interval": [line.slope - half, line.slope + half],
        "at_one_million": line.intercept + line.slope * math.log2(1e6),
        "tokens": sorted(best),
    }


if __name__ == "__main__":
    main(sys.argv[1:])
