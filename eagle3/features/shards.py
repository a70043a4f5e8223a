"""Shards: tar files that webdataset reads, one safetensors member per sample, each with an index beside it.

    shard-000000.tar    members 00000000.safetensors, 00000001.safetensors, …
    shard-000000.json   per sample: id, offset, size, tokens, answer tokens; the tar's size and sha256; token counts

The index is renamed into place after its tar: a shard is complete if its index exists.
"""

import io
import mmap
import os
import tarfile
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from eagle3.errors import InputError
from eagle3.features.sample import Sample, from_bytes, to_bytes
from eagle3.head.rows import trained_rows
from eagle3.storage import sha256_file, sha256_json, with_filename, write_json


@dataclass(frozen=True)
class SampleEntry:
    """Where one sample lies and what it weighs."""

    id: str
    offset: int
    size: int
    tokens: int
    answer_tokens: int
    rows: int  # trained rows when every answer is trained


class ShardWriter:
    """Writes one shard; nothing appears under `name` before `finish`."""

    def __init__(self, directory: Path, number: int, first_sample: int) -> None:
        self.name = f"shard-{number:06d}"
        self.directory = directory
        self.partial = directory / f".{self.name}.tar.tmp"
        self.file: IO[bytes] = self.partial.open("wb")
        self.tar = tarfile.TarFile(fileobj=self.file, mode="w", format=tarfile.USTAR_FORMAT)
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
        with with_filename(self.partial):
            self.tar.addfile(member, io.BytesIO(blob))
        answers = sample.input_ids[sample.turns > 0].tolist()
        rows, _ = trained_rows(sample.turns, 1)
        self.entries.append(SampleEntry(sample.id, offset, len(blob), len(sample.input_ids), len(answers), len(rows)))
        self.answer_counts.update(answers)

    def finish(self, made_from: str) -> dict:
        """Close and publish the shard; returns its index. `made_from` is the hash of what decides its content."""
        with with_filename(self.partial):
            self.tar.close()
            self.file.flush()
            os.fsync(self.file.fileno())
            self.file.close()
        path = self.directory / f"{self.name}.tar"
        index = {
            "shard": path.name,
            "made_from": made_from,
            "bytes": self.partial.stat().st_size,
            "sha256": sha256_file(self.partial),
            "samples": [asdict(entry) for entry in self.entries],
            "answer_counts": sorted(self.answer_counts.items()),
        }
        self.partial.replace(path)
        write_json(path.with_suffix(".json"), index)
        return index

    def discard(self) -> None:
        with suppress(OSError):  # on a full disk closing fails as writing did
            self.file.close()
        self.partial.unlink(missing_ok=True)


class StoreWriter:
    """Puts samples into shards of about `shard_bytes`; finished shards are appended to `indices`."""

    def __init__(self, directory: Path, made_from: dict, indices: list[dict], *, shard_bytes: int) -> None:
        self.directory, self.made_from, self.indices = directory, sha256_json(made_from), indices
        self.shard_bytes = shard_bytes
        self.shard: ShardWriter | None = None

    def add(self, sample: Sample) -> None:
        if self.shard is None:
            number = max((int(index["shard"][6:12]) + 1 for index in self.indices), default=0)
            first_sample = sum(len(index["samples"]) for index in self.indices)
            self.shard = ShardWriter(self.directory, number, first_sample)
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

    def __init__(self, path: Path, *, expected_bytes: int, stored_teacher_rows: str) -> None:
        self.path = path
        self.stored_teacher_rows = stored_teacher_rows
        if not path.is_file():
            raise InputError(f"shard {path} is missing; bring it back, or delete its .json and rerun stages=[features]")
        actual = path.stat().st_size
        if actual != expected_bytes:
            raise broken(path, f"holds {actual} bytes instead of {expected_bytes}")
        with path.open("rb") as file:
            # Copy on write: torch warns of tensors in read-only memory, and the file must never change.
            self.bytes = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))

    def read(self, entry: SampleEntry) -> Sample:
        """A sample whose large tensors are views of the file: what is never looked at is never read."""
        blob = self.bytes[entry.offset : entry.offset + entry.size]
        try:
            return from_bytes(blob, sample_id=entry.id, stored_teacher_rows=self.stored_teacher_rows)
        except Exception as error:  # safetensors raises its own type on a damaged header
            raise broken(self.path, f"cannot be read at sample {entry.id} ({error})") from error


def verify_file(path: Path, expected_sha256: str) -> None:
    actual = sha256_file(path)
    if actual != expected_sha256:
        raise broken(path, f"has sha256 {actual[:12]}… instead of {expected_sha256[:12]}…")


def broken(path: Path, what: str) -> InputError:
    return InputError(
        f"{path} {what}: it is truncated or damaged and is refused; copy it again, or delete it (a shard with its "
        f".json) and rerun precompute.py stages=[features], which rewrites only what is missing"
    )
