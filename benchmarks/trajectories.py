"""Do the fast ways to train follow the plain one? 200 optimizer steps of each, with the same three seeds.

python benchmarks/trajectories.py --data STORE/features --out OUT --jobs 6 --gpus 0 1 -- experiment=head_quality
python benchmarks/trajectories.py --data STORE/features --out OUT --skip fast clip-fast -- trainer=cpu   # no flash

Writes OUT/trajectories.json and prints its table; the runs lie in OUT/runs, finished ones are taken as they are.
"""

import argparse
import csv
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import lightning
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from result import write_result

from eagle3 import cli

ROOT = Path(__file__).parent.parent
RULE = """Within: the mean over the seeds lies at most 2 standard errors (noise / sqrt(seeds)) from that of the run it
is held against; the noise is the standard deviation over that run's own seeds. With 3 seeds 29 % of independent runs of
the same expectation fail this: a no asks for a look. Loss differences are absolute, of the training loss at each step
and seed: the largest, and means over the seeds. The reference is compared with itself, each seed with the next."""
MARKS = (10, 100, 200)  # steps whose difference is shown
METRICS = ("val/accept_length", "val/loss")
# One validation, at the end: only ValidateAtTheEnd asks for it.
FIXED = """trainer.max_epochs=-1 +trainer.check_val_every_n_epoch=null trainer.val_check_interval=1000000000
    trainer.log_every_n_steps=1 trainer.enable_progress_bar=false callbacks.progress=null callbacks.last=null
    callbacks.early_stopping=null +callbacks.validation._target_=trajectories.ValidateAtTheEnd"""
OWN = "seed data.path trainer.max_steps trainer.accumulate_grad_batches"  # see settings
PLAIN = """trainer.precision=32-true matmul_precision=highest kernels.attention=dense kernels.layer=plain
    kernels.loss=plain"""
FAST = """trainer.precision=bf16-mixed matmul_precision=high kernels.attention=auto kernels.layer=fused
    kernels.loss=chunked"""
# Adam divides a gradient's scale out: clipping at 0.1 moved the loss of 30 steps of the tiny target by 0.0004, bf16 by
# 0.0013. Below Adam's epsilon the scale counts: 3.7, so that clipping left out or done twice shows.
TIGHT = "trainer.gradient_clip_val=1e-6"


@dataclass(frozen=True)
class Variant:
    """What differs from PLAIN; `against` names the variant that it should follow, `means` says what a difference is."""

    name: str
    overrides: str
    means: str
    against: str = "reference"
    micro_batches: int = 1  # of data.pack_tokens / micro_batches each, accumulated


ORDER = "float32-exact, in another order of additions: only rounding, thousands of times less than between seeds"
HALVES = "other samples in a step, whose last half alone is logged: compare the end"
VARIANTS = [
    Variant("reference", "", "how far apart seeds are; it clips at 1.0, the default"),
    Variant("repeat", "", "the same again: what the machine itself does not repeat"),
    Variant("tf32", "matmul_precision=high", "10-bit mantissas in products on a GPU; a CPU has none"),
    Variant("chunked", "kernels.loss=chunked", ORDER),
    Variant("padded", "kernels.attention=padded", ORDER),
    Variant("fused", "kernels.layer=fused", ORDER),
    Variant("autocast", "trainer.precision=bf16-mixed", "7-bit mantissas in products: a curve nearby, not the same"),
    Variant("fast", FAST, "bf16 products and the fast backends: should be no further away than autocast"),
    Variant("accumulation", "", HALVES, micro_batches=2),
    Variant("clip", TIGHT, "what tight clipping changes, far more than what is between it and the lines below"),
    Variant("clip-autocast", f"trainer.precision=bf16-mixed {TIGHT}", "as autocast, clipped tightly", "clip"),
    Variant("clip-fast", f"{FAST} {TIGHT}", "as fast, clipped tightly", "clip"),
    Variant("clip-accumulation", TIGHT, "as accumulation, clipped tightly: compare the end", "clip", micro_batches=2),
]


class ValidateAtTheEnd(lightning.Callback):
    """Lightning does not validate where max_steps ends a run in the middle of an epoch, unless it is told to stop."""

    def on_train_batch_end(self, trainer: lightning.Trainer, *_: Any) -> None:
        trainer.should_stop = trainer.should_stop or trainer.global_step >= trainer.max_steps


@dataclass(frozen=True)
class Trajectory:
    losses: list[float]  # of each optimizer step
    end: dict[str, float]  # METRICS of the last validation


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="a feature store")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=1, help="trainings side by side")
    parser.add_argument("--gpus", nargs="+", help="numbers of GPUs, which the trainings take in turn")
    parser.add_argument("--skip", nargs="+", default=[], choices=[variant.name for variant in VARIANTS])
    parser.add_argument("overrides", nargs="*", help="of train.py, for every run")
    options = parser.parse_intermixed_args(arguments)
    if ours := keyed(options.overrides).keys() & keyed(f"{FIXED} {FAST} {TIGHT} {OWN}".split()).keys():
        parser.error(f"{', '.join(sorted(ours))}: this benchmark sets it, see --help and VARIANTS")
    variants = [variant for variant in VARIANTS if variant.name not in options.skip]
    if alone := [variant.name for variant in variants if variant.against in options.skip]:
        parser.error(f"--skip leaves nothing to hold {', '.join(alone)} against; skip them too")
    with initialize_config_dir(cli.CONF, version_base="1.3"):
        options.pack_tokens = compose("train", overrides=options.overrides).data.pack_tokens
    jobs = [(variant, seed) for variant in variants for seed in options.seeds]
    gpus = (options.gpus or [None]) * len(jobs)
    with ThreadPoolExecutor(options.jobs) as pool:
        trained = iter(list(pool.map(lambda job, gpu: train(job[0], job[1], gpu, options), jobs, gpus)))
    runs = {variant.name: [next(trained) for _ in options.seeds] for variant in variants}
    rows = [row(variant, runs[variant.name], runs[variant.against]) for variant in variants]
    on_gpu = torch.cuda.is_available() and "trainer=cpu" not in options.overrides
    facts = {"device": torch.cuda.get_device_name() if on_gpu else "CPU", "seeds": options.seeds, "rule": RULE}
    facts |= {"reference": PLAIN}
    write_result(options.out / "trajectories.json", {"rows": rows, **facts}, arguments)
    print(table(rows))


