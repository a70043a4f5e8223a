"""Other trainers and ours on one machine: the rate of a step, or heads on the same features and what they accept.

The trainers are SpecForge and, where that package is installed, speculators 0.9.

    git -C SPECFORGE archive HEAD specforge | tar x -C TREE && git -C SPECFORGE rev-parse HEAD > TREE/COMMIT
    python benchmarks/peers/race.py --specforge TREE --folder DIR --out benchmarks/results/race.json # times steps
    python benchmarks/peers/race.py --specforge TREE --folder DIR --out FILE --heads benchmarks/peers/heads.yaml \\
        --store STORE --target TARGET --held-out FILE ... # trains heads
    python benchmarks/peers/race.py --specforge TREE --folder DIR --out /tmp/race.json --small # also on the CPU

The step: forward, backward, clipping and optimizer on documents of random numbers, with a head of Llama-3.1-8B's shape,
K = 7, D = 32,000, and on one batch of SpecForge's published shape, whose target has V = 32,000. Tokens are those of the
documents. SpecForge runs in each layout (race_specforge.py), the fastest counts. It trains the lm_head, with AdamW;
speculators keeps it fixed and takes Muon, as train.py does by default. Ours runs both ways.

The heads: those of a YAML file, in groups. Samples, answers and order are the same for all, and each has the optimizer,
schedule and loss of its trainer. Each head decodes the held-out prompts (`serve.py action=compare`) and is compared
with the first of its group. `seconds` are those of the steps; with --at-once they include the other trainings' work.

What differs from ours: SpecForge's weights are bf16 over float32 masters, its lm_head starts at random, and it trains
row t at step k where x_{t+k} is an answer token: not the last prompt token's row, with which serving starts
(`first_chain: true` adds that row). What differs in speculators: race_speculators.py.

Each contestant runs in a process of its own, whose result and log are in DIR; a result that exists is not made again.
A contestant that fails is left out, and named.
"""

import argparse
import json
import logging
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import yaml
from contestant import TRAINED, WARM_UP, Contestant, planned, trained
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

SHAPES = "[{steps: 3, topk: 1, draft_tokens: null}, {steps: 7, topk: 1, draft_tokens: null}]"
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
        write_json(Path(given["out"]), train(given) if "trainer" in given else time_steps(given))
        return
    options = parsed(arguments)
    result: dict[str, Any] = {"specforge": (options.specforge / "COMMIT").read_text().strip()}
    result |= heads(options) if options.heads else {"steps": steps(options)}
    write_result(options.out, result, arguments)
    print(json.dumps(result, indent=1))


def parsed(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--specforge", type=Path, required=True, help="its tree, and COMMIT in it")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--small", action="store_true", help="steps of tiny sizes, also on the CPU: does it run?")
    parser.add_argument("--heads", type=Path, help="YAML of heads: train these instead of timing steps")
    parser.add_argument("--store", type=Path, help="features of TARGET, needed by --heads")
    parser.add_argument("--target", type=Path, help="needed by --heads")
    parser.add_argument("--held-out", type=Path, nargs="+", default=[], help="prompts that the heads decode")
    parser.add_argument("--limit", type=int, default=400, help="number of prompts of each file")
    parser.add_argument("--at-once", type=int, default=1, help="trainings, and then comparisons, at the same time")
    parser.add_argument("--overrides", nargs="*", default=[], help="of train.py for every head: trainer.max_epochs=2")
    options = parser.parse_args(arguments)
    if options.heads and not (options.store and options.target):
        parser.error("--heads needs --store and --target")
    options.folder.mkdir(parents=True, exist_ok=True)
    options.samplings, options.shapes = "[{temperature: 0}]", SHAPES
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
    """Train and decode all; return each head's training and what it accepts."""
    ways = yaml.safe_load(options.heads.read_text())
    options.target = options.target.resolve()
    wanted = {
        f"{title}, {name}, lr {lr:g}": {**way, "lr": lr, "group": title}
        for title, group in ways["groups"].items()
        for name, way in group.items()
        for lr in way["lr"]
    }

    def training(name: str) -> Any:
        overrides = [f"data.path={options.store.resolve()}", *ways["train"], *options.overrides]
        head = (options.folder / "heads" / file_name(name)).resolve()
        given = {"head": str(head), "target": str(options.target)}
        return worked(options, name, {**wanted[name], **given, "overrides": [*overrides, *wanted[name]["overrides"]]})

    with ThreadPoolExecutor(options.at_once) as pool:
        found = {name: done for name, done in zip(wanted, pool.map(training, wanted), strict=True) if done}
        groups = {title: [name for name in found if wanted[name]["group"] == title] for title in ways["groups"]}
        pairs = [(title, file) for title, names in groups.items() if names for file in options.held_out]
        rows = pool.map(lambda pair: decoded(options, pair[0], groups[pair[0]], found, pair[1]), pairs)
        accepted = {f"{title}, {file.stem}": row for (title, file), row in zip(pairs, rows, strict=True)}
    return {"failed": [*(wanted.keys() - found)], "ways": ways, "trainings": found, "accepted": accepted}


