"""SpecForge's training and ours on one machine: the rate of a step, or the GPU-seconds until heads accept as much.

The rate of a step is also that of speculators, where that package is installed.

    git -C SPECFORGE archive HEAD specforge | tar x -C TREE && git -C SPECFORGE rev-parse HEAD > TREE/COMMIT
    python benchmarks/peers/race.py --specforge TREE --folder DIR --out benchmarks/results/race.json # times steps
    python benchmarks/peers/race.py --specforge TREE --folder DIR --out benchmarks/results/race_heads.json \\
        --store STORE --target TARGET --held-out FILE # trains heads
    python benchmarks/peers/race.py --specforge TREE --folder DIR --out /tmp/race.json --small # also on the CPU

The step: forward, backward, clipping and optimizer on documents of random numbers, with a head of Llama-3.1-8B's shape,
K = 7, D = 32,000, and on one batch of SpecForge's published shape, whose target has V = 32,000. Tokens are those of the
documents. SpecForge runs in each layout (race_specforge.py), the fastest counts. It trains the lm_head, with AdamW;
speculators keeps it fixed and takes Muon, as train.py does by default. Ours runs both ways.

The heads: EAGLE-3 of one shape and draft vocabulary, on the same samples in the same packs and order, each by its own
recipe: SpecForge's optimizer with each of --lr, ours that of train.py's defaults. GPU-seconds are those of the steps.
The heads of each epoch, or of --epochs, decode the held-out prompts; the goal is what the best SpecForge head accepts
at its end.

Both train K steps against the teacher's probabilities on the draft vocabulary, SpecForge's weighted by 0.8^k, ours by
the recipe's loss.decay. What else differs: SpecForge's weights are bf16 over float32 masters, its lm_head starts at
random, its loss is a mean over all rows, and it trains row t at step k where x_{t+k} is an answer token: not the last
prompt token's row, with which serving starts.

Each contestant runs in a process of its own, whose result and log are in DIR; a result that exists is not made again.
A contestant that fails is left out of the table of steps; with --store it ends the script, after the other trainings.
"""

import argparse
import json
import logging
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
from contestant import PLAIN_HEAD, TRAINED, WARM_UP, Contestant, planned, trained
from random_head import LLAMA_8B, SMALL, RandomSamples, random_head, whole_step
from result import ROOT, write_result
from step_cost import timed
from torch import nn
from train_step import Step, device, on_gpu, random_step, training_run, without_overflow
from training_ways import compared, file_name

from eagle3.commands.train import build_training
from eagle3.features.sample import Sample
from eagle3.head.batch import TttBatch
from eagle3.head.draft_head import HeadConfig
from eagle3.head_files.format import save_head
from eagle3.settings.training import TrainRun
from eagle3.storage.files import read_json, write_json

REPEATS = 20
BATCHES = {  # lengths of documents, share of answers
    "[128, 256, 512, 2048], a quarter prompt": ([128, 256, 512, 2048], 0.75),
    "1 x 4,096": ([4096], 1.0),
    "1 x 16,384": ([16384], 1.0),
}
SMALL_BATCHES = {"[12, 24, 48], a quarter prompt": ([12, 24, 48], 0.75), "1 x 64": ([64], 1.0)}
LAYOUTS = {  # of SpecForge
    "joined": {"layout": "joined", "compact_teacher": False},
    "joined, compact teacher": {"layout": "joined", "compact_teacher": True},
    "padded": {"layout": "padded", "compact_teacher": False},
    "alone": {"layout": "alone", "compact_teacher": False},
}
FP8 = "kernels.fp8=true"
LIKE_SPECFORGE = [TRAINED, "optim=adamw"]
OURS = {"bf16, as SpecForge": LIKE_SPECFORGE, "fp8, as SpecForge": [*LIKE_SPECFORGE, FP8], "bf16": [], "fp8": [FP8]}
LIKE_PEER = {  # ways that train the same parameters with the same kind of optimizer
    "SpecForge": ["bf16, as SpecForge", "fp8, as SpecForge"],
    "speculators": ["bf16", "fp8"],
}
PUBLISHED_VOCAB = 32000  # V of SpecForge's own measurement
LAYERS = [2, 16, 29]  # of a head of random numbers
GOAL = "all, chain of 7, greedy"


