"""The same answers' features made in several ways: bytes, how far apart they are, what heads trained on each accept.

    python benchmarks/feature_ways.py --folder DIR --out benchmarks/results/fp8_features.json \
        --ways '{"bfloat16": ["features.dtype=bfloat16"], "fp8": ["features.dtype=fp8"]}'      # an hour, two cores
    python benchmarks/feature_ways.py --folder DIR --out benchmarks/results/engine_features.json --target TARGET \
        --ways '{"Hugging Face": ["features=huggingface"], "SGLang": ["features=sglang"]}'          # a GPU, with SGLang

The target answers once; then its features each way, and a training for each way and seed: the same prompts, the same
packs. The accept length is that of the validation prompts (simulated, as checkpoints are chosen by). Each way is held
against the first: differences of rows over their norms; differences of accept lengths of pairs of the same seed, with a
95 % interval over seeds (Student's t).
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from result import write_result
from torch import Tensor
from training_ways import ASSETS, call, change

from eagle3.features.fp8 import ScaledRows
from eagle3.features.joined import open_source

ANSWERS = ["responses.max_new_tokens=128", "answers.batch_size=256", "answers.batch_tokens=65536"]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--ways", type=json.loads, required=True, help="names and overrides of precompute.py, as JSON")
    parser.add_argument("--target", default=f"{ASSETS}/tiny")
    parser.add_argument("--prompts", type=int, default=1000)
    parser.add_argument("--prompts-file", default=f"{ASSETS}/prompts/train.jsonl")
    parser.add_argument("--answers", type=json.loads, default=ANSWERS, help="overrides of precompute.py, as JSON")
    parser.add_argument("--val-fraction", type=float, default=0.3)
    parser.add_argument("--seeds", type=int, default=3, help="0: no training")
    parser.add_argument("--folder", type=Path, required=True, help="for everything; what is there is taken as it is")
    parser.add_argument("overrides", nargs="*", help="for train.py, e.g. trainer.max_epochs=1")
    options = parser.parse_args(arguments)
    data = options.folder / "data"
    if not (data / "prompts").exists():
        call(
            "precompute.py", f"prompts.path={options.prompts_file}", f"out_dir={data}", "prompts/privacy=patterns",
            f"prompts.limit={options.prompts}", "stages=[prompts]",
        )  # fmt: skip
    call("precompute.py", f"target.path={options.target}", f"out_dir={data}", "stages=[responses]", *options.answers)
    rows = {name: run(name, overrides, options) for name, overrides in options.ways.items()}
    [(first, base), *others] = rows.items()
    for name, row in others:
        row["beside_the_first"] = {
            "bytes": row["bytes"] / base["bytes"],
            **differences(options.folder / folder_of(first), options.folder / folder_of(name)),
            **(change(base["accept_length"], row["accept_length"]) if options.seeds > 1 else {}),
        }
    print(json.dumps(write_result(options.out, {"ways": rows}), indent=1))


def run(name: str, overrides: list[str], options: argparse.Namespace) -> dict[str, Any]:
    data, store = options.folder / "data", options.folder / folder_of(name)
    call(
        "precompute.py", f"target.path={options.target}", f"out_dir={data}", "stages=[features]",
        f"features.path={store}", "features.max_length=1024", *overrides,
    )  # fmt: skip
    source, lengths, seconds = open_source(str(store)), [], []
    for seed in range(options.seeds):
        trained, began = options.folder / f"{folder_of(name)}-{seed}", time.perf_counter()
        if not (trained / "result.json").exists():
            call(
                "train.py", "experiment=quickstart", f"data.path={store}", f"hydra.run.dir={trained}", f"seed={seed}",
                f"data.val_fraction={options.val_fraction}", "callbacks.progress=null", *options.overrides,
            )  # fmt: skip
        seconds.append(time.perf_counter() - began)
        lengths.append(json.loads((trained / "result.json").read_text())["score"])
    facts = source.describe()
    return {
        "bytes": facts["bytes"],
        "bytes_per_token": facts["bytes"] / facts["tokens"],
        "samples": facts["samples"],
        "accept_length": lengths,
        "training_seconds": seconds,
    }


def folder_of(name: str) -> str:
    return name.lower().replace(" ", "_")


def differences(one: Path, other: Path) -> dict[str, float]:
    """Return medians over rows of the relative difference, and the share of equal teachers."""
    first, second = open_source(str(one)), open_source(str(other))
    theirs = {ref.entry.id: ref for ref in second.samples}
    aux, last, same, teachers = [], [], 0, 0
    for ref in first.samples:
        ours, their = first.read(ref), second.read(theirs[ref.entry.id])
        aux.append(relative(rows_of(ours.aux_hidden_states), rows_of(their.aux_hidden_states)))
        last.append(relative(rows_of(ours.last_hidden_state), rows_of(their.last_hidden_state)))
        same += int((ours.teacher_argmax == their.teacher_argmax).sum())
        teachers += len(ours.teacher_argmax)
    return {
        "aux_difference": float(torch.cat(aux).median()),
        "last_difference": float(torch.cat(last).median()),
        "same_teachers": same / teachers,
    }


def rows_of(rows: Tensor | ScaledRows) -> Tensor:
    return rows.to(DEVICE).float()


def relative(one: Tensor, other: Tensor) -> Tensor:
    return (one - other).norm(dim=-1) / one.norm(dim=-1)


if __name__ == "__main__":
    main(sys.argv[1:])
