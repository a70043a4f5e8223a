"""What a feature store says of itself: the manifest of the whole, and the index beside each shard."""

import hashlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from eagle3.errors import InputError
from eagle3.storage.folder import WHATEVER, Storage, write_file
from eagle3.storage.records import AnyRecord, Record, parse_sealed, sealed_bytes
from eagle3.target.facts import TargetConfig
from eagle3.target.identity import TargetIdentity

FORMAT_VERSION = 4
MANIFEST = "manifest.json"
MAKE_FEATURES = "python precompute.py 'stages=[features]'"
MAKE_STORE = "python precompute.py target.path=TARGET prompts.path=FILE.jsonl out_dir=DIR (then data.path=DIR/features)"


@dataclass(frozen=True, kw_only=True)
class MadeFrom(Record):
    """Everything that decides what a store holds. `responses` are the settings of the answers."""

    target: TargetIdentity
    responses: dict[str, Any]
    capture_layers: list[int]  # indices into Hugging Face's `hidden_states`
    dtype: str
    max_length: int
    too_long: str
    teachers: str
    reasoning_ids: list[list[int]] | None

    def differences(self, other: "MadeFrom") -> str:
        """Say which settings differ: this one's then, the other's now."""
        pairs = {field.name: (getattr(self, field.name), getattr(other, field.name)) for field in fields(self)}
        return ", ".join(f"{name}={then} then, {now} now" for name, (then, now) in pairs.items() if then != now)


@dataclass(frozen=True)
class SampleEntry(Record):
    """Where one sample lies in its shard and what it weighs."""

    id: str
    offset: int
    size: int
    tokens: int
    answer_tokens: int
    anchors: int  # when every answer is trained


@dataclass(frozen=True, kw_only=True)
class ShardIndex(Record):
    """One shard: its size and hash, its samples, and how often each token occurs in their answers.

    `made_from` is the hash of the store's MadeFrom: a shard made otherwise belongs to another store.
    """

    FORMAT_VERSION: ClassVar[int] = FORMAT_VERSION

    format_version: int
    shard: str
    made_from: str
    bytes: int
    sha256: str
    samples: list[SampleEntry]
    answer_counts: list[tuple[int, int]]


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
    """Raise InputError for a sample that is there twice: training would take it for two."""
    found: dict[str, str] = {}
    for index in indices:
        for entry in index.samples:
            if entry.id in found:
                raise InputError(
                    f"{storage.location}: sample {entry.id} is in {found[entry.id]} and in {index.shard}; delete the "
                    f"shard that does not belong here with its .json, and run: {MAKE_FEATURES}"
                )
            found[entry.id] = index.shard


@contextmanager
def one_writer(storage: Storage, name: str) -> Iterator[None]:
    """Say it in a line when the block finds a file that another process has written meanwhile."""
    try:
        yield
    except FileExistsError:
        raise InputError(
            f"{storage.location}/{name} has been written by another process since this one began; let one run at a "
            f"time write {storage.location}, then run this command again: what is finished is kept"
        ) from None


def index_name(shard: str) -> str:
    return f"{shard.removesuffix('.tar')}.json"


def read_index(storage: Storage, name: str) -> ShardIndex:
    way_out = f"delete it with its shard and run: {MAKE_FEATURES}"
    return _read(storage, name, ShardIndex, made_by=MAKE_FEATURES, way_out=way_out)


def read_manifest(storage: Storage) -> Manifest:
    return _read(storage, MANIFEST, Manifest, made_by=MAKE_STORE, way_out=f"make the store again: {MAKE_FEATURES}")


def _read(storage: Storage, name: str, kind: type[AnyRecord], *, made_by: str, way_out: str) -> AnyRecord:
    source = f"{storage.location}/{name}"
    try:
        content = bytes(storage.read(name))
    except FileNotFoundError:
        raise InputError(f"{source} does not exist; make it with: {made_by}") from None
    return parse_sealed(content, kind, source=source, way_out=way_out)


def sha256_of(index: ShardIndex) -> str:
    """Return the hash of the index's file."""
    return hashlib.sha256(sealed_bytes(index)).hexdigest()


def write_manifest(
    storage: Storage,
    *,
    made_from: MadeFrom,
    target_config: TargetConfig,
    target_weights_sha256: str,
    indices: list[ShardIndex],
    left_out: dict[str, int],
    instead_of: str | None = WHATEVER,
) -> Manifest:
    """Join the shards' indices into the manifest and write it, in place of the version that this run has seen."""
    counts: Counter[int] = Counter()
    for index in indices:
        counts.update(dict(index.answer_counts))
    entries = [entry for index in indices for entry in index.samples]
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        made_from=made_from,
        target_config=target_config,
        target_weights_sha256=target_weights_sha256,
        samples=len(entries),
        tokens=sum(entry.tokens for entry in entries),
        answer_tokens=sum(entry.answer_tokens for entry in entries),
        bytes=sum(index.bytes for index in indices),
        left_out=left_out,
        shards=[
            ShardEntry(index.shard, index.bytes, index.sha256, len(index.samples), sha256_of(index))
            for index in indices
        ],
        answer_counts=sorted(counts.items()),
    )
    with one_writer(storage, MANIFEST):
        write_file(storage, MANIFEST, sealed_bytes(manifest), instead_of=instead_of)
    return manifest