class Ours:
    """What HeadTraining computes and its optimizer, without Lightning around them."""

    def __init__(self, step: Step, clip: float, *, total_steps: int, capture_layers: list[int]) -> None:
        self.compute, self.clip, self.capture_layers = step, clip, capture_layers
        self.head = step.module.head
        self.optimizer, self.schedule = step.module.optim.build(
            self.head, total_steps, by_graph=step.module.kernels.cuda_graphs
        )

    def batch(self, samples: list[Sample]) -> TttBatch:
        return whole_step(samples, self.compute.module.ttt_steps).to(device())

    def step(self, batch: TttBatch) -> None:
        self.compute(batch)
        nn.utils.clip_grad_norm_(self.head.parameters(), self.clip)
        self.optimizer.step()
        self.schedule.step()

    def save(self, folder: Path) -> None:
        save_head(folder, self.head, self.capture_layers, "bfloat16")


def main(arguments: list[str]) -> None:
    if arguments[:1] == ["--worker"]:
        given = json.loads(arguments[1])
        logging.basicConfig(level=logging.INFO, format="%(message)s")  # which kernels were chosen, and why
        write_json(Path(given["out"]), {"curve": train(given)} if "heads" in given else time_steps(given))
        return
    options = parsed(arguments)
    result: dict[str, Any] = {"specforge": (options.specforge / "COMMIT").read_text().strip()}
    result |= {"heads": heads(options)} if options.store else {"steps": steps(options)}
    write_result(options.out, result, arguments)
    print(json.dumps(result, indent=1))


def parsed(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--specforge", type=Path, required=True, help="its tree, and COMMIT in it")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--small", action="store_true", help="steps of tiny sizes, also on the CPU: does it run?")
    parser.add_argument("--store", type=Path, help="features of TARGET: train heads on them instead of timing steps")
    parser.add_argument("--target", type=Path, help="needed by --store")
    parser.add_argument("--held-out", type=Path, help="prompts that the heads decode, needed by --store")
    parser.add_argument("--limit", type=int, default=400, help="number of these prompts")
    parser.add_argument("--lr", type=float, nargs="+", default=[1e-4, 1e-3], help="of SpecForge")
    parser.add_argument("--epochs", type=int, nargs="+", help="whose heads decode the prompts; none: all")
    parser.add_argument("overrides", nargs="*", help="of train.py for every head: trainer.max_epochs=2, experiment=…")
    options = parser.parse_intermixed_args(arguments)
    if options.store and not (options.target and options.held_out):
        parser.error("--store needs --target and --held-out")
    options.folder.mkdir(parents=True, exist_ok=True)
    options.samplings = "[{temperature: 0}]"  # of `compared`
    return options


# --- the step --------------------------------------------------------------------------------------------------------


