"""The manifest of a feature store, and reading its indices (index.py)."""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from eagle3.errors import InputError
from eagle3.features.index import FORMAT_VERSION, OLDER_VERSIONS, ShardIndex, index_bytes, parse_index
from eagle3.settings.flat import differences
from eagle3.storage.files import WHATEVER
from eagle3.storage.folder import Readable, Storage, write_file
from eagle3.storage.prefault import sha256_bytes
from eagle3.storage.records import Record, parse_sealed, sealed_bytes
from eagle3.target.facts import TargetConfig
from eagle3.target.identity import TargetIdentity

MANIFEST, TARGET_WEIGHTS = "manifest.json", "target.safetensors"
MAKE_FEATURES = "python precompute.py target.path=TARGET out_dir=DIR 'stages=[features]'"


@dataclass(frozen=True, kw_only=True)
class MadeFrom(Record):
    """The identity of a store: everything that decides its samples, apart from which prompts have an answer so far.

    responses: the settings that made the answers and the hash of their prompts, by the name that they have in every
    store so far.
    """

    target: TargetIdentity
    responses: dict[str, Any]
    capture_layers: list[int]  # indices into Hugging Face's `hidden_states`
    captured_by: str  # the extractor
    target_dtype: str  # that the target computes in, with quantising flags of an engine; auto: what it chooses itself
    dtype: str
    max_length: int
    too_long: str
    teachers: str
    reasoning_ids: list[list[int]] | None

    def differences(self, other: "MadeFrom") -> str:
        """Return the settings that differ: this one's as then, the other's as now."""
        return differences(self._by_key(), other._by_key())

    def _by_key(self) -> dict[str, Any]:
        values = asdict(self)
        return {**values.pop("responses"), **values}


@dataclass(frozen=True)
class ShardEntry(Record):
    name: str
    bytes: int
    sha256: str
    samples: int
    index_sha256: str


@dataclass(frozen=True, kw_only=True)
class Manifest(Record):
    """A finished store; its presence says that the store is complete."""

    FORMAT_VERSION: ClassVar[int] = FORMAT_VERSION
    OLDER_VERSIONS: ClassVar[tuple[int, ...]] = OLDER_VERSIONS
    FOUND_IN: ClassVar[str] = "a feature store, DIR/features"

    format_version: int
    made_from: MadeFrom
    target_config: TargetConfig
    target_weights_sha256: str
    samples: int
    tokens: int
    answer_tokens: int
    bytes: int
    left_out: dict[str, int]
    shards: list[ShardEntry]
    answer_counts: list[tuple[int, int]]


def require_different_ids(storage: Storage, indices: list[ShardIndex]) -> None:
    """Raise InputError for a sample that is in two shards: training would use it twice."""
    found: dict[str, str] = {}
    for index in indices:
        for sample_id in index.ids():
            if sample_id in found:
                raise InputError(
                    f"{storage.location}: sample {sample_id} is in {found[sample_id]} and in {index.facts.shard}; "
                    f"delete the shard that does not belong here with its .index, and run: {MAKE_FEATURES}"
                )
            found[sample_id] = index.facts.shard


@contextmanager
def one_writer(storage: Storage, name: str) -> Iterator[None]:
    """Turn a conflict with another process that writes the same store into a one-line error."""
    try:
        yield
    except FileExistsError:
        raise InputError(
            f"{storage.location}/{name} has been written by another process since this one began; let one run at a "
            f"time write {storage.location}, then run this command again: what is finished is kept"
        ) from None


def read_index(storage: Readable, name: str, expected_sha256: str | None = None) -> ShardIndex:
    """Read an index, and compare it with the manifest's hash of it, or else with its own."""
    source, content = f"{storage.location}/{name}", read_whole(storage, name)
    if expected_sha256 is not None and hashlib.sha256(content).hexdigest() != expected_sha256:
        raise InputError(
            f"{source} is damaged or does not belong to {MANIFEST}: copy it again with its shard, or delete both and "
            f"run: {MAKE_FEATURES}"
        )
    remedy = f"delete it with its shard and run: {MAKE_FEATURES}"
    return parse_index(content, source=source, remedy=remedy, check_seal=expected_sha256 is None)


def read_manifest(storage: Readable) -> Manifest:
    """Read the manifest of a store; InputError names the store next to, in, or around a place that is none."""
    place = Path(storage.location)
    near = (place / "features", place.parent / "features", place.parent)
    try:
        content = bytes(storage.read(MANIFEST))
    except (FileNotFoundError, NotADirectoryError):
        if meant := next((folder for folder in near if (folder / MANIFEST).is_file()), None):
            raise InputError(f"{storage.location} is no feature store, {meant} is one; give that") from None
        raise missing(storage, MANIFEST) from None
    remedy = f"delete it and run: {MAKE_FEATURES}"
    return parse_sealed(content, Manifest, source=f"{storage.location}/{MANIFEST}", remedy=remedy)


def read_whole(storage: Readable, name: str) -> memoryview:
    try:
        return storage.read(name)
    except FileNotFoundError:
        raise missing(storage, name) from None


def missing(storage: Readable, name: str) -> InputError:
    return InputError(f"{storage.location}/{name} does not exist; make it with: {MAKE_FEATURES}")


def totals(indices: Sequence[ShardIndex], vocab_size: int) -> dict[str, Any]:
    """Return the fields of the manifest that count all shards."""
    counts = np.zeros(vocab_size, np.int64)
    for index in indices:
        counts[index.columns["token"]] += index.columns["times"]
    return {
        "samples": sum(len(index) for index in indices),
        "tokens": sum(index.total("tokens") for index in indices),
        "answer_tokens": sum(index.total("answer_tokens") for index in indices),
        "bytes": sum(index.facts.bytes for index in indices),
        "answer_counts": [(int(token), int(counts[token])) for token in counts.nonzero()[0]],
    }


def write_manifest(
    storage: Storage,
    *,
    made_from: MadeFrom,
    target_config: TargetConfig,
    indices: list[ShardIndex],
    left_out: dict[str, int],
    instead_of: str | None = WHATEVER,
) -> Manifest:
    """Join the shards' indices into the manifest and write it, replacing the version that this run read."""
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        made_from=made_from,
        target_config=target_config,
        target_weights_sha256=sha256_bytes(storage.read(TARGET_WEIGHTS)),
        left_out=left_out,
        shards=[
            ShardEntry(
                each.facts.shard, each.facts.bytes, each.facts.sha256, len(each), sha256_bytes(index_bytes(each))
            )
            for each in indices
        ],
        **totals(indices, target_config.vocab_size),
    )
    with one_writer(storage, MANIFEST):
        write_file(storage, MANIFEST, sealed_bytes(manifest), instead_of=instead_of)
    return manifest
