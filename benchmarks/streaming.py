"""data.order=streaming beside the full shuffle: how fast packs come. What heads then accept: training_ways.py.

    PYTHONPATH=. python benchmarks/streaming.py --out benchmarks/results/streaming.json

Read are stores of large and of small samples, from files that the system has forgotten and from an S3 server (moto)
that waits before each answer; beside them the files read plainly, and by webdataset's own reader, which compares no
hash.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
import webdataset
from object_store import SHAPE, URL, samples_of, server
from plain_files import forget, read_rate
from result import write_result
from synthetic_store import write_store

from eagle3.data.datamodule import FeatureData
from eagle3.data.mix import Rules
from eagle3.features.joined import open_source
from eagle3.features.loss_mask import AllTurns
from eagle3.features.sample import from_bytes
from eagle3.features.source import FeatureSource
from eagle3.head.batch import prepare_ttt
from eagle3.storage.place import open_folder

ROOT = Path(__file__).resolve().parents[1]
HIDDEN = {"large": 1024, "small": 32}  # 8.2 and 0.26 kB a token
ORDERS = ("shuffled", "streaming")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--latency", type=float, default=0.05, help="seconds before each answer")
    parser.add_argument("--megabytes", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    rates = {kind: measured(kind, options) for kind in HIDDEN}
    settings = {"latency_s": options.latency, "megabytes": options.megabytes, "buffer": 256}
    write_result(options.out, {**settings, "mb_per_s": rates})


def measured(kind: str, options: argparse.Namespace) -> dict[str, float]:
    """Return MB/s of each way, the median of the rounds."""
    shape = replace(SHAPE, hidden_size=HIDDEN[kind])
    rates: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder, server(options.latency):
        for place in (folder, URL):
            storage = open_folder(place, setting="features.path")
            write_store(storage, shape, samples_of(options.megabytes * 10**6, shape), shard_bytes=100e6)
        ways: dict[str, Callable[[], float]] = {
            "files": lambda: read_rate(Path(folder)),
            "webdataset": lambda: by_webdataset(Path(folder)),
            **{f"local_{order}": partial(packs, folder, order) for order in ORDERS},
            **{f"bucket_{order}": partial(packs, URL, order) for order in ORDERS},
        }
        for _ in range(options.rounds):
            for name, way in ways.items():
                forget(Path(folder))
                rates.setdefault(name, []).append(way() / 1e6)
    print(kind, rates, flush=True)
    return {name: statistics.median(found) for name, found in rates.items()}


def by_webdataset(folder: Path) -> float:
    shards = [str(path) for path in sorted(folder.glob("*.tar"))]
    began, total = time.perf_counter(), 0
    for item in webdataset.WebDataset(shards, shardshuffle=100).shuffle(256):
        blob = memoryview(bytearray(item["safetensors"]))
        from_bytes(blob, sample_id=item["__key__"], teachers="answers")
        total += len(blob)
    return total / (time.perf_counter() - began)


def packs(path: str, order: str) -> float:
    """Return bytes per second of an epoch's packs, opening and planning left out."""
    source = open_source(path)
    loader = data_of(source, order).train_dataloader()
    total = sum(ref.entry.size for pack in loader.planned for ref in pack.samples)
    began = time.perf_counter()
    for _ in loader:
        pass
    return total / (time.perf_counter() - began)


def data_of(source: FeatureSource, order: str) -> FeatureData:
    data = FeatureData(
        source=source, prepare=partial(prepare_ttt, ttt_steps=3), pack_tokens=8192, val_fraction=1e-9,
        limit_samples=None, rules=Rules(), weights=None, order=order,
        shuffle_buffer=256, prefetch=2, readers=2, verify=False, seed=0, loss_mask=AllTurns(),
    )  # fmt: skip
    data.trainer = SimpleNamespace(  # type: ignore[assignment]
        current_epoch=0, accumulate_grad_batches=1, world_size=1, global_rank=0,
        strategy=SimpleNamespace(root_device=torch.device("cpu")),
    )  # fmt: skip
    data.setup("fit")
    return data


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
