"""Stores made and heads trained in several ways, and what the heads accept on the same held-out prompts.

    python benchmarks/training_ways.py benchmarks/ways/losses.yaml --folder DIR --out FILE
    python benchmarks/training_ways.py benchmarks/ways/head_quality.yaml --folder DIR --out FILE --target TARGET \\
        --prompts train.jsonl --held-out heldout.jsonl gsm8k.jsonl --jobs 3 trainer=gpu

A file of ways names feature stores with their overrides of precompute.py, and ways of training with theirs of train.py.
`answers_of` makes other features of another store's answers, `init_from` starts from another way's head. Every way is
trained with every seed, exported, and decodes every held-out file (`serve.py action=compare`). It is compared with the
first way: differences of pairs of one seed have an interval over prompts, their mean has one over seeds (Student's t).
Stores, heads and comparisons that DIR holds are not made again, and a training that was stopped is resumed. Next to
each store and head, a .txt of its name has the commands that made it.
"""

import argparse
import json
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from result import ROOT, call, write_result

from eagle3.decoding.paired import estimate_mean
from eagle3.draft_shape import Shape

ASSETS = ROOT / "tests" / "assets"


@dataclass(frozen=True, kw_only=True)
class Store:
    """Overrides of precompute.py; `answers_of` names a store whose prompts and answers are taken."""

    overrides: Sequence[str] = ()
    answers_of: str | None = None


@dataclass(frozen=True, kw_only=True)
class Way:
    """Overrides of train.py over one or several stores (unset: the first); `init_from` names a way to start from."""

    overrides: Sequence[str] = ()
    stores: Sequence[str]
    init_from: str | None = None


def main(arguments: list[str]) -> dict[tuple[str, int], Path]:
    """Return the heads by way and seed, the first way's with seed 0 first."""
    options = parsed(arguments)
    folder, file = options.folder.resolve(), yaml.safe_load(options.ways.read_text())
    stores = {name: Store(**(given or {})) for name, given in file["stores"].items()}
    ways = {name: Way(**{"stores": [*stores][:1]} | (given or {})) for name, given in file["ways"].items()}
    for name, store in stores.items():  # a store that others take answers of comes before them
        overrides = [*file.get("precompute", []), *options.precompute, *store.overrides]
        make_store(folder / "stores", name, store, overrides, options)
    general = [*file.get("train", []), *options.overrides]
    heads = trained(folder, ways, general, options)
    with ThreadPoolExecutor(options.jobs) as pool:
        seeds = [*pool.map(lambda seed: compared_on_all(folder, ways, heads, seed, options), range(options.seeds))]
    facts = {name: store_facts(folder / "stores" / file_name(name)) for name in stores}
    result = {"target": Path(options.target).name, "ways": file, "stores": facts, **summary(seeds)}
    written = write_result(options.out, result)
    print(json.dumps(written["changes"] if len(ways) > 1 else written["seeds"], indent=1))
    return heads


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ways", type=Path, help="YAML: `stores`, `ways`, and overrides of all, `precompute`, `train`")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--prompts", default=f"{ASSETS}/prompts/train.jsonl")
    parser.add_argument("--precompute", nargs="+", default=[], help="overrides of precompute.py for every store")
    parser.add_argument("--target", default=f"{ASSETS}/tiny")
    parser.add_argument("--held-out", nargs="+", default=[f"{ASSETS}/prompts/heldout.jsonl"])
    parser.add_argument("--limit", type=int, default=400, help="held-out prompts of each file")
    parser.add_argument("--samplings", default="[{temperature: 0}]", help="as compare.samplings; 0: greedy")
    parser.add_argument("--shapes", help="as compare.shapes; its default is that of conf/action/compare.yaml")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--jobs", type=int, default=1, help="comparisons at the same time; trainings on one GPU can end each other"
    )
    parser.add_argument("overrides", nargs="*", help="of train.py for every way, e.g. trainer.max_epochs=1")
    options = parser.parse_intermixed_args(arguments)
    options.overrides += [word for word in options.held_out if "=" in word]  # argparse takes all words up to an option
    options.held_out = [word for word in options.held_out if "=" not in word]
    return options


def make(made: Path, *command: str) -> None:
    """Run a script, then add its command to the .txt file next to its output."""
    call(*command)
    with made.with_name(f"{made.name}.txt").open("a") as file:
        file.write(shlex.join(["python", *command]).replace(f"{ROOT}/", "") + "\n")


