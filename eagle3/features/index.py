"""The index next to each shard: sizes and places of its samples, as columns that are mapped, not parsed.

    shard-000000.index   a safetensors file: COLUMNS; in its metadata what the shard is (JSON), and the sha256 of all

Shapes: N samples, C different tokens in their answers, S sources of their prompts.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from eagle3.errors import InputError
from eagle3.storage.records import Record, parse_record, record_bytes
from eagle3.storage.safetensors_header import header_bytes, read_tensors

FORMAT_VERSION = 8
OLDER_VERSIONS = (7,)  # a store of these is read, not continued

# A copy by another name, as in "shard-000000 (1).index", is no part of a store.
NUMBER = 6 * "[0-9]"
SHARDS, INDICES = f"shard-{NUMBER}-????????.tar", f"shard-{NUMBER}.index"
# Widest first, so that each begins at a multiple of its width. Of safetensors' names for types, NumPy's.
COLUMNS = {
    "offset": "I64",  # of a sample in the tar
    "size": "I64",
    "split": "F64",  # split.py
    "id_end": "I64",  # where the sample's id ends in `ids`
    "times": "I64",  # C: how often each token occurs in answers
    "source_end": "I64",  # S: where the name of a source ends in `sources`
    "tokens": "I32",
    "answer_tokens": "I32",
    "anchors": "I32",  # when every answer is trained
    "token": "I32",  # C
    "source": "I32",  # which of the sources
    "sha256": "U8",  # N x 32, of the sample's bytes
    "answer_sha256": "U8",  # N x 32, of the answer that the sample was made of (conversation.py)
    "whole": "U8",  # 1: no answer was cut at a limit
    "ids": "U8",  # UTF-8, end to end
    "sources": "U8",  # the same, in alphabetical order
}
NUMPY = {"I64": "<i8", "F64": "<f8", "I32": "<i4", "U8": "u1"}
DIGESTS = ("sha256", "answer_sha256")
SINCE_8 = ("answer_sha256",)
NO_ANSWER = 64 * "0"  # in place of a sha256, of samples that were made of no row of answers.jsonl
NUMBERS = ("offset", "size", "split", "tokens", "answer_tokens", "anchors")  # columns that an entry has as they are


@dataclass(frozen=True)
class SampleEntry:
    """The place of one sample in its shard, and its sizes."""

    id: str
    offset: int
    size: int
    tokens: int
    answer_tokens: int
    anchors: int
    split: float
    sha256: str
    source: str = ""
    whole: bool = True
    answer_sha256: str = NO_ANSWER


@dataclass(frozen=True, kw_only=True)
class ShardFacts(Record):
    """One shard. `made_from` is the hash of the store's MadeFrom: a shard made otherwise belongs to another store."""

    FORMAT_VERSION: ClassVar[int] = FORMAT_VERSION
    OLDER_VERSIONS: ClassVar[tuple[int, ...]] = OLDER_VERSIONS

    format_version: int
    shard: str
    made_from: str
    bytes: int
    sha256: str


@dataclass(frozen=True, eq=False)
class ShardIndex:
    facts: ShardFacts
    columns: Mapping[str, np.ndarray]

    def __len__(self) -> int:
        return len(self.columns["offset"])

    def ids(self) -> list[str]:
        return _texts(self.columns["ids"], self.columns["id_end"])

    @cached_property
    def sources(self) -> list[str]:
        """The names that the column `source` refers to by number; decoded once, not for each entry."""
        return _texts(self.columns["sources"], self.columns["source_end"])

    def entry(self, number: int) -> SampleEntry:
        at = self.columns
        begin = int(at["id_end"][number - 1]) if number else 0
        return SampleEntry(
            id=bytes(at["ids"][begin : int(at["id_end"][number])]).decode(),
            sha256=bytes(at["sha256"][number]).hex(),
            source=self.sources[int(at["source"][number])],
            whole=bool(at["whole"][number]),
            **{name: at[name][number].item() for name in NUMBERS},
        )

    def total(self, column: str) -> int:
        return int(self.columns[column].sum(dtype=np.int64))


def index_name(shard: str) -> str:
    return f"{shard.rpartition('-')[0]}.index"


def build_index(facts: ShardFacts, entries: Sequence[SampleEntry], answer_counts: Mapping[int, int]) -> ShardIndex:
    values: dict[str, Any] = {name: [getattr(entry, name) for entry in entries] for name in (*NUMBERS, "whole")}
    values["ids"], values["id_end"] = _end_to_end([entry.id for entry in entries])
    sources = sorted({entry.source for entry in entries})
    numbers = {source: number for number, source in enumerate(sources)}
    values["source"] = [numbers[entry.source] for entry in entries]
    values["sources"], values["source_end"] = _end_to_end(sources)
    for name in DIGESTS:
        digests = (bytes.fromhex(getattr(entry, name)) for entry in entries)
        values[name] = np.frombuffer(b"".join(digests), "u1").reshape(-1, 32)
    values["token"], values["times"] = sorted(answer_counts), [answer_counts[token] for token in sorted(answer_counts)]
    return ShardIndex(facts, {name: np.asarray(values[name], NUMPY[kind]) for name, kind in COLUMNS.items()})


def _end_to_end(texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Return texts as UTF-8 in one column, and where each ends in it."""
    encoded = [each.encode() for each in texts]
    return np.frombuffer(b"".join(encoded), "u1"), np.cumsum([len(each) for each in encoded], dtype=np.int64)


def _texts(column: np.ndarray, ends: np.ndarray) -> list[str]:
    text, places = bytes(column), ends.tolist()
    return [text[begin:end].decode() for begin, end in zip([0, *places[:-1]], places, strict=True)]


def index_bytes(index: ShardIndex) -> bytes:
    """Return the index as a file; the same index gives the same bytes."""
    columns = [column.tobytes() for column in index.columns.values()]
    facts = record_bytes(index.facts)
    digest = hashlib.sha256(b"".join([facts, *columns])).hexdigest()
    return b"".join([_header(facts, digest, index.columns), *columns])


def parse_index(content: memoryview, *, source: str, remedy: str, check_seal: bool = True) -> ShardIndex:
    """Read an index whose columns are views of `content`. `check_seal=False` where a hash of the file was compared."""
    damaged = InputError(f"{source}: damaged or edited, it does not have the sha256 in its header; {remedy}")
    try:
        metadata, tensors = read_tensors(content)
        facts, seal = metadata["shard"].encode(), metadata["sha256"]
    except Exception:  # whatever damaged bytes can make of a header
        raise damaged from None
    parsed = parse_record(facts, ShardFacts, source=source, remedy=remedy)
    names = [name for name in COLUMNS if name not in SINCE_8 or parsed.format_version == FORMAT_VERSION]
    try:
        columns = {name: np.frombuffer(tensors[name].content, NUMPY[COLUMNS[name]]) for name in names}
        columns |= {name: columns[name].reshape(-1, 32) for name in DIGESTS if name in columns}
    except (KeyError, ValueError):
        raise damaged from None
    header = _header(facts, seal, columns)  # then there is no other name, type, shape or place in it
    if header != content[: len(header)]:
        raise damaged
    if check_seal and hashlib.sha256(facts + content[len(header) :]).hexdigest() != seal:
        raise damaged
    return ShardIndex(parsed, columns)


def _header(facts: bytes, digest: str, columns: Mapping[str, np.ndarray]) -> bytes:
    tensors = {name: (COLUMNS[name], column.shape) for name, column in columns.items()}
    return header_bytes(tensors, {"shard": facts.decode(), "sha256": digest})
