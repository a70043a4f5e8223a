"""Reading a local store: packs as training reads them, beside a plain read of the same files, litdata and webdataset.

    pip install litdata
    python benchmarks/local_read.py --folder DIR --out benchmarks/results/local_read.json      # 10 GB in DIR, 3 minutes

Cold: the files' pages are dropped from memory before each way (posix_fadvise); warm: read once before. Every way hands
out all bytes of every sample, in one process; ours and litdata in random order, webdataset and the plain read from
front to back. Bytes per second, the median of the rounds.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from object_store import samples_of
from plain_files import forget, read
from random_head import SHAPES
from result import write_result
from synthetic_store import write_store

from eagle3.data.plan import plan_epoch
from eagle3.features.joined import open_source
from eagle3.features.sample import to_bytes
from eagle3.storage.folder import LocalFolder
from eagle3.storage.pages import bring_in

SHAPE = replace(SHAPES["8b"], vocab_size=2048, draft_vocab_size=1024)
PACK_TOKENS = 16384
BUFFER = np.zeros(2**28, np.uint8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--megabytes", type=int, default=5000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    store, lit = options.folder / "store", options.folder / "litdata"
    if not (store / "manifest.json").exists():
        written = samples_of(options.megabytes * 10**6, SHAPE)
        write_store(LocalFolder(store), SHAPE, written, shard_bytes=512e6)
    ways: dict[str, tuple[Path, Callable[[], int]]] = {
        "plain_read": (store, lambda: read(store)),
        "packs": (store, lambda: packs(store)),
        "webdataset": (store, lambda: webdataset_read(store)),
    }
    try:
        import litdata  # noqa: F401
    except ImportError:
        print("litdata is not installed, it is left out")
    else:
        if not lit.exists():
            write_litdata(store, lit)
        ways["litdata"] = (lit, lambda: litdata_read(lit))
    rates: dict[str, dict[str, list[float]]] = {"cold": {}, "warm": {}}
    for _ in range(options.rounds):
        for name, (folder, way) in ways.items():
            for state in rates:
                forget(folder) if state == "cold" else read(folder)
                began = time.perf_counter()
                total = way()
                rates[state].setdefault(name, []).append(total / (time.perf_counter() - began) / 1e6)
    medians = {state: {name: statistics.median(each) for name, each in found.items()} for state, found in rates.items()}
    shares = {state: found["packs"] / found["plain_read"] for state, found in medians.items()}
    result = {"megabytes": options.megabytes, "mb_per_s": medians, "packs_of_plain_read": shares, "rounds": rates}
    print(medians, shares)
    write_result(options.out, result)


def packs(store: Path) -> int:
    """Read an epoch in its order, as training does."""
    source = open_source(str(store))
    [planned] = plan_epoch(source.samples, pack_tokens=PACK_TOKENS, world_size=1, accumulate=1, shuffle_seed=0)
    total = 0
    for pack in planned:
        for sample in map(source.read, pack.samples):
            for rows in (sample.aux_hidden_states, sample.last_hidden_state):
                assert isinstance(rows, torch.Tensor)
                bring_in(rows.data_ptr(), rows.nbytes)  # as data/pack.py does
                total += copied(rows.view(torch.uint8).numpy().reshape(-1))
    return total


def copied(data: Any) -> int:
    """Copy a sample's bytes to where a pack would have them, and return how many they are."""
    array = data if isinstance(data, np.ndarray) else np.frombuffer(data, np.uint8)
    BUFFER[: len(array)] = array
    return len(array)


def webdataset_read(store: Path) -> int:
    import webdataset

    shards = [str(path) for path in sorted(store.glob("shard-*.tar"))]
    return sum(
        copied(row["safetensors"]) for row in webdataset.WebDataset(shards, shardshuffle=False, empty_check=False)
    )


def write_litdata(store: Path, folder: Path) -> None:
    from litdata.streaming.writer import BinaryWriter

    source = open_source(str(store))
    writer = BinaryWriter(str(folder), chunk_bytes=512 * 10**6)
    for number, ref in enumerate(source.samples):
        writer.add_item(number, to_bytes(source.read(ref)))
    writer.done()
    writer.merge()


def litdata_read(folder: Path) -> int:
    import litdata

    return sum(copied(item) for item in litdata.StreamingDataset(str(folder), shuffle=True, drop_last=False))


if __name__ == "__main__":
    main()
