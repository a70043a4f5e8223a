"""A head for one kind of traffic adapted to another with a tenth of its data, against heads that are trained anew.

    python benchmarks/adapt.py --folder DIR --out benchmarks/results/adapt.json       # half an hour, two cores

On the bundled target and prompts: the old traffic are code and commands, the new one mathematics and prose. Five heads:
of the old traffic; of all of the new, which bounds what a tenth can give; of a tenth of the new, anew and adapted from
the old head; and adapted with a tenth of the old traffic beside it. Those of a tenth are trained at each of RATES, and
the best on validation prompts of their own data is taken. Every head then decodes the same held-out prompts of both
kinds, greedily (`serve.py action=compare`): its accept length, and how far it is from the adapted head's, with 95 %
intervals over prompts. What lies in DIR already is taken as it is.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from result import write_result

from eagle3.features.joined import open_source

ROOT = Path(__file__).parent.parent
ASSETS = ROOT / "tests" / "assets"
KINDS = {
    "old": ("tldr", "stdlib", "python", "pytorch-lightning", "trl"),  # code and commands
    "new": ("gsm8k", "sympy", "peps"),  # mathematics and prose
}
HELD_OUT = 5  # of the bundled training prompts each fifth is held out, beside those of heldout.jsonl
RATES = ("6e-3", "1.5e-3")  # the recipe's, and a quarter of it
STEPS = 7  # of the chain that heads are compared in
PRECOMPUTE = [
    "prompts/privacy=off", "responses.max_new_tokens=128", "answers.batch_size=256", "answers.batch_tokens=65536",
    "answers.window=4096", "features.max_length=1024",
]  # fmt: skip
TRAIN = ["experiment=quickstart", "model.draft_vocab_size=null", "trainer=cpu", "callbacks.progress=null"]
LONG = ["data.val_fraction=0.2", "trainer.val_check_interval=1.0"]
# Stores of each head, and the name of the one that it starts from.
HEADS: dict[str, tuple[list[str], str | None]] = {
    "adapted": (["new_tenth"], "old"),
    "old": (["old"], None),
    "anew": (["new_tenth"], None),
    "anew_on_all": (["new"], None),
    "adapted_with_old": (["new_tenth", "old_tenth"], "old"),
}


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=800, help="of each kind, to train on")
    parser.add_argument("--held-out", type=int, default=200, help="of each kind, at most")
    parser.add_argument("--epochs", type=int, default=10, help="of a tenth; of all data 2")
    parser.add_argument("--jobs", type=int, default=2, help="side by side, a core each")
    options = parser.parse_args(arguments)
    folder: Path = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    prompts = {kind: write_prompts(kind, folder, options) for kind in KINDS}
    with ThreadPoolExecutor(options.jobs) as jobs:
        stores = ["old", "new", "old_tenth", "new_tenth"]
        list(jobs.map(lambda name: precompute(name, folder), stores))
        trained: dict[str, dict[str, Any]] = {}
        for names in (["old", "anew_on_all"], ["adapted", "anew", "adapted_with_old"]):  # those to start from first
            trained |= dict(zip(names, jobs.map(lambda name: train(name, folder, options.epochs), names), strict=True))
    accepted = {kind: compare(kind, folder, options.held_out) for kind in KINDS}
    result = {
        "kinds": KINDS,
        "prompts": prompts,
        "epochs_of_a_tenth": options.epochs,
        "stores": {name: facts(folder / name) for name in stores},
        "heads": {
            name: trained[name] | {"accept_length": {kind: found[name] for kind, found in accepted.items()}}
            for name in HEADS
        },
    }
    print(json.dumps(write_result(options.out, result, arguments), indent=1))


def write_prompts(kind: str, folder: Path, options: argparse.Namespace) -> dict[str, int]:
    """Write prompts to train on, a tenth of them, and prompts that are held out; count them."""
    lines = [*of_kind(ASSETS / "prompts" / "train.jsonl", kind)]
    trained = [line for number, line in enumerate(lines) if number % HELD_OUT][: options.prompts]
    held_out = [*of_kind(ASSETS / "prompts" / "heldout.jsonl", kind), *lines[::HELD_OUT]][: options.held_out]
    pools = {kind: trained, f"{kind}_tenth": trained[: len(trained) // 10], f"{kind}_held_out": held_out}
    for name, pool in pools.items():
        (folder / f"{name}.jsonl").write_text("".join(pool))
    return {name: len(pool) for name, pool in pools.items()}


def of_kind(path: Path, kind: str) -> list[str]:
    with path.open() as file:
        return [line for line in file if json.loads(line)["source"] in KINDS[kind]]


def precompute(name: str, folder: Path) -> None:
    if not (folder / name / "features" / "manifest.json").exists():
        call(
            "precompute.py", f"target.path={ASSETS}/tiny", f"prompts.path={folder}/{name}.jsonl",
            f"out_dir={folder}/{name}", *PRECOMPUTE,
        )  # fmt: skip


def facts(data: Path) -> dict[str, int]:
    manifest = open_source(str(data / "features")).describe()
    return {key: manifest[key] for key in ("samples", "answer_tokens")}


def train(name: str, folder: Path, epochs: int) -> dict[str, Any]:
    """Train at each rate, export the best; its validation decides."""
    stores, start = HEADS[name]
    of_a_tenth = stores[0].endswith("tenth")
    overrides = [*TRAIN, f"data.path=[{','.join(f'{folder}/{store}/features' for store in stores)}]"]
    overrides += [*LONG, f"trainer.max_epochs={epochs}"] if of_a_tenth else []
    overrides += [f"init_from={folder}/heads/{start}"] if start else []
    began, scores = time.perf_counter(), {}
    for rate in RATES if of_a_tenth else RATES[:1]:
        run = folder / "runs" / f"{name}_{rate}"
        if not (run / "result.json").exists():
            call("train.py", *overrides, f"optim.lr={rate}", f"hydra.run.dir={run}")
        scores[rate] = json.loads((run / "result.json").read_text())["score"]
    best = max(scores, key=lambda rate: scores[rate])
    if not (folder / "heads" / name).exists():
        call(
            "serve.py", "action=export", f"run={folder}/runs/{name}_{best}", f"head={folder}/heads/{name}", "limit=2",
            "max_new_tokens=16", "target.device=cpu",
        )  # fmt: skip
    config = json.loads((folder / "heads" / name / "config.json").read_text())
    return {
        "stores": stores, "started_from": start, "validation": scores, "rate": best,
        "draft_vocabulary": config["draft_vocab_size"], "seconds": time.perf_counter() - began,
    }  # fmt: skip


def compare(kind: str, folder: Path, limit: int) -> dict[str, Any]:
    """Return the accept length of each head on held-out prompts, and its difference from the first, the adapted one."""
    run = folder / "compared" / kind
    if not (run / "compare.json").exists():
        heads = ",".join(f"{folder}/heads/{name}" for name in HEADS)
        call(
            "serve.py", "action=compare", f"target.path={ASSETS}/tiny", "target.device=cpu", "target.dtype=float32",
            f"heads=[{heads}]", f"prompts.path={folder}/{kind}_held_out.jsonl", f"limit={limit}",
            f"compare.shapes=[{{steps: {STEPS}, topk: 1, draft_tokens: null}}]", "compare.temperatures=[0.0]",
            f"hydra.run.dir={run}",
        )  # fmt: skip
    rows = [row for row in json.loads((run / "compare.json").read_text())["rows"] if row["source"] == "all"]
    return {
        row["head"]: {"prompts": row["prompts"], **row["accept_length_kept"], "difference": row["difference_kept"]}
        for row in rows
    }


def call(*command: str) -> None:
    print("$ python", *command, flush=True)
    subprocess.run([sys.executable, *command], cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True)


if __name__ == "__main__":
    main(sys.argv[1:])
