"""The feature store: shards, their manifest, and the target's embedding and lm_head.

    manifest.json         what made the store: target, template, capture, dtype, counts; sha256 of every shard
    target.safetensors    embedding [V, H] and lm_head [V, H] (one tensor if tied)
    shard-*.tar, *.index  samples (shards.py)

Shapes: V target vocabulary, H hidden size.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Int
from safetensors.torch import save
from torch import Tensor

from eagle3.errors import InputError
from eagle3.features.index import index_name
from eagle3.features.manifest import TARGET_WEIGHTS, ShardEntry, read_index, read_manifest, read_whole, totals
from eagle3.features.sample import Sample, views
from eagle3.features.samples import IndexedShard, SampleRef, Samples
from eagle3.features.shards import decode, hash_made_from, missing_shard, require_sha256, require_shard
from eagle3.features.source import REQUESTS, TargetWeights
from eagle3.progress import Bar
from eagle3.storage.files import sha256_json
from eagle3.storage.folder import Readable, Storage, write_file

HASHED_AT_ONCE = 8  # shards; more where this rank has more cores


class FeatureStore:
    """A `FeatureSource` of finished shards; opening it reads only the manifest and the indices.

    `first_shards`: only so many, as the store was before it gained samples (they come in new shards, after the others).
    """

    def __init__(self, storage: Readable, *, first_shards: int | None = None) -> None:
        self.storage, self.location, self.remote = storage, storage.location, storage.remote
        self.manifest = read_manifest(storage)
        self.made_from, self.target_config = self.manifest.made_from, self.manifest.target_config
        shards = self.manifest.shards[:first_shards]
        with ThreadPoolExecutor(REQUESTS if storage.remote else 2) as readers:  # hashing lets go of the interpreter
            indexed = list(readers.map(self._read_indexed_shard, shards))
        self.samples = Samples.of_shards(indexed)
        if first_shards is not None:
            counted = totals([shard.index for shard in indexed], self.target_config.vocab_size)
            self.manifest = replace(self.manifest, shards=shards, **counted)
        self._shards = {shard.name: shard for shard in self.manifest.shards}
        self._checked: set[str] = set()

    def describe(self) -> dict[str, Any]:
        """Return everything of the manifest but the long lists."""
        return {key: value for key, value in asdict(self.manifest).items() if key not in ("shards", "answer_counts")}

    def read(self, ref: SampleRef) -> Sample:
        """Read a sample; locally, its large tensors are views of the file, so that unused parts are never read."""
        self._check(ref.shard)
        begin, end = ref.entry.offset, ref.entry.offset + ref.entry.size
        try:
            content = self.storage.read(ref.shard, begin, end, sha256=ref.entry.sha256)
        except FileNotFoundError:  # it was there at the start
            raise missing_shard(self.storage, ref.shard) from None
        return decode(content, ref.entry, path=f"{self.location}/{ref.shard}", teachers=self.made_from.teachers)

    def verify(self, *, rank: int = 0, world_size: int = 1) -> None:
        shards = self.manifest.shards[rank::world_size]
        total = sum(shard.bytes for shard in shards)
        with (
            Bar(total=total, unit="B", unit_scale=True, desc="verify shards", disable=rank > 0) as progress,
            ThreadPoolExecutor(max(HASHED_AT_ONCE, (os.cpu_count() or 1) // world_size)) as threads,
        ):
            damage = []
            for shard, wrong in zip(shards, threads.map(self._wrong, shards), strict=True):
                progress.update(shard.bytes)
                if wrong:
                    damage.append(wrong)
        if damage:
            others = f"; {len(damage) - 1} more: {'; '.join(damage[1:])}" if damage[1:] else ""
            raise InputError(f"{damage[0]}{others}")

    def _wrong(self, shard: ShardEntry) -> str:
        try:
            self._check(shard.name)
            if not self.remote:  # else each sample is compared with its hash when it is read
                path = f"{self.location}/{shard.name}"
                require_sha256(self.storage.read(shard.name), path, shard.sha256)
        except InputError as error:
            return str(error)
        return ""

    def target_weights(self) -> TargetWeights:
        return self._target_weights

    @cached_property
    def _target_weights(self) -> TargetWeights:
        """Read once what the head and the loss both ask for: the hash of gigabytes takes seconds."""
        content = read_whole(self.storage, TARGET_WEIGHTS)
        require_sha256(content, f"{self.location}/{TARGET_WEIGHTS}", self.manifest.target_weights_sha256)
        tensors = views(content)
        return tensors["embedding"], tensors.get("lm_head", tensors["embedding"])

    @cached_property
    def answer_counts(self) -> Int[Tensor, " V"]:
        counts = torch.zeros(self.target_config.vocab_size, dtype=torch.long)
        for token, count in self.manifest.answer_counts:
            counts[token] = count
        return counts

    @property
    def fingerprint(self) -> str:
        return sha256_json([hash_made_from(self.made_from), [shard.sha256 for shard in self.manifest.shards]])

    def _check(self, shard: str) -> None:
        if shard not in self._checked:
            require_shard(self.storage, self._shards[shard])
            self._checked.add(shard)

    def _read_indexed_shard(self, shard: ShardEntry) -> IndexedShard:
        index = read_index(self.storage, index_name(shard.name), shard.index_sha256)
        return IndexedShard(self.location, shard.name, index)


def save_target_weights(storage: Storage, embedding: Tensor, lm_head: Tensor, *, dtype: torch.dtype) -> None:
    """Write the target's embedding and `lm_head`; tied weights are stored once."""
    write_file(storage, TARGET_WEIGHTS, save(target_tensors(embedding, lm_head, dtype=dtype)))


def target_tensors(embedding: Tensor, lm_head: Tensor, *, dtype: torch.dtype) -> dict[str, Tensor]:
    tensors = {"embedding": embedding.to("cpu", dtype).contiguous()}
    if lm_head.data_ptr() != embedding.data_ptr():
        tensors["lm_head"] = lm_head.to("cpu", dtype).contiguous()
    return tensors
