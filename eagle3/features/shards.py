"""Shards: tar files that webdataset reads, one safetensors member per sample, each with an index beside it.

    shard-000000.tar    members 00000000.safetensors, 00000001.safetensors, …
    shard-000000.index  per sample: id, offset, size, sha256, tokens, answer tokens; the tar's; token counts (index.py)

The index appears after its tar: a shard is complete if its index exists.
"""

import hashlib
import io
import tarfile
from collections import Counter
from typing import Any

from eagle3.errors import InputError
from eagle3.features.index import FORMAT_VERSION, SampleEntry, ShardFacts, ShardIndex, index_bytes, index_of
from eagle3.features.manifest import MAKE_FEATURES, MadeFrom, ShardEntry, index_name, one_writer
from eagle3.features.sample import Sample, from_bytes, to_bytes
from eagle3.features.split import split_fraction
from eagle3.features.turns import anchors_of
from eagle3.storage.folder import PendingFile, Storage, write_file
from eagle3.storage.records import record_bytes


class HashedFile:
    """A file whose hash is known when it is written."""

    def __init__(self, file: PendingFile) -> None:
        self.file = file
        self.hash = hashlib.sha256()

    def write(self, data: Any) -> int:
        self.hash.update(data)
        return self.file.write(data)

    def tell(self) -> int:
        return self.file.tell()


class ShardWriter:
    """Writes one shard; nothing appears under `name` before `finish`."""

    def __init__(self, storage: Storage, number: int, first_sample: int) -> None:
        self.name = f"shard-{number:06d}.tar"
        self.storage = storage
        self.pending = storage.create(self.name)
        self.file = HashedFile(self.pending)
        self.tar = tarfile.TarFile(fileobj=self.file, mode="w", format=tarfile.USTAR_FORMAT)  # type: ignore[arg-type]
        self.entries: list[SampleEntry] = []
        self.answer_counts: Counter[int] = Counter()
        self.first_sample = first_sample

    @property
    def size(self) -> int:
        return self.file.tell()

    def add(self, sample: Sample) -> None:
        blob = to_bytes(sample)
        member = tarfile.TarInfo(f"{self.first_sample + len(self.entries):08d}.safetensors")
        member.size = len(blob)
        offset = self.file.tell() + tarfile.BLOCKSIZE  # the member's header is one block
        self.tar.addfile(member, io.BytesIO(blob))
        answers = sample.input_ids[sample.turns > 0].tolist()
        anchors = len(anchors_of(sample.turns))
        self.entries.append(
            SampleEntry(
                id=sample.id,
                offset=offset,
                size=len(blob),
                tokens=len(sample.input_ids),
                answer_tokens=len(answers),
                anchors=anchors,
                split=split_fraction(sample.id),
                sha256=hashlib.sha256(blob).hexdigest(),
            )
        )
        self.answer_counts.update(answers)

    def finish(self, made_from: str) -> ShardIndex:
        """Close and publish the shard. `made_from` is the hash of what decides its content."""
        self.tar.close()
        facts = ShardFacts(
            format_version=FORMAT_VERSION,
            shard=self.name,
            made_from=made_from,
            bytes=self.file.tell(),
            sha256=self.file.hash.hexdigest(),
        )
        index = index_of(facts, self.entries, self.answer_counts)
        name = index_name(self.name)
        with one_writer(self.storage, name):
            if self.storage.version(name) is not None:  # before its tar is replaced by ours
                raise FileExistsError
            self.pending.commit()
            write_file(self.storage, name, index_bytes(index), instead_of=None)
        return index

    def discard(self) -> None:
        self.pending.discard()


class StoreWriter:
    """Puts samples into shards of about `shard_bytes`; finished shards are appended to `indices`."""

    def __init__(self, storage: Storage, made_from: MadeFrom, indices: list[ShardIndex], *, shard_bytes: int) -> None:
        self.storage, self.made_from, self.indices = storage, hash_of(made_from), indices
        self.shard_bytes = shard_bytes
        self.next_number = max((int(name[6:12]) + 1 for name in storage.names("shard-*.index")), default=0)
        self.shard: ShardWriter | None = None

    def add(self, sample: Sample) -> None:
        if self.shard is None:
            first_sample = sum(len(index) for index in self.indices)
            self.shard = ShardWriter(self.storage, self.next_number, first_sample)
            self.next_number += 1
        self.shard.add(sample)
        if self.shard.size >= self.shard_bytes:
            self.close_shard()

    def close_shard(self) -> None:
        if self.shard is not None:
            self.indices.append(self.shard.finish(self.made_from))
            self.shard = None

    def discard(self) -> None:
        """Drop an unfinished shard."""
        if self.shard is not None:
            self.shard.discard()
            self.shard = None


class ShardReader:
    """Random access to one shard. The one place where a shard is opened."""

    def __init__(self, storage: Storage, shard: ShardEntry, *, teachers: str) -> None:
        self.storage, self.name, self.teachers = storage, shard.name, teachers
        self.path = f"{storage.location}/{shard.name}"
        try:
            actual = storage.size(shard.name)
        except FileNotFoundError:
            raise InputError(
                f"shard {self.path} is missing; bring it back, or delete its .index and run: {MAKE_FEATURES}"
            ) from None
        if actual != shard.bytes:
            raise broken(self.path, f"holds {actual} bytes instead of {shard.bytes}")

    def read(self, entry: SampleEntry) -> Sample:
        """Read a sample whose large tensors are views of the file: what is never looked at is never read."""
        blob = self.storage.read(self.name, entry.offset, entry.offset + entry.size, sha256=entry.sha256)
        try:
            sample = from_bytes(blob, sample_id=entry.id, teachers=self.teachers)
        except Exception as error:  # whatever damaged bytes can make of a header
            raise broken(self.path, f"cannot be read at sample {entry.id} ({error})") from error
        if (len(sample.input_ids), int((sample.turns > 0).sum())) != (entry.tokens, entry.answer_tokens):
            raise broken(self.path, f"does not hold what its .index says of sample {entry.id}")
        return sample


def hash_of(made_from: MadeFrom) -> str:
    return hashlib.sha256(record_bytes(made_from)).hexdigest()


def verify_file(storage: Storage, name: str, expected_sha256: str) -> None:
    require_sha256(storage.read(name), f"{storage.location}/{name}", expected_sha256)


def require_sha256(content: memoryview, path: str, expected: str) -> None:
    actual = hashlib.sha256(content).hexdigest()
    if actual != expected:
        raise broken(path, f"has sha256 {actual[:12]}… instead of {expected[:12]}…")


def broken(path: str, what: str) -> InputError:
    return InputError(
        f"{path} {what}: it is truncated or damaged and is refused; copy it again, or delete it (a shard with its "
        f".index) and rerun precompute.py stages=[features], which rewrites only what is missing"
    )
