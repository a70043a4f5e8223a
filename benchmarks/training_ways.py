"""Heads trained in several ways, what they accept on the same held-out prompts, and how sure the differences are.

    python benchmarks/training_ways.py --folder DIR --out benchmarks/results/losses.json --store STORE \\
        --ways '{"soft cross-entropy": [], "reverse KL": ["loss=reverse_kl"], "LK": ["loss=lk"]}'
    python benchmarks/training_ways.py --folder DIR --out benchmarks/results/orders.json --store STORE \\
        --ways '{"shuffled": [], "streaming": ["data.order=streaming", "data.shuffle_buffer=100"]}'

STORE is a feature store of TARGET. A way is overrides of train.py; each is trained with each seed, exported, and
decodes the held-out prompts (`serve.py action=compare`). Each way is held against the first: differences of pairs of
the same seed have an interval over prompts, their mean has one over seeds (Student's t). What lies in DIR is taken as
it is.
"""

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from result import write_result

ROOT = Path(__file__).parent.parent
ASSETS = ROOT / "tests" / "assets"
CHAINS = (3, 7)  # steps


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--ways", type=json.loads, required=True, help="names and overrides of train.py, as JSON")
    parser.add_argument("--experiment", default="quickstart")
    parser.add_argument("overrides", nargs="*", help="of train.py for every way, e.g. trainer.max_epochs=1")
    add_arguments(parser)
    options = parser.parse_args(arguments)
    folder, seeds = options.folder.resolve(), range(options.seeds)
    general = [f"experiment={options.experiment}", f"data.path={options.store.resolve()}", *options.overrides]
    runs = {(name, seed): [*general, *own, f"seed={seed}"] for seed in seeds for name, own in options.ways.items()}
    result = {"experiment": options.experiment, "ways": options.ways, "target": Path(options.target).name}
    result |= trained_and_compared(folder, runs, options)
    print(json.dumps(write_result(options.out, result, arguments)["changes"], indent=1))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What every comparison of trained heads takes."""
    parser.add_argument("--target", default=f"{ASSETS}/tiny")
    parser.add_argument("--held-out", default=f"{ASSETS}/prompts/heldout.jsonl")
    parser.add_argument("--limit", type=int, default=400, help="held-out prompts")
    parser.add_argument("--temperatures", type=json.loads, default=[0.0], help="as JSON; 0: greedy")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1, help="trainings, or comparisons, side by side")


def trained_and_compared(
    folder: Path, runs: Mapping[tuple[str, int], Sequence[str]], options: argparse.Namespace
) -> dict[str, Any]:
    """Train and export a head for each way and seed with its overrides; return the summary of what they accept."""
    heads = trained(folder, runs, jobs=options.jobs)
    ways = dict.fromkeys(way for way, _ in runs)

    def of_seed(seed: int) -> dict[str, Any]:
        return compared(folder / f"compared-{seed}", {way: heads[way, seed] for way in ways}, options)

    with ThreadPoolExecutor(options.jobs) as pool:
        return summary([*pool.map(of_seed, range(options.seeds))])


def trained(folder: Path, runs: Mapping[tuple[str, int], Sequence[str]], *, jobs: int) -> dict[tuple[str, int], Path]:
    """Train a head for each way and seed with its overrides and export it, `jobs` at a time; return their folders."""

    def train(way: tuple[str, int]) -> Path:
        name = f"{way[0].lower().replace(' ', '_')}-{way[1]}"
        run, head = folder / "runs" / name, folder / "heads" / name
        if not (run / "result.json").exists():
            call("train.py", *runs[way], f"hydra.run.dir={run}", "callbacks.progress=null")
        if not head.exists():
            call("serve.py", "action=export", f"run={run}", f"head={head}", "limit=2", "max_new_tokens=16")
        return head

    with ThreadPoolExecutor(jobs) as pool:
        return dict(zip(runs, pool.map(train, runs), strict=True))


def compared(run: Path, heads: Mapping[str, Path], options: argparse.Namespace) -> dict[str, Any]:
    """Decode with heads of one seed; return each chain's accept lengths and the differences from the first head."""
    if not (run / "compare.json").exists():
        shapes = ",".join(f"{{steps: {steps}, topk: 1, draft_tokens: null}}" for steps in CHAINS)
        call(
            "serve.py", "action=compare", f"target.path={options.target}",
            f"heads=[{','.join(map(str, heads.values()))}]", f"prompts.path={options.held_out}",
            f"limit={options.limit}", f"compare.temperatures={options.temperatures}", f"compare.shapes=[{shapes}]",
            f"hydra.run.dir={run}",
        )  # fmt: skip
    found: dict[str, Any] = {}
    report = json.loads((run / "compare.json").read_text())
    names = dict(zip(report["heads"], heads, strict=True))  # of folders, in the order given
    for row in report["rows"]:
        chain = f"{row['source']}, chain of {row['steps']}, {row['sampling']}"
        found.setdefault(chain, {"prompts": row["prompts"]})[names[row["head"]]] = {
            "accept_length": row["accept_length_kept"]["value"],
            "difference": row["difference_kept"],
        }
    return found


def summary(seeds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return how far each way is from the first, for each source and chain: a share, and its interval over seeds; and
    each seed's accept lengths over all sources."""
    changes: dict[str, dict[str, Any]] = {}
    for chain, ways in seeds[0].items():
        first, *others = (way for way in ways if way != "prompts")
        lengths = {way: [seed[chain][way]["accept_length"] for seed in seeds] for way in (first, *others)}
        changes[chain] = {way: change(lengths[first], lengths[way]) for way in others}
    of_all = [{chain: row for chain, row in seed.items() if chain.startswith("all,")} for seed in seeds]
    return {"changes": changes, "seeds": of_all}


def change(base: Sequence[float], other: Sequence[float]) -> dict[str, Any]:
    """Return the mean change of pairs as a share, with a 95 % interval where there are several."""
    from scipy.stats import t as student  # here alone: race.py trains where it is not installed

    shares = [ours / theirs - 1 for theirs, ours in zip(base, other, strict=True)]
    mean = statistics.mean(shares)
    if len(shares) == 1:
        return {"accept_length_change": mean, "interval": None}
    half = statistics.stdev(shares) / len(shares) ** 0.5 * float(student.ppf(0.975, len(shares) - 1))
    return {"accept_length_change": mean, "interval": [mean - half, mean + half]}


def call(*command: str) -> None:
    print("$ python", *command, flush=True)
    subprocess.run([sys.executable, *command], cwd=ROOT, check=True)


if __name__ == "__main__":
    main(sys.argv[1:])
