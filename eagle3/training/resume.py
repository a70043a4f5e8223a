"""Finds the checkpoint that a run resumes from, and compares what must be as when it was saved.

A run folder has one training. Once it has checkpoints, only its latest one resumes it, or a later one in the run's own
copies: a resumed run overwrites last.ckpt, and deletes the best checkpoints that the resumed one does not know.
"""

import json
import logging
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_only

from eagle3.errors import InputError
from eagle3.features.source import FeatureSource, as_setting
from eagle3.head.head import Head
from eagle3.storage.files import CHECKPOINTS, atomic_write
from eagle3.storage.folder import LocalFolder, Storage
from eagle3.target.identity import require_same_target
from eagle3.training.checkpoint_file import Checkpoint, read_checkpoint, read_comment
from eagle3.training.copies import RUN_ID, Copies
from eagle3.training.loggers import kept_id

log = logging.getLogger(__name__)
LAST = "last.ckpt"
GROUPS = ("data", "loss_mask", "loss", "optim")
# Where the samples are stored, and how they are read. Kernels are in no group: they all compute the same.
MAY_CHANGE = (
    "data._target_", "data.path", "data.source", "data.cache_dir", "data.cache_gb", "data.prefetch", "data.readers",
    "data.verify",
)  # fmt: skip

# Of trainer.*: a resumed training may change them, the jobs of a sweep may not.
OF_TRAINER = (
    "max_epochs", "max_steps", "max_time", "accumulate_grad_batches", "gradient_clip_val", "val_check_interval",
    "precision",
)  # fmt: skip


