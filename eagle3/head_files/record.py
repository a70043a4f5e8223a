"""training.json next to an exported head: how it was trained, and its measured accept length.

Hashes, paths and numbers: nothing of the text that the head learned from.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np

from eagle3.features.samples import Samples
from eagle3.features.source import FeatureSource
from eagle3.storage.files import write_whole
from eagle3.storage.records import Record, parse_sealed, sealed_bytes
from eagle3.target.facts import TargetConfig
from eagle3.target.identity import TargetIdentity

FILE = "training.json"


@dataclass(frozen=True, kw_only=True)
class Origin(Record):
    """The features that a head is trained on: their target, where they are (several stores joined: their paths), and
    the share that is held out for validation."""

    target: TargetIdentity
    target_config: TargetConfig
    capture_layers: list[int]  # indices into Hugging Face's `hidden_states`
    path: str | list[str]
    hash: str
    shards: list[int] | None = None  # that each store had; None: not recorded
    val_fraction: float
    tokens_of_99_percent: int | None = None  # 99 % of the training samples have at most so many; None: not recorded

    @classmethod
    def of(cls, source: FeatureSource, train_samples: Samples, val_fraction: float) -> "Origin":
        return cls(
            target=source.made_from.target,
            target_config=source.target_config,
            capture_layers=source.made_from.capture_layers,
            path=source.location,
            hash=source.fingerprint,
            shards=source.samples.shards_by_store(),
            val_fraction=val_fraction,
            tokens_of_99_percent=int(np.quantile(train_samples.tokens, 0.99, method="higher")),
        )


@dataclass(frozen=True, kw_only=True)
class MeasuredAcceptLength(Record):
    """An accept length by our own decoder, with the prompts and the settings that it was measured on.

    `standard_error` is over conversations, None where it is infinite. `accept_length_kept` leaves out tokens after a
    stop token. `per_depth[d - 1]` is the share of verifications that accepted at least d drafts. `lossless` is the
    share of answers that are the target's own greedy ones, None where that was not compared. `turns` is prompts.turns,
    by which the `prompts` of the `conversations` were chosen (None in older files, where they are as many).
    `from_validation` says that training held these prompts out, `left_out` how many were for what reason. `dtype` is
    the one computed in."""

    accept_length: float
    standard_error: float | None
    accept_length_kept: float
    per_depth: list[float]
    lossless: float | None
    tokens: int
    verifications: int
    seconds: float
    conversations: int | None = None
    turns: str = "first"
    prompts: int
    prompts_from: str
    from_validation: bool
    prompts_hash: str
    left_out: dict[str, int]
    dtype: str
    max_new_tokens: int
    temperature: float
    top_p: float = 1.0
    top_k: int = 0
    seed: int
    steps: int
    topk: int
    draft_tokens: int | None
    draft_window: int | None = None


@dataclass(frozen=True, kw_only=True)
class HeadRecord(Record):
    """Everything that training.json holds.

    `simulated_accept_length` maps draft steps to what validation during training simulated along whole stored answers,
    as a server counts it. `accept_length` is measured once the target has been there. `checkpoint` is Lightning's.
    `started_from` are the sha256 of the files of the head that the training started from, by name (empty if from
    scratch); `files` those of the folder's other files, as they were exported."""

    FORMAT_VERSION: ClassVar[int] = 5

    format_version: int
    kind: str
    ttt_steps: int
    simulated_accept_length: dict[int, float]
    accept_length: MeasuredAcceptLength | None
    origin: Origin
    checkpoint: str
    started_from: dict[str, str]
    versions: dict[str, str]
    files: dict[str, str]


def write_record(folder: Path, record: HeadRecord) -> None:
    """Write training.json. A head is handed on, so paths of this machine are written as seen from its folder."""

    def seen(path: str) -> str:
        return os.path.relpath(path, folder) if os.path.isabs(path) else path

    write_whole(folder / FILE, sealed_bytes(_with_paths(record, seen)))


def _with_paths(record: HeadRecord, change: Callable[[str], str]) -> HeadRecord:
    path, target = record.origin.path, record.origin.target
    paths = change(path) if isinstance(path, str) else [change(each) for each in path]
    return replace(record, origin=replace(record.origin, path=paths, target=replace(target, name=change(target.name))))


def read_record(folder: Path, *, made_by: str) -> HeadRecord | None:
    """Read training.json; None where the folder has none, because another trainer made the head.

    Raises InputError for whatever this version did not write; `made_by` is the command that makes the head again."""
    path = folder / FILE
    if not path.exists():
        return None
    fix = f"export the head again, or take the file out of the folder: {made_by}"
    record = parse_sealed(path.read_bytes(), HeadRecord, source=str(path), remedy=fix)

    def from_here(given: str) -> str:
        return os.path.abspath(folder / given) if given.startswith(os.pardir) else given

    return _with_paths(record, from_here)