def keyed(overrides: list[str]) -> dict[str, str]:
    """The override of each key; the last one counts."""
    return {override.partition("=")[0]: override for override in overrides}


def settings(variant: Variant, seed: int, options: argparse.Namespace) -> list[str]:
    pack_tokens = options.pack_tokens // variant.micro_batches
    own = [f"data.path={options.data.resolve()}", f"data.pack_tokens={pack_tokens}", f"seed={seed}"]
    own += [f"trainer.max_steps={options.steps}", f"trainer.accumulate_grad_batches={variant.micro_batches}"]
    return list(keyed([*options.overrides, *f"{FIXED} {PLAIN} {variant.overrides}".split(), *own]).values())


def train(variant: Variant, seed: int, gpu: str | None, options: argparse.Namespace) -> Trajectory:
    directory = options.out.resolve() / "runs" / f"{variant.name}-{seed}"
    overrides, made_with = settings(variant, seed, options), directory / ".hydra" / "overrides.yaml"
    if made_with.exists() and OmegaConf.load(made_with) == overrides and (done := read(directory, options.steps)):
        return done
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'benchmarks'}:{os.environ.get('PYTHONPATH', '')}"}
    environment |= {} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}
    # Side by side, teams of threads would wait for one another's cores.
    environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // options.jobs)))
    print(f"{directory.name} {'' if gpu is None else f'on GPU {gpu}'}", flush=True)
    command = [sys.executable, "train.py", f"hydra.run.dir={directory}", *overrides]
    with (directory / "output.txt").open("w") as file:
        subprocess.run(command, cwd=ROOT, env=environment, stdout=file, stderr=file)
    return read(directory, options.steps) or sys.exit(f"{directory.name} failed; see {directory}/output.txt")


def read(directory: Path, steps: int) -> Trajectory | None:
    """None where metrics.csv is not that of a whole run."""
    path = directory / "metrics.csv"
    logged = list(csv.DictReader(path.read_text().splitlines())) if path.exists() else []
    losses = [float(line["train/loss"]) for line in logged if line.get("train/loss")]
    ends = [{name: float(line[name]) for name in METRICS} for line in logged if line.get(METRICS[0])]
    return Trajectory(losses, ends[-1]) if len(losses) == steps and ends else None


def row(variant: Variant, own: list[Trajectory], other: list[Trajectory]) -> dict[str, Any]:
    beside = other if own is not other else [*own[1:], own[0]]
    ends = {name: judged([each.end[name] for each in own], [each.end[name] for each in other]) for name in METRICS}
    return {**asdict(variant), "loss_difference": apart(own, beside), **ends}


def apart(own: list[Trajectory], beside: list[Trajectory]) -> dict[str, Any]:
    pairs = [zip(one.losses, other.losses, strict=True) for one, other in zip(own, beside, strict=True)]
    curves = [[abs(a - b) for a, b in pair] for pair in pairs]
    marks = [*(step for step in MARKS if step < len(curves[0])), len(curves[0])]
    at = {str(step): fmean(curve[step - 1] for curve in curves) for step in marks}
    return {"largest": max(map(max, curves)), "mean": fmean(map(fmean, curves)), "at": at}


def judged(values: list[float], reference: list[float]) -> dict[str, Any]:
    """See RULE; a single seed has no noise."""
    noise = stdev(reference) if len(reference) > 1 else None
    difference = fmean(values) - fmean(reference)
    within = None if noise is None else abs(difference) <= 2 * noise / len(reference) ** 0.5
    return {"of_seeds": values, "mean": fmean(values), "difference": difference, "noise": noise, "within": within}


def table(rows: list[dict[str, Any]]) -> str:
    at = [f"step {step}" for step in rows[0]["loss_difference"]["at"]]
    head = ["variant", "against", "loss differs by at most", "mean", *at]
    head += [part for name in METRICS for part in (name, "difference", "noise", "within")]
    lines = [f"| {' | '.join(head)} | what a difference means |", "|---" * (len(head) + 1) + "|"]
    for each in rows:
        loss = each["loss_difference"]
        cells = [f"{value:.2g}" for value in (loss["largest"], loss["mean"], *loss["at"].values())]
        for end in (each[name] for name in METRICS):
            noise = "-" if end["noise"] is None else f"{end['noise']:.4f}"
            verdict = {True: "yes", False: "no", None: "-"}[end["within"]]
            cells += [f"{end['mean']:.4f}", f"{end['difference']:+.4f}", noise, verdict]
        lines.append(f"| {each['name']} | {each['against']} | {' | '.join(cells)} | {each['means']} |")
    return "\n".join([*lines, "", RULE])


if __name__ == "__main__":
    main(sys.argv[1:])
