"""Half of the samples, chosen by how flat the target's distributions are (arXiv:2601.18902), against all and any half.

    python benchmarks/selection.py --folder DIR --out benchmarks/results/selection.json --store STORE     # a GPU

A token's flatness is the cosine between the target's probabilities and the uniform ones; a sample's is the mean over
its answers. The halves are ids for `data.ids`. Heads are trained and held against each other as in training_ways.py: on
all samples, on the flattest half, and on another half drawn at random with each seed, for as many epochs, or with
`--same-steps` for as many steps.
"""

import argparse
import json
import random
import sys
from pathlib import Path

import torch
from result import write_result
from torch import Tensor
from training_ways import add_arguments, trained_and_compared

from eagle3.features.joined import open_source
from eagle3.features.sample import Sample

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--experiment", default="quickstart")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--same-steps", action="store_true", help="halves are trained for twice the epochs")
    parser.add_argument("overrides", nargs="*", help="of train.py for every way")
    add_arguments(parser)
    options = parser.parse_args(arguments)
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    facts = write_halves(folder, options)
    general = [f"experiment={options.experiment}", f"data.path={options.store.resolve()}", *options.overrides]
    of_half = options.epochs * (2 if options.same_steps else 1)
    runs = {
        (way, seed): [*general, f"seed={seed}", *own]
        for seed in range(options.seeds)
        for way, own in {
            "all": [f"trainer.max_epochs={options.epochs}"],
            "any half": [f"data.ids={folder}/half-{seed}.txt", f"trainer.max_epochs={of_half}"],
            "flattest half": [f"data.ids={folder}/flattest.txt", f"trainer.max_epochs={of_half}"],
        }.items()
    }
    result = {"experiment": options.experiment, "epochs": {"all": options.epochs, "halves": of_half}, **facts}
    result |= trained_and_compared(folder, runs, options)
    print(json.dumps(write_result(options.out, result, arguments)["changes"], indent=1))


def write_halves(folder: Path, options: argparse.Namespace) -> dict[str, object]:
    """Write the ids of the flattest half, and of one drawn for each seed; return how flat they are."""
    path = folder / "flatness.json"
    if not path.exists():
        path.write_text(json.dumps(flatness_of(options.store)))
    flatness: dict[str, float] = json.loads(path.read_text())
    half = len(flatness) // 2
    halves = {f"half-{seed}": random.Random(seed).sample([*flatness], half) for seed in range(options.seeds)}
    halves["flattest"] = sorted(flatness, key=flatness.__getitem__, reverse=True)[:half]
    for name, ids in halves.items():
        (folder / f"{name}.txt").write_text("".join(f"{each}\n" for each in ids))
    means = {name: sum(flatness[each] for each in ids) / half for name, ids in halves.items()}
    return {"samples": len(flatness), "mean_flatness": {"all": sum(flatness.values()) / len(flatness), **means}}


def flatness_of(store: Path) -> dict[str, float]:
    """Return the flatness of each sample of the store."""
    source = open_source(str(store))
    lm_head = source.target_weights()[1].to(DEVICE, torch.float32)
    return {ref.entry.id: sample_flatness(source.read(ref), lm_head) for ref in source.samples}


def sample_flatness(sample: Sample, lm_head: Tensor) -> float:
    probabilities = (sample.last_hidden_state.to(DEVICE).float() @ lm_head.T).softmax(-1)
    return float((1 / (probabilities.norm(dim=-1) * probabilities.shape[-1] ** 0.5)).mean())


if __name__ == "__main__":
    main(sys.argv[1:])
