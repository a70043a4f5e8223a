"""Lightning checkpoints of a draft head: written whole, and read without pickle."""

import hashlib
import io
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, ClassVar

import numpy as np
import torch
from lightning.pytorch.plugins import TorchCheckpointIO
from torch import Tensor
from torch.utils.serialization import config as torch_format

from eagle3.errors import InputError
from eagle3.features.samples import Samples
from eagle3.features.source import FeatureSource
from eagle3.storage.files import atomic_write
from eagle3.storage.folder import LocalFolder, Storage, open_folder, write_file
from eagle3.storage.records import Record, parse_record
from eagle3.target.facts import TargetConfig
from eagle3.target.identity import TargetIdentity

OWNER = "run.json"  # in the folder of copies: the run that they are of, and its latest start
KEY = "eagle3"  # of the record in Lightning's checkpoint dictionary


@dataclass(frozen=True, kw_only=True)
class Origin(Record):
    """The features that a head is trained on."""

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


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint under a temporary name first, so that a full disk or a kill leaves the previous one intact.

    torch does not verify the checksums of a checkpoint's ZIP archive. They take the most time and are left out, so
    `unzip -t` reports errors. Instead, the archive's comment, the end of the file, is the sha256 of what comes before.

    `copies` is a bucket or folder to which every checkpoint is written before saving returns, while its run.json is of
    the version `claimed` (copies.py).
    """

    def __init__(self, copies: str | None = None) -> None:
        self.copies = open_folder(copies, setting="checkpoint_copies") if copies else None
        self.claimed: str | None = None
        # The checkpoint that the run resumes from, if it is in memory: Lightning does not read it again.
        self.read_already: dict[str, Any] | None = None

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        content, self.read_already = self.read_already, None
        return content or super().load_checkpoint(path, map_location, weights_only)

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        buffer = io.BytesIO()  # torch hides the error of a full disk
        with torch_format.patch("save.compute_crc32", False):  # type: ignore[attr-defined]
            torch.save(checkpoint, buffer)
        content = buffer.getbuffer()
        content[-2:] = COMMENT_LENGTH.to_bytes(2, "little")  # an archive without a comment ends with its length
        with ThreadPoolExecutor(1) as executor, atomic_write(Path(path)) as file:
            comment = executor.submit(_comment, content)
            file.write(content)
            file.write(comment.result())
        if self.copies:
            self.require_claimed()
            write_file(self.copies, Path(path).name, b"".join((content, comment.result())))

    def remove_checkpoint(self, path: str | Path) -> None:
        super().remove_checkpoint(path)
        if self.copies:
            self.require_claimed()
            self.copies.delete(Path(path).name)

    def require_claimed(self) -> None:
        """Raise InputError if another process writes the copies now."""
        if self.copies and self.copies.version(OWNER) != self.claimed:
            raise InputError(
                f"checkpoint_copies={self.copies.location} is written by another process since this training started "
                f"({OWNER} there names it); stop one of them, or give each run a folder of its own"
            )


def _comment(archive: bytes | memoryview) -> bytes:
    return b"sha256:" + hashlib.sha256(archive).hexdigest().encode()


COMMENT_LENGTH = len(_comment(b""))


def read_comment(folder: Storage, name: str) -> bytes:
    """Return the end of a checkpoint file, which is the sha256 of everything before it."""
    size = folder.size(name)
    return bytes(folder.read(name, max(0, size - COMMENT_LENGTH), size))


def read_checkpoint(path: str | Path, *, setting: str) -> Checkpoint:
    """Read a checkpoint of HeadTraining; `setting` is the config key and value that name it."""
    fix = (
        "give another one, e.g. RUN/checkpoints/last.ckpt of: python train.py data.path=DIR/features hydra.run.dir=RUN"
    )
    stored = LocalFolder(Path(path).parent).read(Path(path).name)  # mapped, since it may be gigabytes
    if stored[-COMMENT_LENGTH:] != _comment(stored[:-COMMENT_LENGTH]):
        raise InputError(f"{setting}: {path} is damaged, or not a checkpoint of a draft head; {fix}")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except UnpicklingError:
        raise InputError(f"{setting}: {path} has objects that may run code when read, and is not read; {fix}") from None
    if KEY not in content:
        raise InputError(f"{setting}: {path} is a checkpoint of something other than a draft head; {fix}")
    record = parse_record(json.dumps(content[KEY]).encode(), TrainingRecord, source=f"{setting}: {path}", remedy=fix)
    return Checkpoint(Path(path), record, content)
