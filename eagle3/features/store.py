"""The feature store: shards, their manifest, and the target's embedding and lm_head.

    manifest.json         what made the store: target, template, capture, dtype, counts; sha256 of every shard
    target.safetensors    embedding [V, H] and lm_head [V, H] (one tensor if tied)
    shard-*.tar, *.index  samples (shards.py)

Shapes: V target vocabulary, H hidden size.
"""

import hashlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Int
from safetensors.torch import save
from torch import Tensor

from eagle3.errors import InputError
from eagle3.features.index import index_name
from eagle3.features.manifest import (
    MAKE_FEATURES,
    MadeFrom,
    ShardEntry,
    read_index,
    read_manifest,
)
from eagle3.features.sample import Sample, views
from eagle3.features.samples import IndexedShard, SampleRef, Samples
from eagle3.features.shards import ShardReader, hash_of, require_sha256, verify_file
from eagle3.features.source import REQUESTS, TargetWeights
from eagle3.progress import Bar
from eagle3.storage.files import sha256_json
from eagle3.storage.folder import Storage, write_file
from eagle3.target.facts import TargetConfig

TARGET_WEIGHTS = "target.safetensors"
HASHED_AT_ONCE = 8  # shards, each on a core of its own


class FeatureStore:
    """A `FeatureSource` of finished shards; nothing but the manifest and the indices is read until samples are."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self.manifest = read_manifest(storage)
        with ThreadPoolExecutor(REQUESTS if storage.remote else 2) as readers:  # hashing lets go of the interpreter
            self.samples = Samples.of_shards(list(readers.map(self._samples_of, self.manifest.shards)))
        self._shards = {shard.name: shard for shard in self.manifest.shards}
        self._readers: dict[str, ShardReader] = {}

    @property
    def location(self) -> str:
        return self.storage.location

    @property
    def made_from(self) -> MadeFrom:
        return self.manifest.made_from

    @property
    def target_config(self) -> TargetConfig:
        return self.manifest.target_config

    def describe(self) -> dict[str, Any]:
        """Return everything of the manifest but the long lists."""
        return {key: value for key, value in asdict(self.manifest).items() if key not in ("shards", "answer_counts")}

    def read(self, ref: SampleRef) -> Sample:
        return self._reader(ref.shard).read(ref.entry)

    def read_run(self, refs: Sequence[SampleRef]) -> list[Sample]:
        begin, last = refs[0].entry.offset, refs[-1].entry
        reader = copy(self._reader(refs[0].shard))
        content = self.storage.read(reader.name, begin, last.offset + last.size)
        if not self.remote:  # a copy: views of a mapped file would be read when they are looked at, here and there
            content = memoryview(bytearray(content))
        reader.storage = ReadRange(self.storage, content, begin)  # type: ignore[assignment]  # it does nothing but read
        return [reader.read(ref.entry) for ref in refs]

    @property
    def remote(self) -> bool:
        return self.storage.remote

    def verify(self, *, rank: int = 0, world_size: int = 1) -> None:
        shards = self.manifest.shards[rank::world_size]
        total = sum(shard.bytes for shard in shards)
        with (
            Bar(total=total, unit="B", unit_scale=True, desc="verify shards", disable=rank > 0) as progress,
            ThreadPoolExecutor(HASHED_AT_ONCE) as threads,
        ):
            for shard, _ in zip(shards, threads.map(self._verify, shards), strict=True):
                progress.update(shard.bytes)

    def _verify(self, shard: ShardEntry) -> None:
        self._reader(shard.name)
        if not self.remote:  # else each sample is held against its hash when it comes
            verify_file(self.storage, shard.name, shard.sha256)

    def target_weights(self) -> TargetWeights:
        return self._target_weights

    @cached_property
    def _target_weights(self) -> TargetWeights:
        """Read once what the head and the loss both ask for: the hash of gigabytes takes seconds."""
        path = f"{self.location}/{TARGET_WEIGHTS}"
        try:
            content = self.storage.read(TARGET_WEIGHTS)
            require_sha256(content, path, self.manifest.target_weights_sha256)
            tensors = views(content)
            embedding = tensors["embedding"]
        except InputError:
            raise
        except Exception as error:  # whatever damaged bytes can make of a header
            raise InputError(
                f"{path} is missing or damaged ({error}); copy it again, or delete it and run: {MAKE_FEATURES}"
            ) from None
        lm_head = tensors.get("lm_head", embedding)
        return embedding, lm_head

    @cached_property
    def answer_counts(self) -> Int[Tensor, " V"]:
        counts = torch.zeros(self.target_config.vocab_size, dtype=torch.long)
        for token, count in self.manifest.answer_counts:
            counts[token] = count
        return counts

    @property
    def fingerprint(self) -> str:
        return sha256_json([hash_of(self.made_from), [shard.sha256 for shard in self.manifest.shards]])

    def _reader(self, shard: str) -> ShardReader:
        if shard not in self._readers:  # two threads may both open a shard; the second reader stays
            self._readers[shard] = ShardReader(self.storage, self._shards[shard], teachers=self.made_from.teachers)
        return self._readers[shard]

    def _samples_of(self, shard: ShardEntry) -> IndexedShard:
        index = read_index(self.storage, index_name(shard.name), shard.index_sha256)
        return IndexedShard(self.location, shard.name, index)


@dataclass(frozen=True)
class ReadRange:
    """What was read of a shard from `begin` on. Behind a network, a sample that does not have its hash is asked for
    again."""

    storage: Storage
    content: memoryview
    begin: int

    def read(self, name: str, start: int, stop: int, *, sha256: str) -> memoryview:
        content = self.content[start - self.begin : stop - self.begin]
        if self.storage.remote and hashlib.sha256(content).hexdigest() != sha256:
            return self.storage.read(name, start, stop, sha256=sha256)
        return content


def save_target_weights(storage: Storage, embedding: Tensor, lm_head: Tensor, *, dtype: torch.dtype) -> None:
    """Write the target's embedding and `lm_head`; tied weights are stored once."""
    tensors = {"embedding": embedding.to("cpu", dtype).contiguous()}
    if lm_head.data_ptr() != embedding.data_ptr():
        tensors["lm_head"] = lm_head.to("cpu", dtype).contiguous()
    write_file(storage, TARGET_WEIGHTS, save(tensors))