def decoded(
    options: argparse.Namespace, group: str, names: list[str], found: dict[str, Any], held_out: Path
) -> dict[str, Any]:
    """Return what the heads of a group accept on all prompts of a file, and the differences from the first."""
    folders = {name: Path(found[name]["head"]) for name in names}
    run = (options.folder / "compared" / file_name(f"{group} {held_out.stem}")).resolve()
    chains = compared(run, folders, held_out.resolve(), options)
    return {chain.removeprefix("all, "): row for chain, row in chains.items() if chain.startswith("all, ")}


def train(given: dict[str, Any]) -> dict[str, Any]:
    """Train a head, save it after the last epoch, and return the seconds of its steps."""
    torch.set_num_threads(1)  # packs are made of small tensors, on which a team of threads waits for itself
    rate = [f"optim.lr={given['lr']}"] if given["trainer"] == "ours" else []
    run = training_run([*given["overrides"], *rate])
    torch.set_float32_matmul_precision(run.matmul_precision)
    data, _ = build_training(run)
    plans = planned(data, run, alone=given.get("layout") == "alone")
    return trained(maker(run, given, sum(map(len, plans))), data, plans, Path(given["head"]))


def maker(run: TrainRun, given: dict[str, Any], total_steps: int) -> Callable[[], Contestant]:
    """Return what makes a fresh contestant."""
    compiled: list[Any] = []

    def make() -> Contestant:
        torch.manual_seed(run.seed)
        data, module = build_training(run)
        layers = data.source.made_from.capture_layers
        if given["trainer"] == "ours":
            clip = run.trainer.keys["gradient_clip_val"]
            return Ours(Step(module, run), clip, total_steps=total_steps, capture_layers=layers)
        longest = max(data.settings.pack_tokens, int(data.train_samples.tokens.max()))
        if given["trainer"] == "speculators":
            from race_speculators import Speculators, build_train_config, prepare_compiler

            if not compiled:  # its next model would be compiled again
                prepare_compiler()
                settings = build_train_config(given["lr"], run, defaults=given.get("defaults", False))
                target = Path(given["target"])
                sizes = {"row_tokens": longest, "total_steps": total_steps}
                compiled.append(Speculators(module.head, target, layers, settings, **sizes))
            compiled[0].begin()
            return compiled[0]
        from race_specforge import SpecForge

        layout = given["layout"] if on_gpu() else "alone"  # its attention to several documents needs one
        return SpecForge(
            module.head, *data.source.target_weights(), capture_layers=layers, ttt_steps=run.ttt_steps,
            total_steps=total_steps, lr=given["lr"], layout=layout, compact_teacher=False, row_tokens=longest,
            device=device(), first_chain=given.get("first_chain", False),
        )  # fmt: skip

    return make


# --- both ------------------------------------------------------------------------------------------------------------


def worked(options: argparse.Namespace, name: str, given: dict[str, Any]) -> Any:
    """Return what a contestant's process found, or None where it ended with an error."""
    out = options.folder / f"{file_name(name)}.json"
    if not out.exists():
        places = map(str, [options.specforge.resolve(), ROOT, ROOT / "benchmarks", os.environ.get("PYTHONPATH", "")])
        command = [sys.executable, __file__, "--worker", json.dumps({**given, "out": str(out.resolve())})]
        print("$", *command[1:], flush=True)
        # Without a GPU nothing is compiled: it is only asked whether it runs.
        quick = {} if on_gpu() else {"TORCHDYNAMO_DISABLE": "1"}
        with out.with_suffix(".log").open("wb") as log:
            subprocess.run(
                command, env={**os.environ, **quick, "PYTHONPATH": os.pathsep.join(filter(None, places))}, stdout=log,
                stderr=subprocess.STDOUT,
            )  # fmt: skip
    if not out.exists():
        print(f"failed, see {out.with_suffix('.log')}", flush=True)
        return None
    return read_json(out, made_by="race.py")


if __name__ == "__main__":
    main(sys.argv[1:])
