"""Streaming order: shards in random order, each read from front to back, and shuffled through a buffer.

For stores that are larger than memory and cache: neighbouring samples are read together, in ranges of many megabytes.
Like any plan (plan.py) it is the same in every process, resumes exactly, and gives each rank its own samples.
Shapes: N samples.
"""

import threading
from bisect import bisect_right
from collections.abc import Sequence
from concurrent.futures import Executor, Future

import numpy as np

from eagle3.data.plan import EpochPlan, fill, halve_until, spread
from eagle3.errors import InputError
from eagle3.features.sample import Sample
from eagle3.features.samples import SampleRef, Samples
from eagle3.features.source import FeatureSource

RUN_BYTES = 64 * 2**20  # size of a range that is read at once; a single sample may be larger
GAP_BYTES = 2**20  # unused bytes that are read to save a request: validation samples are between training samples
AHEAD = 4  # ranges that are read ahead


def plan_stream(
    samples: Samples, *, pack_tokens: int, world_size: int, accumulate: int, shuffle_seed: int, buffer: int
) -> list[EpochPlan]:
    """Return a plan per rank, all with the same number of packs; `stream` is the order in which a rank reads."""
    drawn = np.random.default_rng(shuffle_seed)
    streams = cut_evenly(shards_in_random_order(samples, drawn), samples.tokens, world_size)
    orders = [through_buffer(stream, buffer, drawn) for stream in streams]
    packed = [fill(samples.tokens[order], pack_tokens) for order in orders]
    most = max(len(bounds) for bounds in packed) - 1
    packed = [halve_until(bounds, lambda count: count == most, world_size) for bounds in packed]
    firsts = np.cumsum([0, *(len(order) for order in orders)])
    bounds = np.concatenate(
        [*(each[:-1] + first for each, first in zip(packed, firsts[:-1], strict=True)), firsts[-1:]]
    )
    packs = np.arange(world_size * most).reshape(world_size, most)
    return spread(samples, np.concatenate(orders), bounds, packs, accumulate, streams=streams)


def shards_in_random_order(samples: Samples, drawn: np.random.Generator) -> np.ndarray:
    """Return indices of `samples`: whole shards in random order, and within a shard the order of its file.

    A shard whose samples occur several times, because of a weight, counts as several shards."""
    by_number = np.argsort(samples.numbers, kind="stable")
    numbers = samples.numbers[by_number]
    repeat = np.arange(len(numbers)) - np.searchsorted(numbers, numbers)
    _, unit = np.unique(samples.shard_numbers()[by_number] * (repeat.max() + 1) + repeat, return_inverse=True)
    rank_of_unit = drawn.permutation(unit.max() + 1)
    return by_number[np.argsort(rank_of_unit[unit], kind="stable")]


def cut_evenly(stream: np.ndarray, tokens: np.ndarray, parts: int) -> list[np.ndarray]:
    """Cut a stream into parts with about the same number of tokens; a cut may split a shard."""
    ends = np.cumsum(tokens[stream], dtype=np.int64)
    cuts = np.searchsorted(ends, ends[-1] * np.arange(1, parts) // parts, side="right")
    cut = np.split(stream, cuts)
    if not all(map(len, cut)):
        raise InputError(
            f"{len(stream)} samples cannot be spread over trainer.devices={parts} ranks; use fewer devices or more data"
        )
    return cut


def through_buffer(stream: np.ndarray, buffer: int, drawn: np.random.Generator) -> np.ndarray:
    """Return the order in which samples leave a buffer, in which each stays while 0 to `buffer` others enter."""
    leaves = np.arange(len(stream)) + drawn.random(len(stream)) * buffer
    return stream[np.argsort(leaves, kind="stable")]


class StreamReader:
    """Reads a rank's stream range by range, ahead of the packs that take the samples.

    Samples that are read and not yet taken stay in memory: about as many as the buffer, and AHEAD ranges. `stream`
    has indices of `samples`, without those that were trained before a resume."""

    def __init__(self, source: FeatureSource, samples: Samples, stream: np.ndarray, threads: Executor) -> None:
        self.source, self.samples, self.stream, self.threads = source, samples, stream, threads
        self._position = np.full(len(samples), -1)
        self._position[stream] = np.arange(len(stream))
        self._begins: list[int] = []  # positions where the requested ranges begin
        self._next = 0
        self._read: dict[int, tuple[Future[list[Sample]], int]] = {}  # by position: a range, and the index in it
        self._asking = threading.Lock()

    def take(self, places: Sequence[int]) -> list[Sample]:
        """Return samples, each of which can be taken once. Safe to call from several threads."""
        positions = self._position[list(places)].tolist()
        with self._asking:
            while self._next < len(self.stream) and self._ranges_after(max(positions)) < AHEAD:
                self._ask()
            found = [self._read.pop(position) for position in positions]
        return [run.result()[number] for run, number in found]

    def _ranges_after(self, position: int) -> int:
        if self._next <= position:
            return -1
        return len(self._begins) - bisect_right(self._begins, position)

    def _ask(self) -> None:
        refs = [self.samples[int(self.stream[self._next])]]
        while self._next + len(refs) < len(self.stream):
            ref = self.samples[int(self.stream[self._next + len(refs)])]
            if not in_one_range(refs, ref):
                break
            refs.append(ref)
        run = self.threads.submit(self.source.read_run, refs)
        self._read |= {self._next + number: (run, number) for number in range(len(refs))}
        self._begins.append(self._next)
        self._next += len(refs)


def in_one_range(refs: list[SampleRef], ref: SampleRef) -> bool:
    """Say whether one more sample is worth reading together with those before it."""
    first, last, entry = refs[0], refs[-1].entry, ref.entry
    end = last.offset + last.size
    return (
        (ref.store, ref.shard) == (first.store, first.shard)
        and end <= entry.offset <= end + GAP_BYTES
        and entry.offset + entry.size - first.entry.offset <= RUN_BYTES
    )
