"""What makes a head accept more: a store for each way of answering, a training for each setting, held-out prompts.

python benchmarks/head_quality.py --target TARGET --prompts train.jsonl --held-out heldout.jsonl \
    --questions mt_bench.jsonl gsm8k.jsonl --out OUT [--jobs 10] [train.py overrides for every head]

Writes OUT/head_quality.json and prints the table of the README; the heads lie in OUT/heads. Held-out prompts and
questions are decoded at the end and decide nothing. Stores and heads that OUT holds already are taken as they are.
"""

import argparse
import itertools
import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eagle3 import run
from eagle3.storage import write_json

ROOT = Path(__file__).parent.parent
MAX_NEW_TOKENS = 96
PROMPTS = [
    "prompts/privacy=off",
    "prompts.duplicates.exact=false",
    "prompts.duplicates.near=false",
]  # every row, as the reference had
ANSWERS = ["responses.max_new_tokens=256", "responses.batch_size=4096", "responses.batch_tokens=4000000"]
WINDOW = ["responses.window=16384", "features.batch_tokens=65536"]
DECODED_ON = ["target.device=cpu"]  # small models wait for launches, not for products: trainings have the GPU alone
ONE_TURN = "prompts.length.max_turns=1"
STORES = {
    "sampled at 0.7": [ONE_TURN, "responses.temperature=0.7"],
    "layers 2, 6, 11": [ONE_TURN, "responses.temperature=0.7", "features.capture_layers=[2,6,11]"],
    "all rows": ["responses.temperature=0.7"],
    "greedy": [ONE_TURN, "responses.temperature=0"],
    "sampled at 1": [ONE_TURN, "responses.temperature=1"],
}
SAME_ANSWERS = {"layers 2, 6, 11": "sampled at 0.7"}


@dataclass(frozen=True)
class Head:
    """One line of the table: what it shows, its store, what differs from experiment=head_quality."""

    name: str
    store: str = "sampled at 0.7"
    overrides: list[str] = field(default_factory=list)


DECODING = ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 2))
PLAIN = ["model=eagle3", "model.intermediate_size=null"]
HEADS = [
    Head("recipe"),
    Head("recipe, seed 1", overrides=["seed=1"]),
    Head("recipe, seed 2", overrides=["seed=2"]),
    Head("EAGLE-3 without norms", overrides=PLAIN),
    Head("only the fed-back norm", overrides=[*PLAIN, "model.norm_output=true"]),
    Head(
        "EAGLE-3, settings of the reference",
        overrides=[*PLAIN, "optim.lr=1e-3", "optim.weight_decay=0", "data.pack_tokens=8192"],
    ),
    Head("lm_head not from the target", overrides=["model.lm_head_from_target=false"]),
    Head("batches of 8,192 tokens", overrides=["data.pack_tokens=8192"]),
    Head("layers 2, 6, 11 captured", store="layers 2, 6, 11"),
    Head("16 epochs", overrides=["trainer.max_epochs=16"]),
    Head("more data: all rows", store="all rows"),
    Head("greedy answers", store="greedy"),
    Head("answers sampled at T = 1", store="sampled at 1"),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--prompts", type=Path, required=True, help="training conversations")
    parser.add_argument("--held-out", type=Path, required=True)
    parser.add_argument("--questions", type=Path, nargs="*", default=[], help="benchmark questions")
    parser.add_argument("--reference", type=Path, help="another head, decoded beside ours")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=40, help="prompts decoded of each file")
    parser.add_argument("--jobs", type=int, default=1, help="heads at work side by side on each GPU")
    parser.add_argument("--gpus", nargs="+", default=[], help="numbers of GPUs to spread over; without it the first")
    parser.add_argument("--only", nargs="*", help="names of heads")
    parser.add_argument("overrides", nargs="*", help="for train.py, e.g. trainer=cpu")
    options = parser.parse_args()
    heads = [head for head in HEADS if not options.only or head.name in options.only]
    gpus = options.gpus or [None]
    with ThreadPoolExecutor(len(STORES)) as preparing, ThreadPoolExecutor(options.jobs * len(gpus)) as training:
        names = dict.fromkeys(SAME_ANSWERS.get(head.store, head.store) for head in heads)
        stores = {
            store: preparing.submit(prepare, store, gpu, options)
            for store, gpu in zip(names, itertools.cycle(gpus), strict=False)
        }
        stores |= {
            head.store: preparing.submit(prepare_like, head.store, stores[SAME_ANSWERS[head.store]], gpus[-1], options)
            for head in heads
            if head.store in SAME_ANSWERS
        }
        reference = [training.submit(decoded, options.reference, gpus[0], options)] if options.reference else []
        measured = [
            training.submit(measure, head, stores[head.store], gpu, options)
            for head, gpu in zip(heads, itertools.cycle(gpus), strict=False)
        ]
        rows = [{"name": "reference", "decoded": each.result()} for each in reference]
        rows += [each.result() for each in measured]
    write_json(options.out / "head_quality.json", {"heads": rows, "versions": run.provenance()})
    print(table(rows))


