"""Prompts thinned by what they mean (prompts.diversity) against as many drawn at random: what their heads accept.

    python benchmarks/diversity.py --folder DIR --target TARGET --prompts-file FILE --held-out FILE \\
        --out benchmarks/results/diversity.json                # a GPU
    python benchmarks/diversity.py --folder DIR --out FILE     # the bundled target: two hours, two cores

From one pool, prompts are thinned to `--per-cluster` of each of `--clusters` groups of embeddings of the target itself;
as many are drawn from the pool with each of `--seeds` seeds. A head is trained on each with the same settings, on the
thinned ones with each seed, and all decode the same held-out prompts, greedily (`serve.py action=compare`). Differences
are of pairs of the same seed: a 95 % interval over prompts for each, and over seeds for their mean. What lies in DIR is
taken as it is; `--until prompts` ends where the target answers.
"""

import argparse
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

from feature_ways import change
from result import write_result

from eagle3.features.joined import open_source

ROOT = Path(__file__).parent.parent
ASSETS = ROOT / "tests" / "assets"
PRECOMPUTE = [
    "prompts/privacy=off", "responses.max_new_tokens=128", "answers.batch_size=256", "answers.batch_tokens=65536",
    "features.max_length=1024",
]  # fmt: skip
STEPS = 7  # of the chain that heads are compared in


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--target", default=f"{ASSETS}/tiny")
    parser.add_argument("--prompts-file", default=f"{ASSETS}/prompts/train.jsonl")
    parser.add_argument("--held-out", default=f"{ASSETS}/prompts/heldout.jsonl")
    parser.add_argument("--limit", type=int, default=400, help="held-out prompts")
    parser.add_argument("--clusters", type=int, default=300)
    parser.add_argument("--per-cluster", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--until", choices=["prompts"])
    parser.add_argument("overrides", nargs="*", help="for train.py, e.g. trainer.max_epochs=1")
    options = parser.parse_args(arguments)
    options.folder = options.folder.resolve()
    prompts = write_prompts(options)
    if options.until:
        return
    seeds = [compared(seed, options) for seed in range(options.seeds)]
    lengths = {way: [seed[way]["accept_length"] for seed in seeds] for way in ("random", "diverse")}
    result = {
        "target": Path(options.target).name,
        "prompts": prompts,
        "answer_tokens": {name: answer_tokens(name, options) for name in ("diverse", *names_of_drawn(options))},
        "seeds": seeds,
        "diverse_beside_random": change(lengths["random"], lengths["diverse"]),
    }
    print(json.dumps(write_result(options.out, result, arguments), indent=1))


def write_prompts(options: argparse.Namespace) -> dict[str, int]:
    """Clean the pool, thin it, and draw as many at random for each seed; count them."""
    thin = [f"prompts.diversity.{key}={getattr(options, key)}" for key in ("clusters", "per_cluster")]
    for name, rules in (("pool", []), ("diverse", [f"prompts.diversity.path={options.target}", *thin])):
        if not (options.folder / name / "prompts" / "ledger.json").exists():
            source = f"prompts.path={options.prompts_file}"
            call("precompute.py", "stages=[prompts]", source, f"out_dir={options.folder}/{name}", *PRECOMPUTE, *rules)
    pool, diverse = (
        (options.folder / name / "prompts" / "prompts.jsonl").read_text().splitlines(keepends=True)
        for name in ("pool", "diverse")
    )
    for seed, name in enumerate(names_of_drawn(options)):
        drawn = random.Random(seed).sample(pool, len(diverse))
        (options.folder / f"{name}.jsonl").write_text("".join(drawn))
    (options.folder / "diverse.jsonl").write_text("".join(diverse))
    return {"pool": len(pool), "each": len(diverse)}


def names_of_drawn(options: argparse.Namespace) -> list[str]:
    return [f"random_{seed}" for seed in range(options.seeds)]


def answer_tokens(name: str, options: argparse.Namespace) -> int:
    return open_source(str(options.folder / f"{name}_store" / "features")).describe()["answer_tokens"]


def compared(seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Train on both kinds of prompts with this seed; return both accept lengths, and how far the second is away."""
    heads = [train(f"random_{seed}", seed, options), train("diverse", seed, options)]
    run = options.folder / "compared" / str(seed)
    if not (run / "compare.json").exists():
        call(
            "serve.py", "action=compare", f"target.path={options.target}", f"heads=[{','.join(map(str, heads))}]",
            f"prompts.path={options.held_out}", f"limit={options.limit}", "compare.temperatures=[0.0]",
            f"compare.shapes=[{{steps: {STEPS}, topk: 1, draft_tokens: null}}]", f"hydra.run.dir={run}",
        )  # fmt: skip
    rows = [row for row in json.loads((run / "compare.json").read_text())["rows"] if row["source"] == "all"]
    return {
        way: {"prompts": row["prompts"], "accept_length": row["accept_length_kept"]["value"],
              "difference": row["difference_kept"]}
        for way, row in zip(("random", "diverse"), rows, strict=True)
    }  # fmt: skip


def train(name: str, seed: int, options: argparse.Namespace) -> Path:
    """Answer the prompts, unless they are, train a head on them and export it; return its folder."""
    store, run = options.folder / f"{name}_store", options.folder / "runs" / f"{name}-{seed}"
    head = options.folder / "heads" / f"{name}-{seed}"
    if not (store / "features" / "manifest.json").exists():
        prompts = f"prompts.path={options.folder}/{name}.jsonl"
        call("precompute.py", f"target.path={options.target}", prompts, f"out_dir={store}", *PRECOMPUTE)
    if not (run / "result.json").exists():
        call(
            "train.py", "experiment=quickstart", f"data.path={store}/features", f"hydra.run.dir={run}", f"seed={seed}",
            "callbacks.progress=null", "model.draft_vocab_size=null", *options.overrides,
        )  # fmt: skip
    if not head.exists():
        call("serve.py", "action=export", f"run={run}", f"head={head}", "limit=2", "max_new_tokens=16")
    return head


def call(*command: str) -> None:
    print("$ python", *command, flush=True)
    subprocess.run([sys.executable, *command], cwd=ROOT, check=True)


if __name__ == "__main__":
    main(sys.argv[1:])
