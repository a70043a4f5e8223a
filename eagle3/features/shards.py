"""Shards: tar files that webdataset reads, one safetensors member per sample, each with an index next to it.

    shard-000000-8f31c02e.tar    members 000000-000000.safetensors, 000000-000001.safetensors, …
    shard-000000.index           per sample: id, offset, size, sha256, tokens, …; its tar; token counts (index.py)

The index appears after its tar: a shard is complete if its index exists. Whoever writes a shard makes up the second
part of its tar's name, and an index is never replaced: of several writers of one number only the first has an effect.
"""

import hashlib
import secrets
import tarfile
from collections import Counter, deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from eagle3.errors import InputError
from eagle3.features.conversation import Conversation
from eagle3.features.index import (
    FORMAT_VERSION,
    NO_ANSWER,
    SampleEntry,
    ShardFacts,
    build_index,
    index_bytes,
    index_name,
)
from eagle3.features.manifest import MAKE_FEATURES, MadeFrom, ShardEntry
from eagle3.features.sample import Sample, from_bytes, to_buffers
from eagle3.features.split import split_fraction
from eagle3.features.turns import find_anchors
from eagle3.storage.folder import Readable, Storage, write_file
from eagle3.storage.prefault import sha256_bytes
from eagle3.storage.records import record_bytes

MOST_WAITING = 512 * 2**20  # bytes of one shard


@dataclass(frozen=True)
class Encoded:
    sample: Sample
    buffers: list[bytes | memoryview]
    size: int
    sha256: str


def encode(sample: Sample) -> Encoded:
    buffers, digest = to_buffers(sample), hashlib.sha256()
    for buffer in buffers:
        digest.update(buffer)
    return Encoded(sample, buffers, sum(map(len, buffers)), digest.hexdigest())


class ShardWriter:
    """Writes one shard; nothing appears under `name` before `finish`.

    A thread of its own hashes and writes, and several shards are written at once: one core writes less than several
    GPUs compute. A later call raises its errors.
    """

    def __init__(self, storage: Storage, number: int) -> None:
        self.number, self.name = number, f"shard-{number:06d}-{secrets.token_hex(4)}.tar"
        self.storage = storage
        self.pending = storage.create(self.name)
        self.hash, self.thread = hashlib.sha256(), ThreadPoolExecutor(1)
        self.size, self.written = 0, 0
        self.writes: deque[Future[None]] = deque()
        self.entries: list[SampleEntry] = []
        self.answer_counts: Counter[int] = Counter()

    def _write(self, data: bytes | memoryview) -> None:
        self.writes.append(self.thread.submit(self._put, data))
        self.size += len(data)
        while self.writes and (self.writes[0].done() or self.size - self.written > MOST_WAITING):
            self.writes.popleft().result()

    def _put(self, data: bytes | memoryview) -> None:
        self.hash.update(data)
        self.pending.write(data)
        self.written += len(data)

    def add(
        self, sample: "Sample | Encoded", *, source: str = "", whole: bool = True, answer_sha256: str = NO_ANSWER
    ) -> None:
        """Add a sample of a prompt from `source`; `whole`: none of its answers was cut; `answer_sha256`: of the
        Conversation that it was made of."""
        encoded = sample if isinstance(sample, Encoded) else encode(sample)
        sample = encoded.sample
        member = tarfile.TarInfo(f"{self.number:06d}-{len(self.entries):06d}.safetensors")
        member.size = encoded.size
        # Not by tarfile's writer, which copies 16 kB at a time: each a turn of the threads.
        self._write(member.tobuf(tarfile.USTAR_FORMAT))
        offset = self.size
        for buffer in encoded.buffers:
            self._write(buffer)
        self._write(bytes(-encoded.size % tarfile.BLOCKSIZE))
        place = {"offset": offset, "size": encoded.size, "sha256": encoded.sha256}
        self.entries.append(
            build_sample_entry(sample, **place, source=source, whole=whole, answer_sha256=answer_sha256)
        )
        self.answer_counts.update(sample.input_ids[sample.turns > 0].tolist())

    def finish(self, made_from: str) -> bytes:
        """Close and publish the shard, and return its index. `made_from` is the hash of what decides its content."""
        end = self.size + 2 * tarfile.BLOCKSIZE
        self._write(bytes(2 * tarfile.BLOCKSIZE + -end % tarfile.RECORDSIZE))
        while self.writes:
            self.writes.popleft().result()
        self.thread.shutdown()
        facts = ShardFacts(
            format_version=FORMAT_VERSION,
            shard=self.name,
            made_from=made_from,
            bytes=self.size,
            sha256=self.hash.hexdigest(),
        )
        content = index_bytes(build_index(facts, self.entries, self.answer_counts))
        self.pending.commit()
        try:
            write_file(self.storage, index_name(self.name), content, instead_of=None)
        except FileExistsError:
            self.storage.delete(self.name)
            raise
        return content

    def discard(self) -> None:
        self.thread.shutdown(cancel_futures=True)
        self.pending.discard()


def build_sample_entry(item: Sample | Conversation, **others: Any) -> SampleEntry:
    return SampleEntry(
        id=item.id,
        tokens=len(item.input_ids),
        answer_tokens=int((item.turns > 0).sum()),
        anchors=len(find_anchors(item.turns)),
        split=split_fraction(item.id),
        **others,
    )


def require_shard(storage: Readable, shard: ShardEntry) -> None:
    try:
        actual = storage.size(shard.name)
    except FileNotFoundError:
        raise missing_shard(storage, shard.name) from None
    if actual != shard.bytes:
        raise broken(f"{storage.location}/{shard.name}", f"holds {actual} bytes instead of {shard.bytes}")


def missing_shard(storage: Readable, name: str) -> InputError:
    return InputError(f"shard {storage.location}/{name} is missing; bring it back, or make it again: {MAKE_FEATURES}")


def decode(content: memoryview, entry: SampleEntry, *, path: str, teachers: str) -> Sample:
    """Return a sample whose large tensors are views of `content`, which was read from the shard `path`."""
    try:
        sample = from_bytes(content, sample_id=entry.id, teachers=teachers)
    except Exception as error:  # whatever damaged bytes can make of a header
        raise broken(path, f"cannot be read at sample {entry.id} ({error})") from error
    if (len(sample.input_ids), int((sample.turns > 0).sum())) != (entry.tokens, entry.answer_tokens):
        raise broken(path, f"does not hold what its .index says of sample {entry.id}")
    return sample


def hash_made_from(made_from: MadeFrom) -> str:
    return hashlib.sha256(record_bytes(made_from)).hexdigest()


def require_sha256(content: memoryview, path: str, expected: str) -> None:
    actual = sha256_bytes(content)
    if actual != expected:
        raise broken(path, f"has sha256 {actual[:12]}… instead of {expected[:12]}…")


def broken(path: str, what: str) -> InputError:
    files = f"it and {index_name(path)}" if path.endswith(".tar") else "it"
    return InputError(
        f"{path} {what}: it is truncated or damaged and is refused; copy it again, or delete {files} and run: "
        f"{MAKE_FEATURES}"
    )
