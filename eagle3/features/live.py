"""Features made while training: samples are known from the answers, and their features are asked for ahead of the step.

Ids, lengths, masks and counts come from the answers, so that plan and packs are those of stores of these answers. They
are read once and kept. What has been asked for and not read is bounded in bytes. Nothing is written to disk.

Shapes: V target vocabulary.
"""

import hashlib
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from eagle3.answers.store import ANSWERS
from eagle3.errors import InputError
from eagle3.features.build import STORED, FeatureSettings, finished_answers, made_from, weights_dtype
from eagle3.features.concat import require_joinable
from eagle3.features.conversation import Conversation, read_conversations
from eagle3.features.sample import Sample, positions_with_teacher
from eagle3.features.samples import SampleRef, Samples
from eagle3.features.shards import build_sample_entry, hash_made_from
from eagle3.features.source import MadeOnDemand, NoFeatures, TargetWeights
from eagle3.features.store import target_tensors
from eagle3.features.task import Extractor
from eagle3.progress import Bar
from eagle3.storage.files import sha256_json
from eagle3.target.facts import TargetConfig
from eagle3.target.stored import StoredTarget

Name = tuple[str, str]  # the folder of a sample and its id there


@dataclass(eq=False)
class Window:
    """One pass over samples, whose features are asked for ahead. `held`: bytes asked for and not read yet."""

    upcoming: Iterator[SampleRef]
    keep: bool
    held: int = 0
    asked: dict[Name, deque[Future[Sample | str]]] = field(default_factory=lambda: defaultdict(deque))


