"""Heads trained with each loss of conf/loss at equal steps: what they accept on the validation prompts.

    python benchmarks/divergences.py --folder DIR --out benchmarks/results/divergences.json     # ten trainings

The bundled target answers once; then a training for each loss and seed with the quickstart's settings: the same
prompts, packs and steps. The accept length is that of the validation prompts (simulated, as checkpoints are chosen by),
held against soft cross-entropy's by differences of pairs of the same seed, with a 95 % interval over seeds (Student's
t): of two seeds it is wide, and says no more than that the losses train.
"""

import argparse
import json
import sys
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
    lengths = {loss: [accept_length(loss, seed, options) for seed in range(options.seeds)] for loss in LOSSES}
    base = lengths[LOSSES[0]]
    results: dict[str, dict[str, Any]] = {loss: {"accept_length": lengths[loss]} for loss in LOSSES}
    for loss in LOSSES[1:]:
        results[loss]["beside_soft_cross_entropy"] = change(base, lengths[loss])
    print(json.dumps(write_result(options.out, {"losses": results}), indent=1))


def accept_length(loss: str, seed: int, options: argparse.Namespace) -> float:
    trained = options.folder / f"{loss}-{seed}"
    if not (trained / "result.json").exists():
        call(
            "train.py", "experiment=quickstart", f"loss={loss}", f"data.path={options.folder}/data/features",
            f"hydra.run.dir={trained}", f"seed={seed}", f"data.val_fraction={options.val_fraction}",
            "callbacks.progress=null", *options.overrides,
        )  # fmt: skip
    return json.loads((trained / "result.json").read_text())["score"]


if __name__ == "__main__":
    main(sys.argv[1:])
