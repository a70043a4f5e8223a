"""The samples of a source as columns, from which an epoch is planned. The entry of a sample is made when it is needed.

Shapes: N samples.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import Any, overload

import numpy as np

from eagle3.features.index import FORMAT_VERSION, SampleEntry, ShardFacts, ShardIndex, build_index


@dataclass(frozen=True)
class SampleRef:
    """A sample: the location of its store, its shard and its entry there."""

    store: str
    shard: str
    entry: SampleEntry


@dataclass(frozen=True)
class IndexedShard:
    store: str
    name: str
    index: ShardIndex

    def __len__(self) -> int:
        return len(self.index)

    def ref(self, number: int) -> SampleRef:
        return SampleRef(self.store, self.name, self.index.entry(number))


@dataclass(frozen=True, eq=False)
class Samples(Sequence[SampleRef]):
    """`numbers` count through the shards; `tokens`, `anchors` and `split` are those of the samples, in this order."""

    shards: tuple[IndexedShard, ...]
    numbers: np.ndarray
    tokens: np.ndarray
    anchors: np.ndarray
    split: np.ndarray

    @classmethod
    def of_shards(cls, shards: Sequence[IndexedShard]) -> "Samples":
        def column(name: str) -> np.ndarray:
            return np.concatenate([np.empty(0, np.int32), *(shard.index.columns[name] for shard in shards)])

        count = sum(len(shard) for shard in shards)
        tokens, anchors = column("tokens").astype(np.int32), column("anchors").astype(np.int32)
        return cls(tuple(shards), np.arange(count), tokens, anchors, column("split"))

    @classmethod
    def of(cls, refs: Sequence[SampleRef]) -> "Samples":
        """Make them of references, for sources of few samples; those that are not files need no sha256."""
        shards = []
        for (store, name), group in groupby(refs, key=lambda ref: (ref.store, ref.shard)):
            facts = ShardFacts(format_version=FORMAT_VERSION, shard=name, made_from="", bytes=0, sha256="")
            entries = [replace(ref.entry, sha256=ref.entry.sha256 or 64 * "0") for ref in group]
            shards.append(IndexedShard(store, name, build_index(facts, entries, {})))
        return cls.of_shards(shards)

    @cached_property
    def _ends(self) -> np.ndarray:
        return np.cumsum([len(shard) for shard in self.shards])

    def __len__(self) -> int:
        return len(self.numbers)

    @overload
    def __getitem__(self, place: int) -> SampleRef: ...
    @overload
    def __getitem__(self, place: slice) -> "Samples": ...
    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return self.take(np.arange(len(self))[place])
        number, ends = int(self.numbers[place]), self._ends
        shard = int(np.searchsorted(ends, number, side="right"))
        ref = self.shards[shard].ref(number - int(ends[shard]) + len(self.shards[shard]))
        anchors = int(self.anchors[place])  # those under the loss mask, where it was counted
        return ref if ref.entry.anchors == anchors else replace(ref, entry=replace(ref.entry, anchors=anchors))

    def shards_by_store(self) -> list[int]:
        """Count the shards of each store, in their order."""
        return [len([*shards]) for _, shards in groupby(self.shards, key=lambda shard: shard.store)]

    def shard_numbers(self) -> np.ndarray:
        """Return for each sample the number of its shard in `shards`."""
        return np.searchsorted(self._ends, self.numbers, side="right")

    def sources(self) -> tuple[list[str], np.ndarray]:
        """Return the names of all sources, and for each sample the number of its prompt's source."""
        numbers: dict[str, int] = {}
        of_all = [np.empty(0, np.int64)]
        for shard in self.shards:
            of_shard = np.array([numbers.setdefault(name, len(numbers)) for name in shard.index.sources], np.int64)
            of_all.append(of_shard[shard.index.columns["source"]])
        return [*numbers], np.concatenate(of_all)[self.numbers]

    def whole(self) -> np.ndarray:
        """Return for each sample whether no answer in it was cut."""
        of_shards = (shard.index.columns["whole"] > 0 for shard in self.shards)
        return np.concatenate([np.empty(0, bool), *of_shards])[self.numbers]

    def take(self, chosen: np.ndarray) -> "Samples":
        """Return the samples at these positions, in this order, or the marked samples."""
        columns = (self.numbers, self.tokens, self.anchors, self.split)
        return Samples(self.shards, *(column[chosen] for column in columns))

    def names(self) -> Iterator[tuple[str, str]]:
        """Yield the store's location and the id of each sample, in this order."""
        if len(self) == sum(len(shard) for shard in self.shards) and bool((np.diff(self.numbers) == 1).all()):
            for shard in self.shards:
                yield from ((shard.store, sample_id) for sample_id in shard.index.ids())
        else:
            for ref in self:
                yield ref.store, ref.entry.id