class LiveFeatures(MadeOnDemand):
    """A `FeatureSource` of folders of answers. `extractor`, which is set once it is ready, makes the features.

    Asks ahead until it holds `ahead_gb` GB, and keeps at most `val_gb` GB of the samples that are to be kept."""

    remote = False
    extractor: Extractor

    def __init__(
        self, *, paths: list[Path], target: StoredTarget, settings: FeatureSettings, ahead_gb: float, val_gb: float
    ) -> None:
        self.target, self.settings = target, settings
        self.left_out: Counter[str] = Counter()
        self.conversations: dict[Name, Conversation] = {}
        self.answer_counts: Int[Tensor, " V"] = torch.zeros(target.facts.vocab_size, dtype=torch.long)
        made = [made_from(target, finished_answers(target, path), settings) for path in paths]
        self.made_from = made[0]
        of_folders = [self._read_answers(path) for path in paths]
        self.location: str | list[str] = [*map(str, paths)] if len(paths) > 1 else str(paths[0])
        hashes = [
            sha256_json([hash_made_from(each), digest]) for each, (_, digest) in zip(made, of_folders, strict=True)
        ]
        require_joinable([*zip(map(str, paths), made, hashes, strict=True)], "answers")
        self.fingerprint = sha256_json(hashes) if len(hashes) > 1 else hashes[0]
        self.samples = Samples.of([ref for refs, _ in of_folders for ref in refs])
        self.weights = target_tensors(target.embedding, target.lm_head, dtype=weights_dtype(settings))
        self.most, self.room = int(ahead_gb * 1e9), int(val_gb * 1e9)
        self.kept: dict[Name, Sample] = {}
        self.windows: list[Window] = []
        self.early: Counter[Name] = Counter()  # samples that were read before a window had asked for them
        self.closed = False
        self.lock = Lock()  # of all above

    def _read_answers(self, path: Path) -> tuple[list[SampleRef], str]:
        """Keep the conversations of a folder; return its samples and a hash of them."""
        rules: Any = {"max_length": self.settings.max_length, "too_long": self.settings.too_long}
        refs, digest, counts = [], hashlib.sha256(), Counter[int]()
        for item in Bar(read_conversations(path, **rules, left_out=self.left_out), desc="read answers"):
            self.conversations[str(path), item.id] = replace(
                item, input_ids=item.input_ids.int(), turns=item.turns.int()
            )
            entry = build_sample_entry(item, offset=0, size=0, sha256="", source=item.source, whole=item.whole)
            refs.append(SampleRef(str(path), ANSWERS, entry))
            digest.update(bytes.fromhex(item.sha256))
            counts.update(item.input_ids[item.turns > 0].tolist())
        if not refs:
            raise InputError(f"data.path={path} has no answer that can be trained; left out: {dict(self.left_out)}")
        self.answer_counts[[*counts]] += torch.tensor([*counts.values()])
        return refs, digest.hexdigest()

    # --- facts -------------------------------------------------------------------------------------------------------

    @cached_property
    def target_config(self) -> TargetConfig:
        transform, dtype = self.extractor.logit_transform(), self.target.checkpoint_dtype or "bfloat16"
        return replace(self.target.facts, dtype=dtype, logit_transform=transform)

    def describe(self) -> dict[str, Any]:
        tokens = {"tokens": int(self.samples.tokens.sum()), "answer_tokens": int(self.answer_counts.sum())}
        facts = {"made_from": asdict(self.made_from), "target_config": asdict(self.target_config)}
        return {"samples": len(self.samples), **tokens, "left_out": dict(self.left_out), **facts}

    def target_weights(self) -> TargetWeights:
        return self.weights["embedding"], self.weights.get("lm_head", self.weights["embedding"])

    def verify(self, *, rank: int = 0, world_size: int = 1) -> None:
        """Do nothing: the answers are compared with their hash when the source is made."""

    # --- samples -----------------------------------------------------------------------------------------------------

    @contextmanager
    def ahead(self, refs: Iterator[SampleRef], *, keep: bool) -> Iterator[None]:
        window = Window(refs, keep)
        with self.lock:
            self.windows.append(window)
            self._ask_ahead(window)
        try:
            yield
        finally:
            with self.lock:
                self.windows.remove(window)
                for unread in (future for futures in window.asked.values() for future in futures):
                    unread.cancel()

    def close(self) -> None:
        """Ask for nothing more: the extractor is about to end."""
        with self.lock:
            self.closed = True

    def read(self, ref: SampleRef) -> Sample:
        """Wait for a sample that has been asked for; others are asked for now."""
        name = sample_name(ref)
        if kept := self.kept.get(name):
            return kept
        with self.lock:
            window = next((each for each in self.windows if each.asked.get(name)), None)
            if window:
                future = window.asked[name].popleft()
            else:
                future = self._ask(ref)
                self.early[name] += bool(self.windows)
        sample = future.result()
        with self.lock:
            if window:
                window.held -= self._size(ref)
                self._ask_ahead(window)
            if isinstance(sample, str):
                raise NoFeatures(
                    f"data.path={ref.store}: the engine refuses sample {ref.entry.id} of {ref.entry.tokens} tokens "
                    f"({sample}); leave such samples out, e.g. with data.max_tokens"
                )
            if window and window.keep and self._size(ref) <= self.room:
                self.room -= self._size(ref)
                self.kept[name] = sample
        return sample

    def without_features(self, ref: SampleRef) -> Sample:
        item = self.conversations[sample_name(ref)]
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

    def _ask_ahead(self, window: Window) -> None:
        """Ask for the next samples of a window until it holds `ahead_gb`."""
        while window.held < self.most and (ref := next(window.upcoming, None)):
            if self.early[name := sample_name(ref)]:
                self.early[name] -= 1
            elif name not in self.kept:
                window.held += self._size(ref)
                window.asked[name].append(self._ask(ref))

    def _size(self, ref: SampleRef) -> int:
        """Return the bytes of a sample's features if all tokens have a teacher."""
        states = len(self.settings.capture_layers) + 1
        return ref.entry.tokens * states * self.target.facts.hidden_size * STORED[self.settings.dtype].itemsize

    def _ask(self, ref: SampleRef) -> Future[Sample | str]:
        if self.closed:
            raise RuntimeError("the source is closed")
        return self.extractor.ask(self.conversations[sample_name(ref)])


def sample_name(ref: SampleRef) -> Name:
    return ref.store, ref.entry.id
