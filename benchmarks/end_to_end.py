"""train.py over what its steps alone would cost, on one GPU and on several.

    python benchmarks/synthetic_store.py --out STORE --gigabytes 20
    python benchmarks/end_to_end.py --store STORE --out benchmarks/results/end_to_end.json --devices 1 2 4 [overrides]

The step alone: forward, backward, clipping and optimizer on packs of the store that lie on the GPU already. train.py
reads the store, logs, and validates between epochs; its rates are those that it logs after the first epoch. That one
comes from the disk (the system is asked to forget the store's files before): its rates stand beside them, and what a
plain read of the same files takes.
"""

import argparse
import csv
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from statistics import fmean, harmonic_mean
from typing import Any

import torch
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig
from plain_files import forget, read_rate
from result import write_result
from step_cost import timed
from train_step import Step, device, optimizer_seconds

from eagle3 import cli
from eagle3.commands.train import build_training
from eagle3.data.plan import plan_epoch
from eagle3.head.batch import ttt_batch

ROOT = Path(__file__).parent.parent

PACKS = 8  # on the GPU at once


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="results; the runs lie beside them")
    parser.add_argument("--devices", type=int, nargs="+", default=[1], help="numbers of GPUs, one run each")
    parser.add_argument("--steps", type=int, default=80, help="optimizer steps of a run, at least")
    parser.add_argument("--pack-tokens", type=int, default=16384)
    parser.add_argument("overrides", nargs="*", help="of train.py")
    options = parser.parse_intermixed_args(arguments)
    overrides = [f"data.path={options.store}", f"data.pack_tokens={options.pack_tokens}", "data.verify=false"]
    overrides += ["callbacks.last.every_n_steps=0", "+callbacks.best.save_weights_only=true", *options.overrides]
    with initialize_config_dir(cli.CONF, version_base="1.3"):
        config = compose("train", overrides=["run_dir=.", *overrides, *trainer_of(1, overrides)])
    alone, packs_of_epoch = step_alone(config)
    torch.cuda.empty_cache()
    rows: list[dict[str, Any]] = []
    for devices in options.devices:
        directory = options.out.parent / f"{options.out.stem}_{devices}"
        forget(options.store)
        plain = read_rate(options.store) / 1e6
        forget(options.store)
        rates, first = trained(directory, devices, -(-options.steps * devices // packs_of_epoch), overrides)
        of_rank = rates["tokens_per_s"] / devices
        rows.append(
            {"devices": devices, "over_step_alone": of_rank / alone["tokens_per_s"]}
            | {"over_linear": of_rank * rows[0]["devices"] / rows[0]["tokens_per_s"] if rows else 1.0, **rates}
            | {"first_epoch": first | {"plain_read_mb_per_s": plain}}
        )
        print(rows[-1], flush=True)
        write_result(options.out, {"step_alone": alone, "runs": rows}, arguments)


def step_alone(config: DictConfig) -> tuple[dict[str, float], int]:
    """Rates without train.py around the step, and the number of packs of an epoch."""
    torch.set_float32_matmul_precision(config.matmul_precision)
    data, module = build_training(config)
    step = Step(module, config)
    [planned] = plan_epoch(
        data.train_samples, pack_tokens=config.data.pack_tokens, world_size=1, accumulate=1, shuffle_seed=0
    )
    packs = [
        ttt_batch([data.read(ref) for ref in each.samples], ttt_steps=config.ttt_steps).to(device())
        for each in planned[:PACKS]
    ]
    for batch in packs:
        step(batch)
    seconds = timed(lambda: [step(batch) for batch in packs], 3, device()) / len(packs) + optimizer_seconds(step)
    tokens, anchors = fmean(len(batch.pack.input_ids) for batch in packs), fmean(len(batch.anchors) for batch in packs)
    return {"tokens_per_s": tokens / seconds, "anchors_per_s": anchors / seconds, "step_ms": 1000 * seconds}, len(
        planned
    )


def trained(
    directory: Path, devices: int, epochs: int, overrides: list[str]
) -> tuple[dict[str, float], dict[str, float]]:
    """What train.py logs, on average: behind the first epoch, and in it."""
    command = [
        "train.py",
        *overrides,
        *trainer_of(devices, overrides),
        f"trainer.devices={devices}",
        f"trainer.max_epochs={epochs}",
    ]
    command += ["trainer.log_every_n_steps=5", f"hydra.run.dir={directory.resolve()}"]
    shutil.rmtree(directory, ignore_errors=True)  # of an earlier run
    print("$ python", *command, flush=True)
    subprocess.run([sys.executable, *command], cwd=ROOT, check=True)
    with (directory / "metrics.csv").open() as file:
        logged = [line for line in csv.DictReader(file) if line["train/tokens_per_s"]]
    # The first line of each epoch holds its start, the first two of all what is compiled.
    inside = [line for before, line in pairwise(logged) if before["epoch"] == line["epoch"]]
    first = [line for line in inside if line["epoch"] == "0"]
    return averages([line for line in inside if line["epoch"] != "0"]), averages(first[1:])


def averages(lines: list[dict[str, str]]) -> dict[str, float]:
    tokens, anchors, waits = (
        [float(line[f"train/{name}"]) for line in lines]
        for name in ("tokens_per_s", "anchors_per_s", "data_wait_share")
    )
    # Of rates over about as many tokens each: all tokens over all time.
    return {
        "tokens_per_s": harmonic_mean(tokens),
        "anchors_per_s": harmonic_mean(anchors),
        "data_wait_share": fmean(waits),
    }


def trainer_of(devices: int, overrides: list[str]) -> list[str]:
    if any(each.startswith("trainer=") for each in overrides):
        return []
    return ["trainer=gpu" if devices == 1 else "trainer=ddp"]


if __name__ == "__main__":
    main(sys.argv[1:])