def measure(head: Head, store: Future[None], gpu: str | None, options: argparse.Namespace) -> dict[str, Any]:
    """A line of the table: trained as soon as its store is complete, then decoded."""
    store.result()
    facts = train(head, gpu, options)
    return facts | {"decoded": decoded(head_path(head, options), gpu, options)}


def decoded(head: Path, gpu: str | None, options: argparse.Namespace) -> dict[str, Any]:
    """Every set of prompts, side by side."""
    results = {
        f"{name} {steps}": DECODING.submit(decode, head, name, file, steps, gpu, options)
        for name, file, steps in tasks(options)
    }
    return {name: result.result() for name, result in results.items()}


def prepare(store: str, gpu: str | None, options: argparse.Namespace) -> None:
    """Prompts, answers and features; a finished store is up to date in seconds."""
    data = store_path(store, options)
    call(
        gpu, data / "log.txt", "precompute.py", f"target.path={options.target}", f"prompts.path={options.prompts}",
        f"out_dir={data}", *PROMPTS, *ANSWERS, *WINDOW, *STORES[store],
    )  # fmt: skip


def prepare_like(store: str, other: Future[None], gpu: str | None, options: argparse.Namespace) -> None:
    """Other features of the same answers."""
    other.result()
    for part in ("prompts", "responses"):
        source = store_path(SAME_ANSWERS[store], options) / part
        shutil.copytree(source, store_path(store, options) / part, dirs_exist_ok=True)
    prepare(store, gpu, options)


def train(head: Head, gpu: str | None, options: argparse.Namespace) -> dict[str, Any]:
    store, path = store_path(head.store, options), head_path(head, options)
    trained = options.out / "runs" / path.name
    overrides = [*head.overrides, *options.overrides]
    if not (path / "training.json").exists():
        call(
            gpu, trained.with_suffix(".txt"), "train.py", "experiment=head_quality", f"data.path={store}/features",
            f"hydra.run.dir={trained}", "callbacks.progress=null", *overrides,
        )  # fmt: skip
        call(
            gpu, trained.with_suffix(".export.txt"), "serve.py", "action=export", f"run={trained}", f"head={path}",
            f"target.path={options.target}", "target.dtype=float32",
        )  # fmt: skip
    facts = json.loads((path / "training.json").read_text())
    manifest = json.loads((store / "features" / "manifest.json").read_text())
    return {
        "name": head.name,
        "head": str(path),
        "store": head.store,
        "overrides": overrides,
        "answer_tokens": manifest["answer_tokens"],
        "simulated": facts["simulated_accept_length"],
        "head_config": facts["head_config"],
    }


def tasks(options: argparse.Namespace) -> list[tuple[str, Path, int]]:
    """Name and file of prompts, and the steps of the chain that decodes them."""
    held_out = [("held out", options.held_out, 3), ("held out", options.held_out, 7)]
    return [*held_out, *((file.stem, file, 3) for file in options.questions)]


def decode(
    head: Path, name: str, file: Path, steps: int, gpu: str | None, options: argparse.Namespace
) -> dict[str, Any]:
    """Greedily and in float32, so that lossless means equal to the last token."""
    log = options.out / "decoded" / f"{head.name}-{name.replace(' ', '_')}-{steps}.txt"
    if not log.exists() or not log.stat().st_size:  # it prints at its end
        call(
            gpu, log, "serve.py", "action=decode", f"head={head}", f"target.path={options.target}",
            "target.dtype=float32", f"prompts.path={file}", f"limit={options.limit}", f"steps={steps}",
            f"max_new_tokens={MAX_NEW_TOKENS}", *DECODED_ON,
        )  # fmt: skip
    return json.loads(log.read_text().splitlines()[-1])


def call(gpu: str | None, log: Path, *command: str) -> None:
    """A command of this project, its output in a file that ends with what it prints."""
    environment = os.environ | ({} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu})
    log.parent.mkdir(parents=True, exist_ok=True)
    print("$ python", *command, flush=True)
    with log.open("w") as file, log.with_suffix(".err").open("w") as errors:
        status = subprocess.run(
            [sys.executable, *command], cwd=ROOT, env=environment, stdout=file, stderr=errors
        ).returncode
    if status:
        sys.exit(f"python {' '.join(command)} ended with {status}; see {log.with_suffix('.err')}")


def store_path(store: str, options: argparse.Namespace) -> Path:
    return options.out / "stores" / store.replace(", ", "_").replace(" ", "_")


def head_path(head: Head, options: argparse.Namespace) -> Path:
    return options.out / "heads" / "".join(letter if letter.isalnum() else "_" for letter in head.name)


def table(heads: list[dict[str, Any]]) -> str:
    columns = list(heads[0]["decoded"])
    lines = [f"| head | answer tokens | simulated 3 / 7 | {' | '.join(columns)} |", "|---" * (3 + len(columns)) + "|"]
    for head in heads:
        simulated = (
            " / ".join(f"{head['simulated'][steps]:.3f}" for steps in ("3", "7")) if "simulated" in head else "-"
        )
        values = " | ".join(f"{head['decoded'][column]['accept_length']:.3f}" for column in columns)
        lines.append(f"| {head['name']} | {head.get('answer_tokens', '-')} | {simulated} | {values} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
