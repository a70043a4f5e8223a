"""What makes a head accept more: a store for each way of answering, a training for each setting, held-out prompts.

python benchmarks/head_quality.py --target TARGET --prompts train.jsonl --held-out heldout.jsonl \
    --questions mt_bench.jsonl gsm8k.jsonl --out OUT [--jobs 10] [train.py overrides for every head]

Writes OUT/head_quality.json, of which docs/results/head-quality.md has the table; the heads lie in OUT/heads. Held-out
prompts and questions are decoded at the end and decide nothing. Stores, heads and decoded files that OUT holds already
are taken as they are; a head of which OUT/rows has the training needs no store, so that another machine can decode:
--no-decoding there, then OUT/heads and OUT/rows copied, then the same command without it.
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

from result import write_result

from eagle3 import cli
from eagle3.features.joined import open_source
from eagle3.storage.files import read_json, write_json

ROOT = Path(__file__).parent.parent
MAX_NEW_TOKENS = 96
PROMPTS = [
    "prompts/privacy=off",
    "prompts.duplicates.exact=false",
    "prompts.duplicates.near=false",
]  # every row, as the reference had
# Several stores share a GPU: with batches of four times as many tokens some ran out of memory.
ANSWERS = ["responses.max_new_tokens=256", "answers.batch_size=2048", "answers.batch_tokens=1000000"]
WINDOW = ["answers.window=16384", "features.batch_tokens=65536"]
# Small models wait for launches, not for products: trainings have the GPU alone, and cores before decodings.
DECODED_ON = ["target.device=cpu"]
ONE_TURN = "prompts.length.max_turns=1"
ANSWERED = ["sampled at 0.7", *(f"sampled at 0.7, seed {seed}" for seed in range(1, 8))]
STORES = {
    **{name: [ONE_TURN, "responses.temperature=0.7", f"responses.seed={i}"] for i, name in enumerate(ANSWERED)},
    "layers 2, 6, 11": [ONE_TURN, "responses.temperature=0.7", "features.capture_layers=[2,6,11]"],
    "all rows": ["responses.temperature=0.7"],
    "greedy": [ONE_TURN, "responses.temperature=0"],
    "sampled at 1": [ONE_TURN, "responses.temperature=1"],
}
SAME_ANSWERS = {"layers 2, 6, 11": "sampled at 0.7"}


@dataclass(frozen=True)
class Head:
    """One line of the table: what it shows, its stores, what differs from experiment=head_quality."""

    name: str
    overrides: list[str] = field(default_factory=list)
    stores: list[str] = field(default_factory=lambda: ANSWERED[:1])

    @property
    def file_name(self) -> str:
        return "".join(letter if letter.isalnum() else "_" for letter in self.name)


DECODING = ThreadPoolExecutor(os.cpu_count())
PLAIN = ["model=eagle3", "model.intermediate_size=null"]
WIDE_ATTENTION = ["model.num_kv_heads=6", "model.intermediate_size=672"]  # no more parameters than without
FLOAT8 = ["kernels.fp8=true", "model.intermediate_size=1008"]  # sizes in sixteens
ONE_EPOCH = ["trainer.max_epochs=1"]
LESS_DECAY = [*ONE_EPOCH, "optim.weight_decay=0.1"]
EIGHT_ANSWERS = "8 answers to each prompt, 1 epoch"
HEADS = [  # the slowest first
    Head("more data: all rows", stores=["all rows"]),
    Head("16 epochs", ["trainer.max_epochs=16"]),
    Head("recipe"),
    Head("recipe, seed 1", ["seed=1"]),
    Head("recipe, seed 2", ["seed=2"]),
    Head(EIGHT_ANSWERS, ONE_EPOCH, stores=ANSWERED),
    Head(f"{EIGHT_ANSWERS}, seed 1", [*ONE_EPOCH, "seed=1"], stores=ANSWERED),
    Head(f"{EIGHT_ANSWERS}, seed 2", [*ONE_EPOCH, "seed=2"], stores=ANSWERED),
    Head(f"{EIGHT_ANSWERS}, one of them greedy", ONE_EPOCH, stores=[*ANSWERED[:7], "greedy"]),
    Head(f"{EIGHT_ANSWERS}, weight decay 0.1", LESS_DECAY, stores=ANSWERED),
    Head(f"{EIGHT_ANSWERS}, weight decay 0.1, Muon", [*LESS_DECAY, "optim=muon"], stores=ANSWERED),
    Head("2 answers to each prompt, 4 epochs", ["trainer.max_epochs=4"], stores=ANSWERED[:2]),
    Head("greedy answers", ["data.val_fraction=0.15"], stores=["greedy"]),  # longer: as many tokens of fewer prompts
    Head("answers sampled at T = 1", stores=["sampled at 1"]),
    Head("EAGLE-3 without norms", PLAIN),
    Head(
        "EAGLE-3, settings of the reference",
        [*PLAIN, "optim.lr=1e-3", "optim.weight_decay=0", "data.pack_tokens=8192"],
    ),
    Head("lm_head not from the target", ["model.lm_head_from_target=false"]),
    Head("layers 2, 6, 11 captured", stores=["layers 2, 6, 11"]),
    Head("float8 products", FLOAT8),
    Head("batches of 8,192 tokens", ["data.pack_tokens=8192"]),
    Head("6 key/value heads, narrower MLP", WIDE_ATTENTION),
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
    parser.add_argument("--no-decoding", action="store_true", help="heads alone")
    parser.add_argument("overrides", nargs="*", help="for train.py, e.g. trainer=cpu")
    options = parser.parse_args()
    heads = [head for head in HEADS if not options.only or head.name in options.only]
    gpus = options.gpus or [None]
    with ThreadPoolExecutor(len(STORES)) as preparing, ThreadPoolExecutor(options.jobs * len(gpus)) as training:
        untrained = [head for head in heads if not row_path(head, options).exists()]
        needed = dict.fromkeys(store for head in untrained for store in head.stores)
        names = dict.fromkeys(SAME_ANSWERS.get(store, store) for store in needed)
        stores = {
            store: preparing.submit(prepare, store, gpu, options)
            for store, gpu in zip(names, itertools.cycle(gpus), strict=False)
        }
        stores |= {
            store: preparing.submit(prepare_like, store, stores[SAME_ANSWERS[store]], gpus[-1], options)
            for store in needed
            if store in SAME_ANSWERS
        }
        others = [options.reference] if options.reference and not options.no_decoding else []
        reference = [training.submit(decoded, other, gpus[0], options) for other in others]
        measured = [
            training.submit(measure, head, stores, gpu, options)
            for head, gpu in zip(heads, itertools.cycle(gpus), strict=False)
        ]
        rows = [{"name": "reference", "decoded": each.result()} for each in reference]
        rows += [each.result() for each in measured]
    if not options.no_decoding:
        write_result(options.out / "head_quality.json", {"heads": rows})
        print(table(rows))


def measure(
    head: Head, stores: dict[str, Future[None]], gpu: str | None, options: argparse.Namespace
) -> dict[str, Any]:
    """A line of the table: trained as soon as its stores are complete, then decoded."""
    path = row_path(head, options)
    if not path.exists():
        for store in head.stores:
            stores[store].result()
        write_json(path, train(head, gpu, options))
    row = read_json(path, made_by="benchmarks/head_quality.py")
    return row if options.no_decoding else row | {"decoded": decoded(head_path(head, options), gpu, options)}


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
    errors = read_json(data / "responses" / "manifest.json", made_by="precompute.py")["errors"]
    if lacking := [reason for reason in errors if not reason.startswith("the prompt is longer")]:
        sys.exit(f"{data} lacks answers ({', '.join(lacking)}), so heads could not be compared; run again")


def prepare_like(store: str, other: Future[None], gpu: str | None, options: argparse.Namespace) -> None:
    """Other features of the same answers."""
    other.result()
    for part in ("prompts", "responses"):
        source = store_path(SAME_ANSWERS[store], options) / part
        shutil.copytree(source, store_path(store, options) / part, dirs_exist_ok=True)
    prepare(store, gpu, options)


def train(head: Head, gpu: str | None, options: argparse.Namespace) -> dict[str, Any]:
    path = head_path(head, options)
    stores = [f"{store_path(store, options)}/features" for store in head.stores]
    trained = options.out / "runs" / head.file_name
    overrides = [*head.overrides, *options.overrides]
    shutil.rmtree(trained, ignore_errors=True)  # of a run that was cut off
    call(
        gpu, trained.with_suffix(".txt"), "train.py", "experiment=head_quality", f"data.path=[{','.join(stores)}]",
        f"hydra.run.dir={trained}", "callbacks.progress=null", *overrides,
    )  # fmt: skip
    call(
        gpu, trained.with_suffix(".export.txt"), "serve.py", "action=export", f"run={trained}", f"head={path}",
        f"target.path={options.target}", "target.dtype=float32",
    )  # fmt: skip
    facts = json.loads((path / "training.json").read_text())
    return {
        "name": head.name,
        "stores": head.stores,
        "overrides": overrides,
        "answer_tokens_of_an_epoch": trained_answer_tokens(stores, facts["store"]["val_fraction"]),
        "simulated": facts["simulated_accept_length"],
        "head_config": facts["head_config"],
        "versions": cli.provenance(),
    }


def trained_answer_tokens(stores: list[str], val_fraction: float) -> int:
    entries = (ref.entry for ref in open_source(stores).samples)
    return sum(entry.answer_tokens for entry in entries if entry.split >= val_fraction)


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
            f"max_new_tokens={MAX_NEW_TOKENS}", *DECODED_ON, niceness=19,
        )  # fmt: skip
    return json.loads(log.read_text().splitlines()[-1])


def call(gpu: str | None, log: Path, *command: str, niceness: int = 0) -> None:
    """A command of this project, its output in a file that ends with what it prints."""
    environment = os.environ | ({} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu})
    log.parent.mkdir(parents=True, exist_ok=True)
    print(f"$ python {' '.join(command)}", flush=True)
    with log.open("w") as file, log.with_suffix(".err").open("w") as errors:
        status = subprocess.run(
            ["nice", "-n", str(niceness), sys.executable, *command],
            cwd=ROOT,
            env=environment,
            stdout=file,
            stderr=errors,
        ).returncode
    if status:
        sys.exit(f"python {' '.join(command)} ended with {status}; see {log.with_suffix('.err')}")


def store_path(store: str, options: argparse.Namespace) -> Path:
    return options.out / "stores" / store.replace(", ", "_").replace(" ", "_")


def head_path(head: Head, options: argparse.Namespace) -> Path:
    return options.out / "heads" / head.file_name


def row_path(head: Head, options: argparse.Namespace) -> Path:
    return options.out / "rows" / f"{head.file_name}.json"


def table(heads: list[dict[str, Any]]) -> str:
    columns = list(heads[0]["decoded"])
    lines = [
        f"| head | answer tokens of an epoch | simulated 3 / 7 | {' | '.join(columns)} |",
        "|---" * (3 + len(columns)) + "|",
    ]
    for head in heads:
        simulated = (
            " / ".join(f"{head['simulated'][steps]:.3f}" for steps in ("3", "7")) if "simulated" in head else "-"
        )
        # Without drafts accepted behind an answer's end, which nobody reads.
        values = " | ".join(f"{head['decoded'][column]['accept_length_kept']:.3f}" for column in columns)
        lines.append(f"| {head['name']} | {head.get('answer_tokens_of_an_epoch', '-')} | {simulated} | {values} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
