"""Lightning checkpoint → exported head: its files as a server reads them, and training.json: where it comes from."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from eagle3.errors import InputError
from eagle3.head.draft_head import WithoutValues
from eagle3.head.head import Head
from eagle3.head.registry import kind_in, new_head
from eagle3.head_files.files import INDEX, MAKE_HEAD, HeadFiles, read_files
from eagle3.head_files.format import is_exported_head, save_head
from eagle3.head_files.record import FILE as RECORD
from eagle3.head_files.record import HeadRecord, read_record, write_record
from eagle3.storage.files import CHECKPOINTS, sha256_file
from eagle3.storage.records import read_sealed_json
from eagle3.storage.replace import require_free_place
from eagle3.target.facts import TargetConfig
from eagle3.training.checkpoint_file import read_checkpoint

MAKE_RUN = "python train.py data.path=DIR/features hydra.run.dir=RUN"
SIMULATED = "val/served_accept_length_"  # metrics of validation, followed by the number of steps


@dataclass(frozen=True)
class TrainedHead:
    """A trained head in float32, and the record of its training."""

    head: Head
    record: HeadRecord
    settings: dict[str, Any] = field(default_factory=dict)  # by config key: what the training kept to

    @property
    def target_config(self) -> TargetConfig:
        return self.record.origin.target_config

    @property
    def dtype(self) -> str:
        """The target's, which the head is served in."""
        assert self.target_config.dtype is not None  # the features stage writes one
        return self.target_config.dtype


def find_checkpoint(*, run: str | None, checkpoint: str | None) -> Path:
    """Return the given checkpoint, or a run's best: the one that result.json names, else the newest but the last."""
    if checkpoint is not None:
        return _existing(Path(checkpoint), f"checkpoint={checkpoint}")
    if run is None:
        raise InputError("run is not set; give the folder of a training run: run=RUN (or checkpoint=FILE.ckpt)")
    folder = Path(run) / "checkpoints"
    if (Path(run) / "result.json").is_file():
        best = Path(read_sealed_json(Path(run) / "result.json", made_by=MAKE_RUN)["checkpoint"])
        return _existing(folder / best.name, f"run={run}")  # by name: the run's folder may have moved
    found = sorted(folder.glob(CHECKPOINTS), key=lambda path: (path.name != "last.ckpt", path.stat().st_mtime))
    return _existing(found[-1] if found else folder / "last.ckpt", f"run={run}")


def _existing(path: Path, setting: str) -> Path:
    if not path.is_file():
        others = sorted(path.parent.glob(CHECKPOINTS))
        remedy = f"give checkpoint={others[-1]}" if others else f"name a finished run or make one with: {MAKE_RUN}"
        raise InputError(f"{setting}: {path} does not exist; {remedy}")
    return path


def read_trained(path: Path) -> TrainedHead:
    """Build the head, and its record, from a Lightning checkpoint of HeadTraining."""
    checkpoint = read_checkpoint(path, setting="run or checkpoint")
    training, prefix = checkpoint.record, "head."
    kind = kind_in(path.parent, training.kind)
    record = HeadRecord(
        format_version=HeadRecord.FORMAT_VERSION,
        kind=training.kind,
        ttt_steps=training.ttt_steps,
        simulated_accept_length={
            int(key.removeprefix(SIMULATED)): value
            for key, value in training.accept_length.items()
            if key.startswith(SIMULATED)
        },
        accept_length=None,
        origin=training.origin,
        checkpoint=recorded_name(checkpoint.path),
        started_from=training.settings.get("init_from", {}),
        versions={},
        files={},
    )
    weights = {name.removeprefix(prefix): w for name, w in checkpoint.weights.items() if name.startswith(prefix)}
    try:
        config = kind.config_type(**training.head_config)
        with WithoutValues():
            head = new_head(kind, config, weights["draft_ids"])
        head.load_state_dict(weights)
    except (RuntimeError, TypeError) as error:  # of the modules; of the config's fields
        raise InputError(
            f"{path}: model.kind={kind.name} has changed since the training ({' '.join(str(error).split())}); give "
            f"the class as it was"
        ) from None
    return TrainedHead(head.eval().requires_grad_(False), record, training.settings)


def recorded_name(checkpoint: Path) -> str:
    """Return RUN/checkpoints/FILE, which does not reveal whose disk it was on."""
    return "/".join(checkpoint.resolve().parts[-3:])


def is_export_of(head: Path, checkpoint: Path) -> bool:
    """Say whether `head` is an exported head of this checkpoint, which was not written again after the export."""
    if not is_exported_head(head):
        return False
    record = read_record(head, made_by=MAKE_HEAD)
    if record is None or record.checkpoint != recorded_name(checkpoint):
        return False
    return checkpoint.stat().st_mtime_ns <= (head / RECORD).stat().st_mtime_ns


def write_head(trained: TrainedHead, folder: Path, *, versions: dict[str, str]) -> HeadFiles:
    """Write the head's files into a folder without any, and return them as they are read back."""
    save_head(folder, trained.head, trained.record.origin.capture_layers, trained.dtype)
    hashes = {path.name: sha256_file(path) for path in sorted(folder.iterdir())}
    record = replace(trained.record, versions=versions, files=hashes)
    files = read_files(folder)  # before there is a record, whose hashes would be compared with those just made
    write_record(folder, record)
    return replace(files, record=record)


def require_replaceable(directory: Path, *, setting: str = "head", besides: Sequence[str] = ()) -> None:
    """Raise InputError unless `directory` is absent, empty or an exported head, and nothing else is in it, `besides`
    files of these names."""
    require_free_place(directory, setting=setting)
    empty = directory.is_dir() and not any(directory.iterdir())
    if directory.exists() and not empty and not is_exported_head(directory):
        raise InputError(f"{setting}={directory} exists and is no exported head: it is left alone; name another folder")
    found = {path.name for path in directory.glob("*") if path.suffix != ".safetensors"}
    if others := sorted(found - {"config.json", "training.json", "README.md", INDEX, *besides}):
        raise InputError(
            f"{setting}={directory} also holds {', '.join(others[:3])}, which no export wrote: it is left alone; move "
            f"that, or name another folder"
        )
