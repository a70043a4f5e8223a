"""Tokens and bytes of a feature store, by the layout that its writer uses.

Shapes: T tokens of a sample, A captured layers, H hidden size, J positions with a teacher.
"""

import math
import tarfile
from collections import Counter
from dataclasses import dataclass

import torch

from eagle3.answers.rows import ResponseRow
from eagle3.features.conversation import Conversation, conversation_of
from eagle3.features.extract import STORED
from eagle3.features.index import FORMAT_VERSION, SampleEntry, ShardFacts, index_bytes, index_of
from eagle3.features.pieces import Weight
from eagle3.target.facts import TargetConfig

BESIDE_SHARDS = 2  # manifest.json, target.safetensors
KEPT_FREE = 8 / 7  # a full cache deletes until an eighth of its limit is free


@dataclass(frozen=True)
class Tokens:
    """What all samples hold together."""

    samples: float
    tokens: float
    answer_tokens: float


@dataclass(frozen=True)
class Size:
    """A store in one `features.dtype`. `bytes` are those of its shards, as the manifest counts them; `beside` those of
    all other files."""

    bytes: int
    beside: int
    shards: int
    objects: int
    cache_gb: float


@dataclass(frozen=True, kw_only=True)
class Layout:
    """What decides a sample's size beside its tokens: `layers` captured ones, and keys of conf/features."""

    hidden_size: int
    layers: int
    max_length: int
    too_long: str
    teachers: str
    shard_mb: float

    def conversations(self, rows: list[ResponseRow]) -> tuple[list[Conversation], Counter[str]]:
        left_out: Counter[str] = Counter()
        made = (
            conversation_of(row, max_length=self.max_length, too_long=self.too_long, left_out=left_out) for row in rows
        )
        return [each for each in made if each is not None], left_out

    def weight(self, dtype: torch.dtype) -> Weight:
        return Weight(layers=self.layers, hidden_size=self.hidden_size, dtype=dtype, teachers=self.teachers)


def count_tokens(conversations: list[Conversation], scale: float) -> Tokens:
    tokens = sum(len(item.input_ids) for item in conversations)
    answers = sum(int((item.turns > 0).sum()) for item in conversations)
    return Tokens(*(round(number * scale) for number in (len(conversations), tokens, answers)))


def store_sizes(conversations: list[Conversation], scale: float, layout: Layout, target_values: int) -> dict[str, Size]:
    """Return the size of the store in each dtype. `target_values` are those of the target's embedding and lm_head."""
    index = index_size(conversations)
    sizes = {}
    for name, dtype in STORED.items():
        members = list(map(layout.weight(dtype), conversations))
        shards = number_of_shards(members, scale, layout.shard_mb)
        end_of_tar = 2 * tarfile.BLOCKSIZE + tarfile.RECORDSIZE // 2  # and zeros up to a whole record
        in_shards = sum(members) * scale + shards * end_of_tar
        weights = target_values * (2 if dtype.itemsize == 1 else dtype.itemsize)
        sizes[name] = Size(
            bytes=round(in_shards),
            beside=round(index * scale + weights),
            shards=shards,
            objects=2 * shards + BESIDE_SHARDS,
            cache_gb=math.ceil(in_shards * KEPT_FREE / 1e8) / 10,
        )
    return sizes


def number_of_shards(members: list[int], scale: float, shard_mb: float) -> int:
    """A shard ends with the sample that makes it full: long samples are more likely to be that one, and half of it
    lies beyond on average."""
    beyond = sum(size * size for size in members) / (2 * sum(members))
    return math.ceil(sum(members) * scale / (shard_mb * 2**20 + beyond))


def index_size(conversations: list[Conversation]) -> int:
    """Return the bytes of one index over all of these."""
    counts: Counter[int] = Counter()
    for item in conversations:
        counts.update(item.input_ids[item.turns > 0].tolist())
    entries = [SampleEntry(item.id, 0, 0, 0, 0, 0, 0.0, "00" * 32, item.source) for item in conversations]
    facts = ShardFacts(format_version=FORMAT_VERSION, shard="", made_from="", bytes=0, sha256="")
    return len(index_bytes(index_of(facts, entries, counts)))


def values_of_target(facts: TargetConfig, *, tied: bool) -> int:
    return facts.vocab_size * facts.hidden_size * (1 if tied else 2)
