"""Builds a feature store incrementally; resumes from finished shards."""

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch

from eagle3.errors import InputError
from eagle3.features.conversation import Conversation, WorkUnit
from eagle3.features.index import FORMAT_VERSION, INDICES, SHARDS, ShardIndex, index_name, parse_index
from eagle3.features.manifest import (
    MAKE_FEATURES,
    MANIFEST,
    TARGET_WEIGHTS,
    MadeFrom,
    Manifest,
    read_index,
    read_manifest,
    require_different_ids,
    write_manifest,
)
from eagle3.features.shards import broken, hash_made_from
from eagle3.features.store import save_target_weights
from eagle3.features.task import ShardResult
from eagle3.storage.folder import Storage
from eagle3.storage.prefault import sha256_bytes
from eagle3.target.stored import StoredTarget

log = logging.getLogger(__name__)

NAMED = 3  # shards in a message


class StoreWriter:
    """The driver's view of a store: workers write its shards."""

    def __init__(self, storage: Storage, made_from: MadeFrom) -> None:
        """Keep the shards that an earlier run finished; InputError if they were made otherwise."""
        self.storage, self.made_from, self.hash = storage, made_from, hash_made_from(made_from)
        self.before = storage.version(MANIFEST)
        self.indices = self._finished_shards()
        self.new = 0
        before = read_manifest(storage) if self.before is not None else None  # an error if it is another stage's
        self.finished = before if self.indices else None
        self.logit_transform = self.finished.target_config.logit_transform if self.finished else None

    def ids(self) -> set[str]:
        return {sample_id for index in self.indices for sample_id in index.ids()}

    def require_same_answers(self, conversations: Iterable[Conversation], *, answers: Path) -> None:
        """Raise InputError unless the finished shards were made of these conversations, read from `answers`."""
        unseen = {
            sample_id: bytes(digest)
            for index in self.indices
            for sample_id, digest in zip(index.ids(), index.columns["answer_sha256"], strict=True)
        }
        others = []
        for conversation in conversations:
            made_of = unseen.pop(conversation.id, None)
            if made_of is not None and made_of.hex() != conversation.sha256:
                others.append(conversation.id)
        others += unseen  # no longer in the file
        if not others:
            return
        shards = [index.facts.shard for index in self.indices if not set(index.ids()).isdisjoint(others)]
        more = f" and {len(shards) - NAMED} more" if shards[NAMED:] else ""
        raise InputError(
            f"{self.storage.location}: {len(others)} of {len(self.ids())} samples were made of other answers than "
            f"{answers} has now, e.g. {others[0]}; bring those answers back, or delete "
            f"{', '.join(shards[:NAMED])}{more}, each with its .index (e.g. {index_name(shards[0])}), and run: "
            f"{MAKE_FEATURES}"
        )

    def numbers(self) -> set[int]:
        """Return the numbers of shards that are taken, if only by an index whose tar is gone. What a finished store
        gains comes after its shards: a training of before is continued on the first ones."""
        taken = {int(name[6:12]) for name in self.storage.names(INDICES)}
        return {*range(max(taken, default=-1) + 1)} if self.finished else taken

    def save_weights(self, target: StoredTarget, *, dtype: torch.dtype) -> None:
        """Write the target's embedding and `lm_head`, unless whole ones are next to finished shards."""
        there = bool(self.indices and self.storage.names(TARGET_WEIGHTS))
        if there and self.finished:
            there = sha256_bytes(self.storage.read(TARGET_WEIGHTS)) == self.finished.target_weights_sha256
        if not there:
            save_target_weights(self.storage, target.embedding, target.lm_head, dtype=dtype)

    def at_least_one(self, units: Iterator[tuple[int, WorkUnit]]) -> Iterator[tuple[int, WorkUnit]]:
        """Yield the units, or an empty one if no worker has reported the target's logit transform yet."""
        number = None
        for number, unit in units:
            yield number, unit
        if number is None and self.indices and self.logit_transform is None:
            yield -1, WorkUnit(self.hash, [])

    def take(self, made: ShardResult) -> None:
        self.logit_transform = made.logit_transform
        if made.index is not None:
            self.indices.append(parse_index(memoryview(made.index), source="a new shard", remedy="", check_seal=False))
            self.new += 1

    def finish(self, target: StoredTarget, *, left_out: Mapping[str, int]) -> Manifest:
        """Write the manifest, and delete shards that it does not name, also unfinished ones."""
        if not self.new:
            log.info("%s is up to date", self.storage.location)
        assert self.logit_transform is not None
        facts = replace(target.facts, dtype=target.checkpoint_dtype or "bfloat16", logit_transform=self.logit_transform)
        manifest = write_manifest(
            self.storage,
            made_from=self.made_from,
            target_config=facts,
            indices=sorted(self.indices, key=lambda index: index.facts.shard),
            left_out=dict(left_out),
            instead_of=self.before,
        )
        named = {index.facts.shard for index in self.indices}
        if unnamed := sorted({*self.storage.names(SHARDS)} - named):
            what = "deleted shards without an index, of a killed run"
            log.info("%s: %s: %d, e.g. %s", self.storage.location, what, len(unnamed), unnamed[0])
        for name in unnamed:
            self.storage.delete(name)
        self.storage.delete_unfinished("shard-*")
        return manifest

    def _finished_shards(self) -> list[ShardIndex]:
        there = {*self.storage.names(SHARDS)}
        indices = [read_index(self.storage, name) for name in self.storage.names(INDICES)]
        indices = [index for index in indices if index.facts.shard in there]
        require_different_ids(self.storage, indices)
        for index in indices:
            facts = index.facts
            if facts.format_version != FORMAT_VERSION:
                raise InputError(
                    f"{self.storage.location}/{facts.shard} is of an earlier version (format_version="
                    f"{facts.format_version}), whose stores can be trained on, but not continued: choose another "
                    f"out_dir or features.path, or delete {self.storage.location} and run: {MAKE_FEATURES}"
                )
            if self.storage.size(facts.shard) != facts.bytes:
                held = f"holds {self.storage.size(facts.shard)} bytes instead of {facts.bytes}"
                raise broken(f"{self.storage.location}/{facts.shard}", held)
            if facts.made_from != self.hash:
                raise InputError(
                    f"{self.storage.location}/{facts.shard} was made with settings other than this run's "
                    f"({self._differences()}); choose another out_dir, or delete {self.storage.location}"
                )
        return indices

    def _differences(self) -> str:
        """Return the settings that differ from those of a finished store; shards alone hold only a hash of them."""
        if not self.storage.names(MANIFEST):
            return "another target, target.dtype, template, sampling or features.* setting"
        return read_manifest(self.storage).made_from.differences(self.made_from)
