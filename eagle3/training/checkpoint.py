"""Lightning checkpoints of a draft head: written whole, read without pickle, and what a training may go on from."""

import hashlib
import io
import json
import logging
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from torch import Tensor

from eagle3.errors import InputError
from eagle3.features.source import FeatureSource, as_setting
from eagle3.head.draft_head import DraftHead
from eagle3.storage.files import atomic_write, sha256_file
from eagle3.storage.folder import LocalFolder, write_file
from eagle3.storage.place import open_folder
from eagle3.storage.records import Record, parse_record
from eagle3.target.facts import TargetConfig
from eagle3.target.identity import TargetIdentity, require_same_target

log = logging.getLogger(__name__)
KEY = "eagle3"  # of the record in Lightning's dictionary
GROUPS = ("data", "loss_mask", "loss", "optim")
# Where the samples lie, and how they are read. Kernels are in no group: they compute the same.
MAY_CHANGE = (
    "data._target_", "data.path", "data.source", "data.cache_dir", "data.cache_gb", "data.prefetch", "data.readers",
    "data.verify",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Origin(Record):
    """The features that a head is trained on. `counts` are those of the source, for people."""

    target: TargetIdentity
    target_config: TargetConfig
    capture_layers: list[int]  # indices into Hugging Face's `hidden_states`
    path: str | list[str]
    hash: str
    val_fraction: float

    @classmethod
    def of(cls, source: FeatureSource, val_fraction: float) -> "Origin":
        return cls(
            target=source.made_from.target,
            target_config=source.target_config,
            capture_layers=source.made_from.capture_layers,
            path=source.location,
            hash=source.fingerprint,
            val_fraction=val_fraction,
        )


@dataclass(frozen=True, kw_only=True)
class TrainingRecord(Record):
    """What a checkpoint says beside its weights: which head it is, how it was trained and on what."""

    FORMAT_VERSION: ClassVar[int] = 1

    format_version: int
    kind: str
    head_config: dict[str, Any]  # of the kind's config_type
    ttt_steps: int
    accept_length: dict[str, float]  # by metric, of the latest validation
    origin: Origin
    settings: dict[str, Any]  # by config key: what a training keeps to from its first step to its last


@dataclass(frozen=True)
class Checkpoint:
    path: Path
    record: TrainingRecord
    content: dict[str, Any]  # Lightning's, of all of it

    @property
    def weights(self) -> dict[str, Tensor]:
        """Those of HeadTraining."""
        return self.content["state_dict"]

    @property
    def global_step(self) -> int:
        return self.content["global_step"]


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint under a temporary name first: a full disk or a kill leaves the one before as it was.

    torch reads a checkpoint without a look at the checksums of its ZIP archive, so the archive's comment, with which
    the file ends, is the sha256 of all before: it is there when the file is, and goes where the file goes.

    `copies` is a bucket or folder that holds, when saving ends, what the run's own folder holds.
    """

    def __init__(self, copies: str | None = None) -> None:
        self.copies = open_folder(copies, setting="checkpoint_copies") if copies else None
        # What the run goes on from, so that Lightning does not read it again.
        self.read_already: dict[str, Any] | None = None

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        content, self.read_already = self.read_already, None
        return content or super().load_checkpoint(path, map_location, weights_only)

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        buffer = io.BytesIO()  # torch hides what writing to a full disk raises
        torch.save(checkpoint, buffer)
        content = buffer.getbuffer()
        content[-2:] = COMMENT_LENGTH.to_bytes(2, "little")  # an archive without a comment ends with its length
        comment = _comment(content)
        with atomic_write(Path(path)) as file:
            file.write(content)
            file.write(comment)
        if self.copies:
            write_file(self.copies, Path(path).name, b"".join((content, comment)))

    def remove_checkpoint(self, path: str | Path) -> None:
        super().remove_checkpoint(path)
        if self.copies:
            self.copies.delete(Path(path).name)


def _comment(archive: bytes | memoryview) -> bytes:
    return b"sha256:" + hashlib.sha256(archive).hexdigest().encode()


COMMENT_LENGTH = len(_comment(b""))


def _is_whole(path: Path) -> bool:
    stored = LocalFolder(path.parent).read(path.name)  # mapped: gigabytes that need not be in memory
    return stored[-COMMENT_LENGTH:] == _comment(stored[:-COMMENT_LENGTH])


def read_checkpoint(path: str | Path, *, setting: str) -> Checkpoint:
    """Read a checkpoint of HeadTraining; `setting` is the config key and value that name it."""
    way_out = (
        "give another one, e.g. RUN/checkpoints/last.ckpt of: python train.py data.path=DIR/features hydra.run.dir=RUN"
    )
    if not _is_whole(Path(path)):
        raise InputError(f"{setting}: {path} is damaged, or no checkpoint of a draft head; {way_out}")
    content = torch.load(path, map_location="cpu", weights_only=True)
    if KEY not in content:
        raise InputError(f"{setting}: {path} is a checkpoint of something else than a draft head; {way_out}")
    record = parse_record(
        json.dumps(content[KEY]).encode(), TrainingRecord, source=f"{setting}: {path}", way_out=way_out
    )
    return Checkpoint(Path(path), record, content)


def decisive_settings(config: dict[str, Any]) -> dict[str, Any]:
    """Return what a training keeps to, by config key; `config` is a composed train.yaml. Of files it is the sha256,
    since they may move or change: of data.ids here, of the head that it starts from in train.py."""
    grouped = {f"{group}.{key}": value for group in GROUPS for key, value in config[group].items()}
    settings = {"seed": config["seed"], "ttt_steps": config["ttt_steps"], **grouped}
    if path := settings.get("data.ids"):
        settings["data.ids"] = sha256_file(Path(path))
    return {key: value for key, value in settings.items() if key not in MAY_CHANGE}


def require_own_folder(run_dir: Path, checkpoint: str | None) -> None:
    """A training that starts anew would take the checkpoints of an earlier one for its own."""
    kept = sorted((run_dir / "checkpoints").glob("*.ckpt"))
    if checkpoint is None and kept:
        last = run_dir / "checkpoints" / "last.ckpt"
        raise InputError(
            f"hydra.run.dir={run_dir} holds an earlier training; go on with it by "
            f"ckpt_path={last if last in kept else kept[-1]}, or give another hydra.run.dir"
        )


def local_checkpoint(ckpt_path: str | None, run_dir: Path, copies: str | None) -> str | None:
    """Return the file that `ckpt_path` means: `auto` is what was saved last in the run's folder, or else in its copies,
    None where nothing was. What lies in a bucket is brought to the run's folder, with the other checkpoints there."""
    folder = run_dir / "checkpoints"
    if ckpt_path == "auto":
        if (folder / "last.ckpt").is_file():
            return str(folder / "last.ckpt")
        if copies is None or not open_folder(copies, setting="checkpoint_copies").names("last.ckpt"):
            return None
        ckpt_path = f"{copies}/last.ckpt"
    place, separator, name = (ckpt_path or "").rpartition("/")
    if "://" not in place or not separator:
        return ckpt_path
    bucket = open_folder(place, setting="ckpt_path")
    names = bucket.names("*.ckpt")
    if name not in names:
        raise InputError(f"ckpt_path={ckpt_path} does not exist (there is {', '.join(names) or 'no checkpoint'})")
    for each in names:
        if not (folder / each).exists():
            log.info("%s/%s is brought to %s", place, each, folder)
            with atomic_write(folder / each) as file:
                file.write(bucket.read(each))
    return str(folder / name)


def read_resumed(path: str | None) -> Checkpoint | None:
    """Read the checkpoint that `ckpt_path` names."""
    if path is None:
        return None
    if not Path(path).is_file():
        there = ", ".join(sorted(each.name for each in Path(path).parent.glob("*.ckpt"))) or "no checkpoint"
        raise InputError(
            f"ckpt_path={path} does not exist (there is {there}); give RUN/checkpoints/last.ckpt of an earlier run"
        )
    return read_checkpoint(path, setting=f"ckpt_path={path}")


def require_checkpoint_fits(
    checkpoint: Checkpoint, source: FeatureSource, head: DraftHead, settings: dict[str, Any]
) -> None:
    """A checkpoint goes on only with its own settings, a head of its making, over features of its target."""
    record, path = checkpoint.record, checkpoint.path
    require_same_target(
        record.origin.target,
        source.made_from.target,
        expected_from=f"ckpt_path={path}",
        actual_from=f"data.path={as_setting(source.location)}",
    )
    differing = _differing(record.head_config, asdict(head.config))
    if not torch.equal(checkpoint.weights["head.draft_ids"], head.draft_ids):
        differing.append("other tokens in the draft vocabulary, which the store's answers decide")
    if differing:
        raise InputError(
            f"ckpt_path={path} holds another head than this run's ({', '.join(differing)}); give the model.* settings, "
            f"init_from and data.path of the run that it comes from"
        )
    differing = _differing(record.settings, settings)
    if differing:
        raise InputError(
            f"ckpt_path={path} was trained with other settings ({', '.join(differing)}); give those of that run "
            f"(.hydra/overrides.yaml in its folder), or start anew without ckpt_path"
        )
    if record.origin.hash != source.fingerprint:
        log.warning(
            "data.path=%s has changed since %s: samples may be repeated or skipped", as_setting(source.location), path
        )


def _differing(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    keys = [key for key in before | now if before.get(key) != now.get(key)]
    return [f"{key}={before.get(key)} then, {now.get(key)} now" for key in keys]
