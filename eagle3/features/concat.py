"""Several feature stores of one target as one source: more answers to each prompt, or data that grew in parts.

Shapes: V target vocabulary, H hidden size.
"""

import logging
from collections.abc import Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from eagle3.errors import InputError
from eagle3.features.index import SHARDS
from eagle3.features.manifest import MadeFrom
from eagle3.features.sample import Sample
from eagle3.features.samples import SampleRef, Samples
from eagle3.features.source import FeatureSource, TargetWeights, as_setting
from eagle3.features.store import FeatureStore
from eagle3.storage.cache import CachedFolder
from eagle3.storage.files import sha256_json
from eagle3.storage.folder import LocalFolder, Readable, open_folder
from eagle3.target.identity import require_same_target

log = logging.getLogger(__name__)

SAME_IN_ALL = ("capture_layers", "dtype", "teachers", "reasoning_ids")  # what packs and loss masks depend on
TOTALS = ("samples", "tokens", "answer_tokens", "bytes")


class ConcatStores:
    """A `FeatureSource`: the samples of several stores, one store after the other, read from where they are."""

    def __init__(self, stores: list[FeatureStore]) -> None:
        self.stores = stores
        require_joinable([(store.location, store.made_from, store.fingerprint) for store in stores], "features")
        self.location = [store.location for store in stores]
        self.samples = Samples.of_shards([shard for store in stores for shard in store.samples.shards])
        self.remote = any(store.remote for store in stores)
        # What packs and loss masks depend on is the same in all.
        self.made_from, self.target_config = stores[0].made_from, stores[0].target_config
        self._store_at = {store.location: store for store in stores}

    def describe(self) -> dict[str, Any]:
        totals = {key: sum(getattr(store.manifest, key) for store in self.stores) for key in TOTALS}
        return {**totals, "stores": [asdict(store.made_from) for store in self.stores]}

    def read(self, ref: SampleRef) -> Sample:
        return self._store_at[ref.store].read(ref)

    def verify(self, *, rank: int = 0, world_size: int = 1) -> None:
        for store in self.stores:
            store.verify(rank=rank, world_size=world_size)

    def target_weights(self) -> TargetWeights:
        return self.stores[0].target_weights()

    @cached_property
    def answer_counts(self) -> Int[Tensor, " V"]:
        return torch.stack([store.answer_counts for store in self.stores]).sum(0)

    @property
    def fingerprint(self) -> str:
        """Return a hash of all stores; their order decides the plan of an epoch, so it counts."""
        return sha256_json([store.fingerprint for store in self.stores])


def open_recorded(path: str | list[str] | None, hash: str, shards: list[int] | None, **cache: Any) -> FeatureSource:
    """Open what `data.path` names; without the samples that it gained since a training recorded `hash` and `shards`.

    Its fingerprint is `hash`, unless it has changed in another way."""
    source = open_source(path, **cache)
    if source.fingerprint == hash or shards is None or len(shards) != len(source.samples.shards_by_store()):
        return source
    before = open_source(path, **cache, first_shards=shards)
    if before.fingerprint != hash:
        return source
    log.warning(
        "%s has %d samples more than the %d that the training began with, which alone are used; to train on all, start "
        "a new training with init_from=HEAD",
        as_setting(source.location), len(source.samples) - len(before.samples), len(before.samples),
    )  # fmt: skip
    return before


def open_source(
    path: str | list[str] | None,
    *,
    cache_dir: str | None = None,
    cache_gb: float = 0,
    first_shards: list[int] | None = None,
) -> FeatureSource:
    """Open what `data.path` names, stores in buckets through a cache if there is one. A list of one is that store."""
    if not path:
        raise InputError("data.path is not set; give a feature store, e.g. data.path=DIR/features")
    paths = [path] if isinstance(path, str) else path
    folders: list[Readable] = [open_folder(each, setting="data.path") for each in paths]
    if cache_dir is not None:
        if "://" in cache_dir:  # as a path it would name a folder below the working directory
            raise InputError(
                f"data.cache_dir={cache_dir} is a URL, and must be a local folder; only features can be in buckets: "
                f"features.path, data.path"
            )
        limit = int(cache_gb * 1e9)
        folders = [CachedFolder(each, Path(cache_dir), limit=limit) if each.remote else each for each in folders]
    of_each: list[int | None] = [*first_shards] if first_shards else [None] * len(folders)
    stores = [FeatureStore(folder, first_shards=n) for folder, n in zip(folders, of_each, strict=True)]
    for folder, store in zip(folders, stores, strict=True):
        there = folder.names(SHARDS) if isinstance(folder, LocalFolder) and first_shards is None else []
        if unnamed := sorted({*there} - {shard.name for shard in store.manifest.shards}):
            log.warning(
                "data.path=%s: %d shards there are not in its manifest.json and are not used, e.g. %s: precompute.py "
                "has not finished, or the files of several stores are in one folder; give those as data.path=[A,B]",
                store.location, len(unnamed), unnamed[0],
            )  # fmt: skip
    return stores[0] if len(stores) == 1 else ConcatStores(stores)


def require_joinable(parts: Sequence[tuple[str, MadeFrom, str]], of: str) -> None:
    """Raise InputError unless a pack may hold samples of all parts, and none comes twice; answers may be sampled in
    different ways. A part is a location, what made it, and the hash of it; `of` is what the parts are."""
    location, ours, _ = parts[0]
    before: dict[str, str] = {}  # locations by hash
    for other, theirs, hash in parts:
        require_same_target(
            ours.target, theirs.target, expected_from=f"data.path={location}", actual_from=f"data.path={other}"
        )
        differing = [key for key in SAME_IN_ALL if getattr(ours, key) != getattr(theirs, key)]
        if differing:
            values = ", ".join(f"{key}: {getattr(ours, key)} and {getattr(theirs, key)}" for key in differing)
            raise InputError(
                f"data.path=[{location},{other}] cannot be trained on as one, they differ ({values}); leave one out, "
                f"or make it again with the other's features.* settings: precompute.py 'stages=[features]'"
            )
        if hash in before:  # whatever the folders are called
            raise InputError(f"data.path names the same {of} twice, {before[hash]} and {other}; leave one out")
        before[hash] = other