def make_store(folder: Path, name: str, store: Store, overrides: Sequence[str], options: argparse.Namespace) -> None:
    data = folder / file_name(name)
    if (data / "features" / "manifest.json").exists():
        return
    stages = ["prompts", "answers", "features"]
    if store.answers_of:
        stages = ["features"]
        data.mkdir(parents=True, exist_ok=True)
        for part in ("prompts", "answers"):
            if not (data / part).exists():
                (data / part).symlink_to(folder / file_name(store.answers_of) / part)
    make(
        data, "precompute.py", f"target.path={options.target}", f"prompts.path={options.prompts}", f"out_dir={data}",
        f"stages=[{','.join(stages)}]", *overrides,
    )  # fmt: skip


def store_facts(data: Path) -> dict[str, Any]:
    manifest = json.loads((data / "features" / "manifest.json").read_text())
    return {key: manifest[key] for key in ("samples", "tokens", "answer_tokens", "bytes")}


def trained(
    folder: Path, ways: Mapping[str, Way], general: Sequence[str], options: argparse.Namespace
) -> dict[tuple[str, int], Path]:
    """Train and export a head for each way and seed; those that start from another way's come after it."""
    runs = [(name, seed) for seed in range(options.seeds) for name in ways]
    for name, seed in sorted(runs, key=lambda run: bool(ways[run[0]].init_from)):
        train(folder, ways, name, seed, general, options)
    return {run: head_path(folder, *run) for run in runs}


def head_path(folder: Path, way: str, seed: int) -> Path:
    return folder / "heads" / f"{file_name(way)}-{seed}"


def train(
    folder: Path, ways: Mapping[str, Way], name: str, seed: int, general: Sequence[str], options: argparse.Namespace
) -> None:
    way, head = ways[name], head_path(folder, name, seed)
    run = folder / "runs" / head.name
    stores = ",".join(f"{folder}/stores/{file_name(store)}/features" for store in way.stores)
    start = [f"init_from={head_path(folder, way.init_from, seed)}"] if way.init_from else []
    own = [f"data.path=[{stores}]", *general, *way.overrides, *start, f"seed={seed}"]
    head.parent.mkdir(parents=True, exist_ok=True)
    if not (run / "result.json").exists():
        make(head, "train.py", *own, f"hydra.run.dir={run}", "callbacks.progress=null", "ckpt_path=auto")
    if not head.exists():
        make(head, "serve.py", "action=export", f"run={run}", f"head={head}", "limit=2", "max_new_tokens=16")


def compared_on_all(
    folder: Path, ways: Mapping[str, Way], heads: Mapping[tuple[str, int], Path], seed: int, options: argparse.Namespace
) -> dict[str, Any]:
    """Compare the heads of one seed on every held-out file; the names of chains begin with the file's."""
    found = {}
    for file in map(Path, options.held_out):
        run = folder / "compared" / f"{file.stem}-{seed}"
        chains = compared(run, {way: heads[way, seed] for way in ways}, file, options)
        found |= {f"{file.stem}: {chain}": row for chain, row in chains.items()}
    return found


def compared(run: Path, heads: Mapping[str, Path], held_out: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Decode with heads of one seed; return each chain's accept lengths and the differences from the first head."""
    if not (run / "compare.json").exists():
        call(
            "serve.py", "action=compare", f"target.path={options.target}",
            f"heads=[{','.join(map(str, heads.values()))}]", f"prompts.path={held_out}", "prompts.turns=first",
            f"limit={options.limit}", f"compare.samplings={options.samplings}", f"hydra.run.dir={run}",
            *([f"compare.shapes={options.shapes}"] if options.shapes else []),
        )  # fmt: skip
    found: dict[str, Any] = {}
    report = json.loads((run / "compare.json").read_text())
    names = dict(zip(report["heads"], heads, strict=True))  # of folders, in the order given
    for row in report["rows"]:
        drafts = Shape(row["steps"], row["topk"], row["draft_tokens"])
        chain = f"{row['source']}, {drafts}, {row['sampling']}"
        found.setdefault(chain, {"prompts": row["prompts"]})[names[row["head"]]] = {
            "accept_length": row["accept_length_kept"]["value"],
            "standard_error": row["accept_length_kept"]["standard_error"],
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
    of_all = [{chain: row for chain, row in seed.items() if re.match("(.*: )?all,", chain)} for seed in seeds]
    return {"changes": changes, "seeds": of_all}


def change(base: Sequence[float], other: Sequence[float]) -> dict[str, Any]:
    """Return the mean change of pairs as a share, with a 95 % interval where there are several."""
    mean = estimate_mean([ours / theirs - 1 for theirs, ours in zip(base, other, strict=True)])
    return {"accept_length_change": mean.value, "interval": None if mean.low is None else [mean.low, mean.high]}


def file_name(name: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "-." else "_" for letter in name)


if __name__ == "__main__":
    main(sys.argv[1:])
