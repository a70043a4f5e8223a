"""Features made while training: samples are known from the answers, and their features are asked for ahead of the step.

Ids, lengths, masks and counts come from DIR/answers, so that plan and packs are those of a store of these answers. What
has been asked for and not read is bounded in bytes. Nothing is written to disk.

Shapes: V target vocabulary.
"""

import hashlib
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from threading import Condition, Thread
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from eagle3.answers.rows import AnsweredRow
from eagle3.answers.store import ANSWERS, parse_row, rows_and_ends
from eagle3.errors import InputError
from eagle3.features.build import FeatureSettings, finished_answers, made_from, sample_sizer, weights_dtype
from eagle3.features.conversation import Conversation, conversation_of
from eagle3.features.index import FORMAT_VERSION, ShardFacts, ShardIndex, index_of
from eagle3.features.manifest import totals
from eagle3.features.sample import Sample, positions_with_teacher
from eagle3.features.samples import IndexedShard, SampleRef, Samples
from eagle3.features.shards import entry_of, hash_of
from eagle3.features.source import MadeOnDemand, NoFeatures, TargetWeights
from eagle3.features.store import target_tensors
from eagle3.features.task import Extractor
from eagle3.progress import Bar
from eagle3.storage.files import sha256_json
from eagle3.target.facts import TargetConfig
from eagle3.target.stored import StoredTarget


@dataclass(eq=False)
class Window:
    """One pass over samples, whose features are asked for ahead. `held`: bytes asked for and not read yet."""

    keep: bool
    held: int = 0
    closed: bool = False  # nothing more is read
    asked_all: bool = False


@dataclass(frozen=True)
class Asked:
    window: Window
    size: int
    sample: "Future[Sample | str]"