def decisive_settings(config: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that must not change during a training, by config key. `config` is a composed train.yaml.

    train.py adds whether `lm_head` is trained, and the initial head, which may move, by the sha256 of its files."""
    grouped = {f"{group}.{key}": value for group in GROUPS for key, value in config[group].items()}
    settings = {"seed": config["seed"], "ttt_steps": config["ttt_steps"], **grouped}
    return {key: value for key, value in settings.items() if key not in MAY_CHANGE}


def settings_of_result(config: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that a finished training depends on, by config key, as JSON has them."""
    model = {f"model.{key}": value for key, value in config["model"].items()}
    trainer = {f"trainer.{key}": config["trainer"].get(key) for key in OF_TRAINER}
    return json.loads(json.dumps({**decisive_settings(config), **model, **trainer, "init_from": config["init_from"]}))


class RunCheckpoints:
    """The checkpoints of a run: those in RUN/checkpoints, and their copies in a bucket or another folder."""

    def __init__(self, run_dir: Path, copies: str | None) -> None:
        self.run_dir, self.folder = run_dir, run_dir / "checkpoints"
        self.copies = Copies(copies, run_dir) if copies else None
        if self.copies and isinstance(self.copies.folder, LocalFolder):
            self._require_elsewhere(self.copies.folder.path)

    def resume_from(self, ckpt_path: str | None) -> str | None:
        """Return the local file that `ckpt_path` names; None starts a new training.

        `last` is the latest checkpoint of the run and its copies; `auto` too, or None if there is none. InputError if
        the run has checkpoints that the training would replace, or the copies are another run's."""
        if self.copies and is_first_rank():
            self.copies.look()
        if ckpt_path is None:
            self._require_new()
            return None
        if ckpt_path in ("auto", "last"):
            if self.copies and (self.latest() or not self.copies.has_checkpoints()):  # else the run continues here
                self.copies.require_free()
            self._update_from_copies()
            latest = self.latest()
            if latest is None and ckpt_path == "last":
                raise InputError(
                    f"ckpt_path=last: {self.folder} has no checkpoint; set hydra.run.dir to the folder of the run, or "
                    f"ckpt_path=auto, which then starts a new one"
                )
            return str(latest) if latest else None
        folder = ckpt_path.rpartition("/")[0]
        if "://" in ckpt_path:
            raise InputError(
                f"ckpt_path={ckpt_path} must be a file on this machine; copy it and give its path, or, if it is a copy "
                f"of this run, set checkpoint_copies={folder} ckpt_path=auto"
            )
        latest = self.latest()
        if latest and latest.resolve() != Path(ckpt_path).resolve():
            raise InputError(
                f"ckpt_path={ckpt_path} would replace the checkpoints of hydra.run.dir={self.run_dir}, of which only "
                f"the latest resumes it; give ckpt_path={latest}, or another hydra.run.dir, or delete that checkpoint "
                f"if it is damaged"
            )
        if self.copies and folder == self.copies.place:
            raise InputError(
                f"ckpt_path={ckpt_path} is one of checkpoint_copies={folder}; resume with ckpt_path=auto, which "
                f"fetches all of them"
            )
        if self.copies and is_first_rank():
            self.copies.require_free()
            if self.copies.has_checkpoints() and not (latest and self.copies.of_this_run()):
                raise InputError(
                    f"checkpoint_copies={self.copies.place} has checkpoints that ckpt_path={ckpt_path} would replace; "
                    f"resume them with ckpt_path=auto, or give another folder"
                )
            self._update_from_copies(ckpt_path)
        return ckpt_path

    def claim(self) -> str | None:
        """Give the run an id, and make its copies those that this process writes; return their version of run.json."""
        if not is_first_rank():
            return None
        if self.copies:
            return self.copies.claim()
        kept_id(self.run_dir / RUN_ID)
        return None

    def close(self) -> None:
        """Let another process write the copies."""
        if self.copies:
            self.copies.claimed.close()

    def latest(self) -> Path | None:
        """Return last.ckpt, or the best checkpoint of the latest step if the run was killed before its first one."""
        last, setting = self.folder / LAST, f"hydra.run.dir={self.run_dir}"
        if last.is_file():
            return last
        kept = self.folder.glob(CHECKPOINTS)
        return max(kept, key=lambda path: read_checkpoint(path, setting=setting).global_step, default=None)

    def _require_elsewhere(self, copies: Path) -> None:
        """Raise InputError if the checkpoints would be copied onto themselves: there would be no copy."""
        if copies.resolve() in (self.run_dir.resolve(), self.folder.resolve()):
            raise InputError(
                f"checkpoint_copies={copies} is the run's own folder, hydra.run.dir={self.run_dir}; give a folder on "
                f"another disk, or a bucket"
            )

    def _require_new(self) -> None:
        latest = self.latest()
        if latest:
            raise InputError(
                f"hydra.run.dir={self.run_dir} has checkpoints of an earlier training; resume it with "
                f"ckpt_path={latest}, or give another hydra.run.dir"
            )
        if self.copies and self.copies.has_checkpoints():
            raise InputError(
                f"checkpoint_copies={self.copies.place} has checkpoints of an earlier training; resume it with "
                f"ckpt_path=auto, or give another folder"
            )
        if self.copies:
            self.copies.require_free()
            self.copies.require_ended()

    def _update_from_copies(self, instead_of: str | None = None) -> None:
        """Bring the folder up to date if the copies are later: the run was continued on another machine. InputError if
        `instead_of` is to be resumed."""
        if self.copies:
            self.copies.require_ended()
        if not self.copies or not self.copies.folder.names(LAST):
            return
        latest, copies, place = self.latest(), self.copies.folder, self.copies.place
        if latest and not _same_file(copies, LAST, latest):
            with TemporaryDirectory(dir=self.folder, prefix=".copy-") as temporary:
                copy = Path(temporary) / LAST
                _download(copies, LAST, copy)
                there = read_checkpoint(copy, setting=f"checkpoint_copies={place}")
                here = read_checkpoint(latest, setting=f"hydra.run.dir={self.run_dir}")
                if differing := differing_settings(here.record.settings, there.record.settings):
                    raise InputError(
                        f"checkpoint_copies={place} has another training than hydra.run.dir={self.run_dir} "
                        f"({', '.join(differing)}); give the folder of this run's copies, or another hydra.run.dir"
                    )
                if there.global_step <= here.global_step:
                    return
                if instead_of:
                    raise InputError(
                        f"checkpoint_copies={place} has a later checkpoint (step {there.global_step}) than "
                        f"ckpt_path={instead_of} (step {here.global_step}); resume with ckpt_path=auto"
                    )
                copy.replace(self.folder / LAST)
        if instead_of:
            return
        # last.ckpt first: if a kill comes in between, the next start finds it and copies the rest.
        for name in sorted(copies.names("*.ckpt"), key=lambda name: (name != LAST, name)):
            if not _same_file(copies, name, self.folder / name):
                log.info("%s/%s is copied to %s", place, name, self.folder)
                _download(copies, name, self.folder / name)


def is_first_rank() -> bool:
    return rank_zero_only.rank == 0  # type: ignore[attr-defined]


def _download(bucket: Storage, name: str, path: Path) -> None:
    with atomic_write(path) as file:
        file.write(bucket.read(name))


def _same_file(bucket: Storage, name: str, path: Path) -> bool:
    """Tell whether both are the same checkpoint, by size and the sha256 at the end."""
    if not path.is_file() or path.stat().st_size != bucket.size(name):
        return False
    return read_comment(LocalFolder(path.parent), path.name) == read_comment(bucket, name)


def read_resumed(path: str | None) -> Checkpoint | None:
    """Read the checkpoint to resume from, if there is one."""
    if path is None:
        return None
    if not Path(path).is_file():
        is_folder = Path(path).is_dir()
        folder = Path(path) if is_folder else Path(path).parent
        found = sorted({*folder.glob(CHECKPOINTS), *folder.glob(f"checkpoints/{CHECKPOINTS}")})
        there = ", ".join(each.name for each in found) or "no checkpoint"
        raise InputError(
            f"ckpt_path={path} {'is a folder' if is_folder else 'does not exist'} (there is {there}); give "
            f"{found[-1] if found else 'RUN/checkpoints/last.ckpt of an earlier run'}"
        )
    checkpoint = read_checkpoint(path, setting=f"ckpt_path={path}")
    if "optimizer_states" not in checkpoint.content:
        raise InputError(
            f"ckpt_path={path} contains only weights (callbacks.best.save_weights_only=true) and cannot be resumed; "
            f"give a last.ckpt, or export the head and start a new training from it with init_from=HEAD"
        )
    return checkpoint


def require_checkpoint_fits(
    checkpoint: Checkpoint, source: FeatureSource, head: Head, settings: dict[str, Any]
) -> None:
    """Raise InputError unless the settings, the head's config and the features' target are the checkpoint's."""
    record, path = checkpoint.record, checkpoint.path
    require_same_target(
        record.origin.target,
        source.made_from.target,
        expected_from=f"ckpt_path={path}",
        actual_from=f"data.path={as_setting(source.location)}",
    )
    now = {"kind": head.kind, **asdict(head.config)}
    before = {"kind": record.kind, **record.head_config}
    for each in fields(head.config):
        if each.default is not MISSING:  # it may be newer than the checkpoint
            before.setdefault(each.name, each.default)
    differing = differing_settings(before, now)
    if not torch.equal(checkpoint.weights["head.draft_ids"], head.draft_ids):
        differing.append("other tokens in the draft vocabulary, which is chosen from the store's answers")
    then = {(name, each.shape) for name, each in checkpoint.weights.items() if name.startswith("head.")}
    changed = then ^ {(f"head.{name}", each.shape) for name, each in head.state_dict().items()}
    if changed and not differing:
        differing.append(f"{min(changed)[0]} of another shape, or not in both: the class of the kind has changed")
    if differing:
        raise InputError(
            f"ckpt_path={path} has another head than this run ({', '.join(differing)}); give the model.* settings, "
            f"init_from and data.path of the run that it comes from"
        )
    differing = differing_settings(record.settings, settings)
    if differing:
        raise InputError(
            f"ckpt_path={path} was trained with other settings ({', '.join(differing)}); give those of that run, "
            f"or start a new training without ckpt_path"
        )
    if record.origin.hash != source.fingerprint:
        log.warning(
            "data.path=%s has changed since %s: samples may be repeated or skipped", as_setting(source.location), path
        )


def require_epochs(checkpoint: Checkpoint, max_epochs: int | None) -> None:
    """Raise InputError if the checkpoint has more epochs than the training may have, which Lightning refuses."""
    done = checkpoint.content["epoch"]
    if max_epochs is not None and 0 <= max_epochs < done:
        raise InputError(
            f"trainer.max_epochs={max_epochs} is less than the {done} epochs of ckpt_path={checkpoint.path}; give "
            f"trainer.max_epochs={done + 1} or more to continue that training, in which the learning rate then rises "
            f"again, or start a new one from its head, exported, with init_from=HEAD"
        )


def differing_settings(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    keys = [key for key in before | now if before.get(key) != now.get(key)]
    return [f"{key}={before.get(key)} then, {now.get(key)} now" for key in keys]