def steps(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return for each batch what every contestant needs, and how many times the others' rate ours are."""
    batches = SMALL_BATCHES if options.small else BATCHES
    several = [name for name, (lengths, _) in batches.items() if len(lengths) > 1]
    ways: dict[str, dict[str, Any]] = {}
    for way, overrides in OURS.items():
        ways[way] = {"batches": list(batches), "overrides": overrides}
    for way, layout in LAYOUTS.items():
        ways[f"SpecForge, {way}"] = {"batches": list(batches) if layout["layout"] == "joined" else several, **layout}
    if find_spec("speculators"):
        ways["speculators"] = {"batches": list(batches), "layout": "speculators"}
    if not on_gpu():  # neither runs there
        ways = {way: own for way, own in ways.items() if "fp8" not in way and own.get("layout") != "joined"}
    rows = [*compared_rates(options, ways, list(batches), None)]
    if on_gpu() and not options.small:
        joined = [way for way, own in ways.items() if own.get("layout") == "joined"]  # as its own measurement
        published = {way: {**ways[way], "batches": several} for way in [*LIKE_PEER["SpecForge"], *joined]}
        rows += compared_rates(options, published, several, PUBLISHED_VOCAB)
    return rows


def compared_rates(
    options: argparse.Namespace, ways: dict[str, dict[str, Any]], batches: list[str], vocab: int | None
) -> Iterator[dict[str, Any]]:
    """Time all ways with the vocabulary of a target (None: Llama-3.1-8B's); a row for each batch."""
    found = {}
    for way, own in ways.items():
        name = f"step {way}" if vocab is None else f"step {way}, V {vocab}"
        found[way] = worked(options, name, {**own, "small": options.small, "vocab": vocab}) or {}
    target_vocab = vocab or (SMALL if options.small else LLAMA_8B).vocab_size
    for batch in batches:
        costs = {way: found[way][batch] for way in ways if found[way].get(batch)}
        yield {"batch": batch, "target_vocab": target_vocab, "costs": costs, "over": over_peers(costs)}


def over_peers(costs: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return our rates as multiples of each peer's fastest."""
    rates = {way: cost["tokens_per_s"] for way, cost in costs.items()}
    over: dict[str, dict[str, float]] = {}
    for peer, ours in LIKE_PEER.items():
        theirs = [rate for way, rate in rates.items() if way.startswith(peer)]
        over[peer] = {way: rates[way] / max(theirs) for way in ours if theirs and way in rates}
    return over


def time_steps(given: dict[str, Any]) -> dict[str, Any]:
    """Return what one contestant needs for each batch; nothing where it does not fit into the GPU's memory."""
    run = training_run(given.get("overrides", []))
    torch.set_float32_matmul_precision(run.matmul_precision)
    shape = SMALL if given["small"] else replace(LLAMA_8B, vocab_size=given["vocab"] or LLAMA_8B.vocab_size)
    contestant = of_random_numbers(given, run, shape)
    batches = SMALL_BATCHES if given["small"] else BATCHES
    costs = {name: partial(step_cost, contestant, shape, *batches[name]) for name in given["batches"]}
    return {name: without_overflow(cost) for name, cost in costs.items()}


def of_random_numbers(given: dict[str, Any], run: TrainRun, shape: HeadConfig) -> Contestant:
    total = 1000  # steps of a schedule that ends after what is timed
    if "layout" not in given:
        clip = run.trainer.keys["gradient_clip_val"]
        return Ours(random_step(shape, run), clip, total_steps=total, capture_layers=LAYERS)
    if given["layout"] == "speculators":
        from race_speculators import of_random_target

        return of_random_target(random_head(shape), LAYERS, run, total)
    from race_specforge import SpecForge

    target = torch.randn(shape.vocab_size, shape.hidden_size, dtype=torch.bfloat16, device=device())
    target[shape.draft_vocab_size :] /= 2  # no teacher's first choice: otherwise most rows have no loss
    return SpecForge(
        random_head(shape), target, target, capture_layers=LAYERS, ttt_steps=run.ttt_steps, total_steps=total,
        lr=1e-4, layout=given["layout"], compact_teacher=given["compact_teacher"], row_tokens=None, device=device(),
    )  # fmt: skip


def step_cost(contestant: Contestant, shape: HeadConfig, lengths: list[int], answer_share: float) -> dict[str, Any]:
    """Return the median step, the rate in documents' tokens, and the memory."""
    torch._dynamo.reset()  # what has seen one size is compiled for all when it sees another, and is slower then
    batch = contestant.batch(RandomSamples(shape, torch.bfloat16, seed=0).documents(lengths, answer_share))
    for _ in range(WARM_UP):
        contestant.step(batch)
    if on_gpu():
        torch.cuda.reset_peak_memory_stats()
    seconds = [timed(partial(contestant.step, batch), 1, device()) for _ in range(REPEATS if on_gpu() else 2)]
    median = statistics.median(seconds)
    return {
        "step_ms": 1000 * median,
        "slowest_ms": 1000 * max(seconds),
        "tokens_per_s": sum(lengths) / median,
        "peak_gb": torch.cuda.max_memory_allocated() / 1e9 if on_gpu() else None,
    }


# --- the heads -------------------------------------------------------------------------------------------------------


def heads(options: argparse.Namespace) -> dict[str, Any]:
    """Train and decode all; return the curves, and the GPU-seconds to what the best SpecForge head accepts."""
    overrides = [*PLAIN_HEAD, f"data.path={options.store.resolve()}", *options.overrides]
    require_epochs(options.epochs, overrides)
    given = {"heads": str((options.folder / "heads").resolve()), "epochs": options.epochs, "overrides": overrides}
    runs = {f"SpecForge, lr {lr:g}": {**given, "lr": lr} for lr in options.lr} | {"ours, recipe": given}
    found = {name: worked(options, name, {**run, "name": file_name(name)}) for name, run in runs.items()}
    if not all(found.values()):
        sys.exit("not all heads were trained")
    curves = {name: each["curve"] for name, each in found.items()}
    folders = {f"{name}, {point['head']}": Path(point["head"]) for name, curve in curves.items() for point in curve}
    options.target, options.held_out = options.target.resolve(), options.held_out.resolve()
    chains = compared((options.folder / "compared").resolve(), folders, options.held_out, options)
    of_all = [chain for chain in chains if chain.startswith("all,")]
    for name, curve in curves.items():
        for point in curve:
            way = f"{name}, {point['head']}"
            point["accept_length"] = {chain: chains[chain][way]["accept_length"] for chain in of_all}
            point["head"] = Path(point["head"]).name
    return {"curves": curves, **seconds_to_the_same(curves, GOAL)}


def require_epochs(wanted: list[int] | None, overrides: list[str]) -> None:
    """Exit if a run would end without a head to decode."""
    last = training_run(["run_dir=.", *overrides]).trainer.keys["max_epochs"]
    if wanted and not any(1 <= epoch <= last for epoch in wanted):
        sys.exit(f"--epochs={wanted} names no epoch of trainer.max_epochs={last}; give 1 to {last}")


def seconds_to_the_same(curves: dict[str, list[dict[str, Any]]], chain: str) -> dict[str, Any]:
    """Return what the best SpecForge head accepts at its end, and the seconds of every run until then, if ever."""
    theirs = [curve for name, curve in curves.items() if name.startswith("SpecForge")]
    goal = max(curve[-1]["accept_length"][chain] for curve in theirs)
    taken = {
        name: next((point["seconds"] for point in curve if point["accept_length"][chain] >= goal), None)
        for name, curve in curves.items()
    }
    reached = {name: seconds for name, seconds in taken.items() if seconds is not None}
    first = min(seconds for name, seconds in reached.items() if name.startswith("SpecForge"))
    shares = {name: seconds / first for name, seconds in reached.items()}
    return {"chain": chain, "accept_length": goal, "seconds_until": taken, "share_of_specforge": shares}


def train(given: dict[str, Any]) -> list[dict[str, Any]]:
    """Train a head, save it after the given epochs, and return the seconds that its steps took up to there."""
    torch.set_num_threads(1)  # packs are made of small tensors, on which a team of threads waits for itself
    run = training_run(["run_dir=.", *given["overrides"]])
    torch.set_float32_matmul_precision(run.matmul_precision)
    data, _ = build_training(run)
    plans = planned(data, run)
    make = maker(run, given.get("lr"), sum(map(len, plans)))
    return list(trained(make, data, plans, given["epochs"], f"{given['heads']}/{given['name']}"))


def maker(run: TrainRun, lr: float | None, total_steps: int) -> Callable[[], Contestant]:
    """Return what makes a fresh contestant: SpecForge with its learning rate, without one ours."""

    def make() -> Contestant:
        torch.manual_seed(run.seed)
        data, module = build_training(run)
        layers = data.source.made_from.capture_layers
        if lr is None:
            clip = run.trainer.keys["gradient_clip_val"]
            return Ours(Step(module, run), clip, total_steps=total_steps, capture_layers=layers)
        from race_specforge import SpecForge

        return SpecForge(
            module.head, *data.source.target_weights(), capture_layers=layers, ttt_steps=run.ttt_steps,
            total_steps=total_steps, lr=lr, layout="joined" if on_gpu() else "alone", compact_teacher=False,
            row_tokens=data.settings.pack_tokens, device=device(),
        )  # fmt: skip

    return make


# --- both ------------------------------------------------------------------------------------------------------------


def worked(options: argparse.Namespace, name: str, given: dict[str, Any]) -> Any:
    """Return what a contestant's process found, or None where it ended with an error."""
    out = options.folder / f"{file_name(name)}.json"
    if not out.exists():
        of_specforge = [str(options.specforge.resolve())] if {"layout", "lr"} & set(given) else []
        paths = [*of_specforge, str(ROOT), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")]
        command = [sys.executable, __file__, "--worker", json.dumps({**given, "out": str(out.resolve())})]
        print("$", *command[1:], flush=True)
        # Without a GPU nothing is compiled: it is only asked whether it runs.
        quick = {} if on_gpu() else {"TORCHDYNAMO_DISABLE": "1"}
        with out.with_suffix(".log").open("wb") as log:
            subprocess.run(
                command, env={**os.environ, **quick, "PYTHONPATH": os.pathsep.join(filter(None, paths))}, stdout=log,
                stderr=subprocess.STDOUT,
            )  # fmt: skip
    if not out.exists():
        print(f"failed, see {out.with_suffix('.log')}", flush=True)
        return None
    return read_json(out, made_by="race.py")


if __name__ == "__main__":
    main(sys.argv[1:])
