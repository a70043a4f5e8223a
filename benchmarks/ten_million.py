"""How long a store of ten million samples takes to its first batch, and the memory of a rank that trains on it.

    python benchmarks/ten_million.py --folder DIR --out benchmarks/results/ten_million.json      # minutes, 1 GB of disk

A thousand shards of ten thousand samples. Their indices are real. Of their tars one is, with tiny samples in a sparse
file of 512 MB, and the others are names of the same file: 0.5 TB to a reader. Each measurement is a process of its own.
"""

import argparse
import hashlib
import json
import os
import resource
import subprocess
import sys
import tarfile
import time
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from random_head import SHAPES, RandomSamples, answered
from result import write_result
from synthetic_store import MADE_FROM, finish_store, write_target

from eagle3.data.datamodule import FeatureData
from eagle3.data.mix import Rules
from eagle3.features.index import (
    FORMAT_VERSION,
    NUMPY,
    SampleEntry,
    ShardFacts,
    ShardIndex,
    index_bytes,
    index_name,
    index_of,
)
from eagle3.features.joined import open_source
from eagle3.features.loss_mask import AllTurns
from eagle3.features.sample import to_bytes
from eagle3.features.shards import hash_of
from eagle3.features.split import split_fraction
from eagle3.features.turns import anchors_of
from eagle3.head.batch import prepare_ttt
from eagle3.storage.folder import LocalFolder

SHAPE = replace(
    SHAPES["8b"],
    hidden_size=16,
    vocab_size=64,
    draft_vocab_size=64,
    intermediate_size=32,
    num_heads=2,
    num_kv_heads=2,
    head_dim=8,
)
PACK_TOKENS, PACKS = 1024, 3000


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shards", type=int, default=1000)
    parser.add_argument("--samples", type=int, default=10_000, help="of a shard")
    parser.add_argument("--measure", choices=["start", "resume"], help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.measure:
        print(json.dumps(measure(options.folder, resumed=options.measure == "resume")))
        return
    if not (options.folder / "manifest.json").exists():
        write(LocalFolder(options.folder), options.shards, options.samples)
    rows = {name: in_own_process(name, arguments) for name in ("start", "resume")}
    write_result(options.out, {"shards": options.shards, "samples": options.shards * options.samples, **rows})


def in_own_process(name: str, arguments: list[str]) -> dict[str, Any]:
    command = [sys.executable, __file__, *arguments, "--measure", name]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    print(name, done.stdout)
    return json.loads(done.stdout.splitlines()[-1])


def write(storage: LocalFolder, shards: int, samples: int) -> None:
    """Write one shard, give it a thousand names, and each name an index of other ids."""
    indices: list[ShardIndex] = []
    first = write_shard(storage, samples)
    for number in range(shards):
        name = f"shard-{number:06d}-00000000.tar"
        if number:
            os.link(storage.path / first.facts.shard, storage.path / name)
        ids = [f"p{number * samples + place}#0" for place in range(samples)]
        columns = dict(first.columns)
        columns["split"] = np.array([split_fraction(each) for each in ids])
        columns["id_end"] = np.cumsum([len(each) for each in ids], dtype=NUMPY["I64"])
        columns["ids"] = np.frombuffer("".join(ids).encode(), "u1")
        indices.append(ShardIndex(replace(first.facts, shard=name), columns))
        (storage.path / index_name(name)).write_bytes(index_bytes(indices[-1]))
    write_target(storage, SHAPE)
    finish_store(storage, SHAPE, indices)


def write_shard(storage: LocalFolder, samples: int, apart: int = 50_000) -> ShardIndex:
    """Write a tar with a hole behind each sample."""
    storage.path.mkdir(parents=True)
    drawn, made = np.random.default_rng(0), RandomSamples(SHAPE, torch.bfloat16, seed=0)
    different = [made.sample("p", answered(int(drawn.integers(50, 200)), 0.5)) for _ in range(200)]
    name, entries, counts = "shard-000000-00000000.tar", [], Counter[int]()
    with (storage.path / name).open("wb") as file:
        for number in range(samples):
            sample = different[number % len(different)]
            blob = to_bytes(sample)
            member = tarfile.TarInfo(f"{number:08d}.safetensors")
            member.size = apart - tarfile.BLOCKSIZE
            file.seek(number * apart // tarfile.BLOCKSIZE * tarfile.BLOCKSIZE)
            file.write(member.tobuf())
            answers = sample.input_ids[sample.turns > 0].tolist()
            counts.update(answers)
            entries.append(
                SampleEntry(
                    "", file.tell(), len(blob), len(sample.input_ids), len(answers), len(anchors_of(sample.turns)), 0.0,
                    hashlib.sha256(blob).hexdigest(),
                )
            )  # fmt: skip
            file.write(blob)
        file.truncate(samples * apart)
    facts = ShardFacts(
        format_version=FORMAT_VERSION,
        shard=name,
        made_from=hash_of(MADE_FROM),
        bytes=samples * apart,
        sha256="not looked at",
    )
    return index_of(facts, entries, counts)


def measure(folder: Path, *, resumed: bool) -> dict[str, Any]:
    began = time.perf_counter()
    source = open_source(str(folder))
    opened = time.perf_counter()
    data = FeatureData(
        source=source, prepare=partial(prepare_ttt, ttt_steps=3), pack_tokens=PACK_TOKENS, val_fraction=0.001,
        limit_samples=None, weights=None,
        rules=Rules(),
        order="shuffled", shuffle_buffer=1, prefetch=2, readers=2, verify=False, seed=0, loss_mask=AllTurns(),
    )  # fmt: skip
    data.trainer = SimpleNamespace(  # type: ignore[assignment]
        current_epoch=0, accumulate_grad_batches=1, world_size=8, global_rank=3,
        strategy=SimpleNamespace(root_device=torch.device("cpu")),
    )  # fmt: skip
    data.setup("fit")
    split = time.perf_counter()
    if resumed:
        data.resume_from = {"epoch": 0, "consumed": 50_000, "before": []}
    loader = data.train_dataloader()
    planned = time.perf_counter()
    packs = iter(loader)
    next(packs)
    first = time.perf_counter()
    memory = {"after_first_batch": memory_mb()}
    for number in range(1, PACKS):
        next(packs)
        if number in (PACKS // 3, PACKS - 1):
            memory[f"after_{number + 1}_batches"] = memory_mb()
    return {
        "seconds_to_first_batch": first - began,
        "of_these": {"open": opened - began, "split": split - opened, "plan": planned - split, "read": first - planned},
        "batches_of_a_rank": len(loader),
        "memory_mb": memory,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "samples": len(source.samples),
    }


def memory_mb() -> dict[str, float]:
    """Return what the process holds: of its own, and of mapped files, which ranks of a machine share."""
    facts = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {name: int(facts[key].split()[0]) / 1024 for name, key in (("own", "RssAnon"), ("mapped", "RssFile"))}


if __name__ == "__main__":
    main(sys.argv[1:])