class LiveFeatures(MadeOnDemand):
    """A `FeatureSource` of a folder of answers. `extractor`, which is set once it is ready, makes the features.

    Asks at most `ahead_gb` GB ahead, and keeps at most `val_gb` GB of what is to be kept."""

    remote = False
    extractor: Extractor

    def __init__(
        self,
        *,
        path: Path,
        target: StoredTarget,
        settings: FeatureSettings,
        ahead_gb: float,
        val_gb: float,
    ) -> None:
        self.location, self.file = str(path), path / ANSWERS
        self.target, self.settings = target, settings
        answers = finished_answers(target, path)
        self.made_from = made_from(target, answers, settings)
        self.size_of = sample_sizer(target, settings)
        self.left_out: Counter[str] = Counter()
        assert answers.counts is not None  # it is complete
        self.index = self._index(path, Bar(rows_and_ends(path), desc="read answers", total=answers.counts.rows))
        self.samples = Samples.of_shards([IndexedShard(self.location, ANSWERS, self.index)])
        self.most, self.room = int(ahead_gb * 1e9), int(val_gb * 1e9)
        self.kept: dict[str, Sample] = {}
        self.asked: dict[str, deque[Asked]] = {}
        self.windows: list[Window] = []
        self.closed = False
        self.changed = Condition()  # of all above

    def _index(self, path: Path, rows: Iterable[tuple[AnsweredRow, int]]) -> ShardIndex:
        """Note where each sample's answer is in the file, and its sizes."""
        entries, counts, begin = [], Counter[int](), 0
        for row, end in rows:
            if item := self._conversation_of(row, self.left_out):
                digest = item.sha256
                place = {"offset": begin, "size": end - begin, "sha256": digest, "answer_sha256": digest}
                entries.append(entry_of(item, **place, source=item.source, whole=item.whole))
                counts.update(item.input_ids[item.turns > 0].tolist())
            begin = end
        if not entries:
            raise InputError(f"data.path={path} has no answer that can be trained; left out: {dict(self.left_out)}")
        made = hash_of(self.made_from)
        facts = ShardFacts(format_version=FORMAT_VERSION, shard=ANSWERS, made_from=made, bytes=begin, sha256="")
        return index_of(facts, entries, counts)

    def _conversation_of(self, row: AnsweredRow, left_out: Counter[str]) -> Conversation | None:
        max_length, too_long = self.settings.max_length, self.settings.too_long
        return conversation_of(row, max_length=max_length, too_long=too_long, left_out=left_out)

    # --- facts -------------------------------------------------------------------------------------------------------

    @cached_property
    def target_config(self) -> TargetConfig:
        transform, dtype = self.extractor.logit_transform(), self.target.checkpoint_dtype or "bfloat16"
        return replace(self.target.facts, dtype=dtype, logit_transform=transform)

    @cached_property
    def answer_counts(self) -> Int[Tensor, " V"]:
        counts = np.zeros(self.target.facts.vocab_size, np.int64)
        counts[self.index.columns["token"]] = self.index.columns["times"]
        return torch.from_numpy(counts)

    @property
    def fingerprint(self) -> str:
        answers = hashlib.sha256(self.index.columns["answer_sha256"].tobytes()).hexdigest()
        return sha256_json([hash_of(self.made_from), answers])

    def describe(self) -> dict[str, Any]:
        counts = totals([self.index], self.target.facts.vocab_size)
        counts = {key: counts[key] for key in ("samples", "tokens", "answer_tokens")}
        facts = {"made_from": asdict(self.made_from), "target_config": asdict(self.target_config)}
        return {**counts, "left_out": dict(self.left_out), **facts}

    def target_weights(self) -> TargetWeights:
        return self._target_weights

    @cached_property
    def _target_weights(self) -> TargetWeights:
        dtype = weights_dtype(self.settings)
        tensors = target_tensors(self.target.embedding, self.target.lm_head, dtype=dtype)
        return tensors["embedding"], tensors.get("lm_head", tensors["embedding"])

    def verify(self, *, rank: int = 0, world_size: int = 1) -> None:
        """Do nothing: the answers are compared with their hash when the source is made, and each again when it is
        asked for."""

    # --- samples -----------------------------------------------------------------------------------------------------

    @contextmanager
    def ahead(self, refs: Iterator[SampleRef], *, keep: bool) -> Iterator[None]:
        """Let a thread ask for the samples, as far as `ahead_gb` lets; one of them it may always ask for."""
        window = Window(keep)
        asking = Thread(target=self._ask_all, args=(refs, window), daemon=True)
        with self.changed:
            self.windows.append(window)
        asking.start()
        try:
            yield
        finally:
            with self.changed:
                window.closed = True
                self.changed.notify_all()
            asking.join()
            with self.changed:
                self.windows.remove(window)
                self._forget(window)

    def close(self) -> None:
        """Let nobody wait for a sample that is not asked for yet: the extractor is about to end."""
        with self.changed:
            self.closed = True
            for window in self.windows:
                window.closed = True
            self.changed.notify_all()

    def read(self, ref: SampleRef) -> Sample:
        """Wait for a sample that has been asked for, or will be; one that is in no window is asked for now."""
        if kept := self.kept.get(ref.entry.id):
            return kept
        with self.changed:
            self.changed.wait_for(lambda: ref.entry.id in self.asked or all(each.asked_all for each in self.windows))
            if self.closed:
                raise RuntimeError("the source is closed")
            waiting = self.asked.pop(ref.entry.id, deque())
            asked = waiting.popleft() if waiting else Asked(Window(keep=False), 0, self._ask(ref))
            if waiting:
                self.asked[ref.entry.id] = waiting
        sample = asked.sample.result()
        with self.changed:
            asked.window.held -= asked.size
            self.changed.notify_all()
            if isinstance(sample, str):
                raise NoFeatures(
                    f"data.path={self.location}: the engine refuses sample {ref.entry.id} of {ref.entry.tokens} tokens "
                    f"({sample}); leave such samples out, e.g. with data.max_tokens"
                )
            if asked.window.keep and asked.size <= self.room:
                self.room -= asked.size
                self.kept[sample.id] = sample
        return sample

    def without_features(self, ref: SampleRef) -> Sample:
        item = self._conversation(ref)
        has_teacher = positions_with_teacher(item.turns, self.settings.teachers)
        taught = int(has_teacher.sum())
        return Sample(
            id=item.id,
            input_ids=item.input_ids,
            turns=item.turns,
            aux_hidden_states=torch.empty(len(item.input_ids), 0),
            last_hidden_state=torch.empty(taught, 0),
            teacher_argmax=torch.empty(taught, dtype=torch.long),
            has_teacher=has_teacher,
        )

    def _ask_all(self, refs: Iterator[SampleRef], window: Window) -> None:
        for ref in refs:
            if ref.entry.id in self.kept:
                continue
            size = self._size(ref)
            if not self._has_room(window, size):
                break
            asked = Asked(window, size, self._ask(ref))
            with self.changed:
                self.asked.setdefault(ref.entry.id, deque()).append(asked)
                self.changed.notify_all()
        with self.changed:
            window.asked_all = True
            self.changed.notify_all()

    def _has_room(self, window: Window, size: int) -> bool:
        """Wait until so many bytes may be asked for; False if the window has been closed meanwhile."""
        with self.changed:
            self.changed.wait_for(lambda: window.closed or not window.held or window.held + size <= self.most)
            window.held += size
            return not window.closed

    def _size(self, ref: SampleRef) -> int:
        """Return the bytes of a sample's features, or a few more."""
        tokens = ref.entry.tokens
        return self.size_of.of_lengths(tokens, tokens if self.settings.teachers == "all" else ref.entry.answer_tokens)

    def _ask(self, ref: SampleRef) -> "Future[Sample | str]":
        try:
            return self.extractor.ask(self._conversation(ref))
        except Exception as error:  # for the thread that reads the sample
            failed: Future[Sample | str] = Future()
            failed.set_exception(error)
            return failed

    def _conversation(self, ref: SampleRef) -> Conversation:
        entry, source = ref.entry, f"data.path={self.location}: {ANSWERS} at sample {ref.entry.id}"
        with self.file.open("rb") as file:
            file.seek(entry.offset)
            line = file.read(entry.size)
        item = self._conversation_of(parse_row(line, source=source), Counter())
        if item is None or item.sha256 != entry.sha256:
            raise InputError(f"{source} has changed since this training began; bring the answers back as they were")
        return item

    def _forget(self, window: Window) -> None:
        """Drop what was asked for in a window and is not read any more."""
        for sample_id, waiting in [*self.asked.items()]:
            for each in [each for each in waiting if each.window is window]:
                each.sample.cancel()
                waiting.remove(each)
            if not waiting:
                del self.asked[sample_id]
