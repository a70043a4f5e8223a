"""Heads trained with each loss of conf/loss at equal steps: what they accept on the validation prompts.

    python benchmarks/losses.py --folder DIR --out benchmarks/results/losses.json     # a quarter of an hour, one core

The bundled target answers once; then a training for each loss and seed with the quickstart's settings: the same
prompts, packs and steps. The accept length is that of the validation prompts (simulated, as checkpoints are chosen by),
held against soft cross-entropy's by differences of pairs of the same seed, with a 95 % interval over seeds (Student's t).
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from feature_ways import ANSWERS, ASSETS, call, change
from result import write_result

LOSSES = ("soft_cross_entropy", "reverse_kl", "total_variation", "cross_entropy_tv", "lk")


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True, help="for everything; what is there is taken as it is")
    parser.add_argument("--prompts", type=int, default=500)
    parser.add_argument("--val-fraction", type=float, default=0.3)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("overrides", nargs="*", help="for train.py, e.g. trainer.max_epochs=4")
    options = parser.parse_args(arguments)
    if not (options.folder / "data" / "features").exists():
        call(
            "precompute.py", f"target.path={ASSETS}/tiny", f"prompts.path={ASSETS}/prompts/train.jsonl",
            f"out_dir={options.folder}/data", "prompts/privacy=patterns", f"prompts.limit={options.prompts}",
            "features.max_length=1024", *ANSWERS,
        )  # fmt: skip
    seeds = range(options.seeds)
    # Seed by seed, so that a run that is cut short has whole pairs.
    rows = [{loss: run(loss, seed, options) for loss in LOSSES} for seed in seeds]
    results: dict[str, dict[str, Any]] = {
        loss: {key: [row[loss][key] for row in rows] for key in rows[0][loss]} for loss in LOSSES
    }
    base = results[LOSSES[0]]["accept_length"]
    for loss in LOSSES[1:]:
        results[loss]["beside_soft_cross_entropy"] = change(base, results[loss]["accept_length"])
    print(json.dumps(write_result(options.out, {"losses": results}), indent=1))


def run(loss: str, seed: int, options: argparse.Namespace) -> dict[str, float]:
    trained, began = options.folder / f"{loss}-{seed}", time.perf_counter()
    if not (trained / "result.json").exists():
        call(
            "train.py", "experiment=quickstart", f"loss={loss}", f"data.path={options.folder}/data/features",
            f"hydra.run.dir={trained}", f"seed={seed}", f"data.val_fraction={options.val_fraction}",
            "callbacks.progress=null", *options.overrides,
        )  # fmt: skip
        (trained / "seconds.json").write_text(str(time.perf_counter() - began))
    return {
        "accept_length": json.loads((trained / "result.json").read_text())["score"],
        "training_seconds": json.loads((trained / "seconds.json").read_text()),
    }


if __name__ == "__main__":
    main(sys.argv[1:])
