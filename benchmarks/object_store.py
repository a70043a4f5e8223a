"""Reading a feature store from a bucket, beside plain parallel ranged reads of the same bytes in the same run.

    pip install -c constraints.txt -e '.[objects]' 'moto[s3,server]'
    python benchmarks/object_store.py --out benchmarks/results/object_store.json

An S3 server (moto) in a process of its own waits 50 ms before each answer. Read are: a list of ranges by many requests
at once (obstore alone), packs of the store as training reads them, the same with an empty cache, again with that cache
(a restart), and the same store from a local folder beside a plain read of its files. Bytes per second, of the median of
the rounds; the first second of packs is left out (the first pack, where an epoch takes less than two).
"""

import argparse
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import obstore
import torch
from plain_files import read_rate
from random_head import SHAPES, RandomSamples, answered
from result import write_result
from synthetic_store import write_store

from eagle3.data.loader import PackLoader
from eagle3.data.pack import pack_samples
from eagle3.data.plan import PlannedPack, plan_epoch
from eagle3.features.joined import open_source
from eagle3.features.sample import Sample
from eagle3.features.source import REQUESTS, FeatureSource
from eagle3.head.draft_head import HeadConfig
from eagle3.storage.place import open_folder

SERVER = """
import sys, time
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import run_simple
app = DomainDispatcherApplication(create_backend_app)
def late(environ, start_response):
    time.sleep(float(sys.argv[2]))
    return app(environ, start_response)
import logging; logging.getLogger("werkzeug").setLevel(logging.ERROR)
run_simple("127.0.0.1", int(sys.argv[1]), late, threaded=True)
"""
SHAPE = replace(SHAPES["8b"], hidden_size=1024, vocab_size=2048, draft_vocab_size=1024)
URL, PACK_TOKENS = "s3://features/benchmark", 8192


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--latency", type=float, default=0.05, help="seconds before each answer")
    parser.add_argument("--megabytes", type=int, default=800)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rates: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder, server(options.latency):
        local, cache = Path(folder, "local"), Path(folder, "cache")
        for place in (str(local), URL):
            storage = open_folder(place, setting="features.path")
            write_store(storage, SHAPE, samples_of(options.megabytes * 10**6), shard_bytes=100e6)
        for _ in range(options.rounds):
            shutil.rmtree(cache, ignore_errors=True)
            ways: dict[str, Callable[[], float]] = {
                "bucket_ranged_reads": plain_ranges,
                "bucket_packs": lambda: packs(open_source(URL)),
                "bucket_packs_cold_cache": lambda: packs(open_source(URL, cache_dir=str(cache), cache_gb=10)),
                "bucket_packs_warm_cache": lambda: packs(open_source(URL, cache_dir=str(cache), cache_gb=10)),
                "local_plain_read": lambda: read_rate(local),
                "local_packs": lambda: packs(open_source(str(local))),
            }
            for name, way in ways.items():
                rates.setdefault(name, []).append(way() / 1e6)
    medians = {name: statistics.median(found) for name, found in rates.items()}
    print(medians)
    share = medians["bucket_packs"] / medians["bucket_ranged_reads"]
    settings = {"latency_s": options.latency, "requests_at_once": REQUESTS, "megabytes": options.megabytes}
    write_result(options.out, {**settings, "mb_per_s": medians, "rounds": rates, "packs_of_ranged_reads": share})


@contextmanager
def server(latency: float) -> Iterator[None]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    keys = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_DEFAULT_REGION": "us-east-1"}
    os.environ |= {**keys, "AWS_ENDPOINT_URL": url}
    with subprocess.Popen([sys.executable, "-c", SERVER, str(port), str(latency)]) as process:
        try:
            make_bucket(url)
            yield
        finally:
            process.kill()


def make_bucket(url: str) -> None:
    import boto3

    boto3.client("s3", endpoint_url=url).create_bucket(Bucket="features")  # tries again until the server is there


def samples_of(num_bytes: int, shape: HeadConfig = SHAPE) -> Iterator[Sample]:
    samples = RandomSamples(shape, torch.bfloat16, seed=0)
    written = 0
    while written < num_bytes:
        sample = samples.sample(f"p{written}#0", answered(300 + written % 700, 0.5))
        yield sample
        written += sample.aux_hidden_states.nbytes + sample.last_hidden_state.nbytes


def plain_ranges() -> float:
    """Read each sample's range once, with as many requests at once as the store makes; bytes per second."""
    bucket: Any = open_folder(URL, setting="data.path")
    refs = list(open_source(URL).samples)
    began = time.perf_counter()
    with ThreadPoolExecutor(REQUESTS) as requests:

        def size(ref: Any) -> int:
            at = ref.entry
            return len(obstore.get_range(bucket.store, ref.shard, start=at.offset, end=at.offset + at.size))

        total = sum(requests.map(size, refs))
    return total / (time.perf_counter() - began)


def packs(source: FeatureSource) -> float:
    """Read an epoch as training does; bytes per second after the first second."""
    [planned] = plan_epoch(source.samples, pack_tokens=PACK_TOKENS, world_size=1, accumulate=1, shuffle_seed=0)
    requests = ThreadPoolExecutor(REQUESTS) if source.remote else None

    def load(pack: PlannedPack) -> Any:
        read = requests.map if requests else map
        return pack_samples(list(read(source.read, pack.samples)), anchors_in_step=1, samples_in_step=1)

    loader = PackLoader(planned, load, prefetch=4, readers=2, epoch=0)  # type: ignore[arg-type]
    began = time.perf_counter()
    seen = [
        (time.perf_counter() - began, pack.aux_hidden_states.nbytes + pack.last_hidden_state.nbytes) for pack in loader
    ]  # type: ignore[attr-defined]
    first = next(number for number, (when, _) in enumerate(seen) if when > 1 or seen[-1][0] < 2)
    return sum(size for _, size in seen[first + 1 :]) / (seen[-1][0] - seen[first][0])


if __name__ == "__main__":
    main(sys.argv[1:])
