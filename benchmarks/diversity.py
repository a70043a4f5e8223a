"""Prompts thinned by what they mean (prompts.diversity) against as many drawn at random: what their heads accept.

    python benchmarks/diversity.py --folder DIR --target TARGET --prompts-file FILE --held-out FILE \\
        --out benchmarks/results/diversity.json --jobs 6       # a GPU
    python benchmarks/diversity.py --folder DIR --out FILE     # the bundled target: two hours, two cores

From one pool, prompts are thinned to `--per-cluster` of each of `--clusters` groups of embeddings of the target itself;
as many are drawn from the pool with each of `--seeds` seeds. A head is trained on each with the same settings, on the
thinned ones with each seed, and all decode the same held-out prompts, as in training_ways.py. What lies in DIR is taken
as it is; `--until prompts` ends where the target answers, so that another machine can go on.
"""

import argparse
import json
import random
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from result import write_result
from training_ways import ASSETS, add_arguments, call, trained_and_compared

from eagle3.features.joined import open_source

ANSWERS = [
    "responses.max_new_tokens=128", "answers.batch_size=256", "answers.batch_tokens=65536", "features.max_length=1024",
]  # fmt: skip


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--prompts-file", default=f"{ASSETS}/prompts/train.jsonl")
    parser.add_argument("--clusters", type=int, default=300)
    parser.add_argument("--per-cluster", type=int, default=4)
    parser.add_argument("--until", choices=["prompts"])
    parser.add_argument("overrides", nargs="*", help="for train.py, e.g. trainer.max_epochs=1")
    add_arguments(parser)
    options = parser.parse_args(arguments)
    folder = options.folder.resolve()
    if not (folder / "prompts.json").exists():
        write_prompts(folder, options)
    if options.until:
        return
    # Of a seed, both ways have the same order of training; what is drawn differs, what is thinned is the same.
    seeds = range(options.seeds)
    stores = {("random", seed): folder / f"random-{seed}" for seed in seeds}
    stores |= {("diverse", seed): folder / "diverse" for seed in seeds}
    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(lambda store: answer(store, options), sorted({*stores.values()})))
    general = ["experiment=quickstart", "model.draft_vocab_size=null", *options.overrides]
    runs = {way: [*general, f"data.path={store}/features", f"seed={way[1]}"] for way, store in stores.items()}
    result = {
        "target": Path(options.target).name,
        "prompts": json.loads((folder / "prompts.json").read_text()),
        "answer_tokens": {
            store.name: open_source(str(store / "features")).describe()["answer_tokens"]
            for store in sorted({*stores.values()})
        },
    }
    result |= trained_and_compared(folder, runs, options)
    print(json.dumps(write_result(options.out, result, arguments)["changes"], indent=1))


def write_prompts(folder: Path, options: argparse.Namespace) -> None:
    """Clean the pool, thin it, and draw as many at random for each seed; count them."""
    thin = [f"prompts.diversity.{key}={getattr(options, key)}" for key in ("clusters", "per_cluster")]
    clean("pool", options.prompts_file, folder)
    clean("diverse", options.prompts_file, folder, f"prompts.diversity.path={options.target}", *thin)
    pool, diverse = (
        (folder / name / "prompts" / "prompts.jsonl").read_text().splitlines(keepends=True)
        for name in ("pool", "diverse")
    )
    for seed in range(options.seeds):
        drawn = folder / f"random-{seed}.jsonl"
        drawn.write_text("".join(random.Random(seed).sample(pool, len(diverse))))
        clean(f"random-{seed}", str(drawn), folder)
    (folder / "prompts.json").write_text(json.dumps({"pool": len(pool), "each": len(diverse)}))


def clean(name: str, prompts: str, folder: Path, *rules: str) -> None:
    """Run the prompt stage."""
    general = ["stages=[prompts]", "prompts/privacy=off", f"prompts.path={prompts}", f"out_dir={folder / name}"]
    call("precompute.py", *general, *rules)


def answer(store: Path, options: argparse.Namespace) -> None:
    """Let the target answer the store's prompts and compute their features."""
    stages = "stages=[responses,features]"
    call("precompute.py", stages, f"target.path={options.target}", f"out_dir={store}", *ANSWERS)


if __name__ == "__main__":
    main(sys.argv[1:])
