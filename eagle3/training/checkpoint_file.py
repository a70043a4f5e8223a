"""The checkpoint file of a draft head, read without pickle, and without Lightning, whose import takes seconds."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, ClassVar

import torch
from torch import Tensor

from eagle3.errors import InputError
from eagle3.head_files.record import Origin
from eagle3.storage.files import CHECKPOINTS
from eagle3.storage.folder import LocalFolder, Storage
from eagle3.storage.records import Record, parse_record

KEY = "eagle3"  # of the record in Lightning's checkpoint dictionary


@dataclass(frozen=True, kw_only=True)
class TrainingRecord(Record):
    """Content of a checkpoint besides the weights: the kind of head, its features, and its settings."""

    FORMAT_VERSION: ClassVar[int] = 1

    format_version: int
    kind: str
    head_config: dict[str, Any]  # fields of the kind's config_type
    ttt_steps: int
    accept_length: dict[str, float]  # by metric, in the latest validation
    origin: Origin
    settings: dict[str, Any]  # by config key: those that must not change during a training


@dataclass(frozen=True)
class Checkpoint:
    path: Path
    record: TrainingRecord
    content: dict[str, Any]  # Lightning's dictionary

    @property
    def weights(self) -> dict[str, Tensor]:
        """State dict of HeadTraining."""
        return self.content["state_dict"]

    @property
    def global_step(self) -> int:
        return self.content["global_step"]


def sha256_comment(archive: bytes | memoryview) -> bytes:
    return b"sha256:" + hashlib.sha256(archive).hexdigest().encode()


COMMENT_LENGTH = len(sha256_comment(b""))


def read_comment(folder: Storage, name: str) -> bytes:
    """Return the end of a checkpoint file, which is the sha256 of everything before it."""
    size = folder.size(name)
    return bytes(folder.read(name, max(0, size - COMMENT_LENGTH), size))


def read_checkpoint(path: str | Path, *, setting: str) -> Checkpoint:
    """Read a checkpoint of HeadTraining; `setting` is the config key and value that name it."""
    others = sorted({*Path(path).parent.glob(CHECKPOINTS)} - {Path(path)})  # last.ckpt comes last
    usual = "RUN/checkpoints/last.ckpt of: python train.py data.path=DIR/features hydra.run.dir=RUN"
    fix = f"move it away and give {others[-1]}" if others else f"give another one, e.g. {usual}"
    stored = LocalFolder(Path(path).parent).read(Path(path).name)  # mapped, since it may be gigabytes
    if stored[-COMMENT_LENGTH:] != sha256_comment(stored[:-COMMENT_LENGTH]):
        raise InputError(f"{setting}: {path} is damaged, or not a checkpoint of a draft head; {fix}")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except UnpicklingError:
        raise InputError(f"{setting}: {path} has objects that may run code when read, and is not read; {fix}") from None
    if KEY not in content:
        raise InputError(f"{setting}: {path} is a checkpoint of something other than a draft head; {fix}")
    record = parse_record(json.dumps(content[KEY]).encode(), TrainingRecord, source=f"{setting}: {path}", remedy=fix)
    return Checkpoint(Path(path), record, content)
