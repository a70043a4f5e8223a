"""Callbacks: the best checkpoints, last.ckpt, also on signals, throughput, and a progress bar without host syncs."""

import logging
import math
import platform
import signal
import sys
import time
from collections.abc import Sequence, Set
from enum import Enum, auto
from glob import escape
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from lightning import LightningModule, Trainer
from lightning.pytorch import callbacks
from lightning.pytorch.callbacks import Callback, Checkpoint, ModelCheckpoint, TQDMProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm

from eagle3.adapters.lightning import skip_sigterm_broadcast, unfinished_epoch
from eagle3.data.loader import PackLoader
from eagle3.data.pack import Batch
from eagle3.errors import InputError, Interrupted
from eagle3.hydra_run import how_to_resume
from eagle3.progress import Bar
from eagle3.storage.folder import LocalFolder
from eagle3.training.checkpoint import AtomicCheckpointIO
from eagle3.training.loggers import MetricsCSV

log = logging.getLogger(__name__)


def ends_step(trainer: Trainer, batch_idx: int) -> bool:
    """Tell whether this batch was the last of its optimizer step."""
    return (batch_idx + 1) % trainer.accumulate_grad_batches == 0 or trainer.is_last_batch


def logs_step(trainer: Trainer, batch_idx: int) -> bool:
    """Tell whether this batch ended an optimizer step that is logged; in others the host never waits for the GPU.

    Only for `on_train_batch_end`, when the step is counted."""
    every = trainer.log_every_n_steps  # type: ignore[attr-defined]
    return bool(every) and ends_step(trainer, batch_idx) and trainer.global_step % every == 0


def validates(trainer: Trainer, batch_idx: int) -> bool:
    """Tell whether a validation follows this batch; without check_val_every_n_epoch, batches of all epochs count."""
    number = batch_idx if trainer.check_val_every_n_epoch else trainer.fit_loop.total_batch_idx
    return (number + 1) % (trainer.val_check_batch or math.inf) == 0


def warn_of_no_validation(trainer: Trainer) -> None:
    """Warn where max_steps or max_epochs end a run before its first validation, unless a callback asks for one."""
    packs, every, epochs = trainer.num_training_batches, trainer.check_val_every_n_epoch or 1, trainer.max_epochs or -1
    first = (trainer.val_check_batch or 0) + (every - 1) * packs
    steps = trainer.max_steps * trainer.accumulate_grad_batches if trainer.max_steps >= 0 else math.inf
    most = min(steps, packs * epochs if epochs > 0 else math.inf)
    if trainer.global_step == 0 and first > most and not trainer.fast_dev_run:  # type: ignore[attr-defined]
        log.warning(
            "trainer.val_check_interval=%s: the first validation would be after pack %d, and the training ends after "
            "pack %d: no best checkpoint; set it lower, or train longer (trainer.max_epochs, max_steps)",
            trainer.val_check_interval, first, most,
        )  # fmt: skip


FEW_STEPS = 500  # below, smaller packs make better heads (docs/results/head-quality.md)
FEW_SAMPLES = 30  # below, chance decides between checkpoints
MOST_TO_VALIDATE = 0.2  # share of the prompts


def warn_of_little(trainer: Trainer, steps: int) -> None:
    """Warn in one line of a training that is too short for its schedule, or whose best checkpoint is chance."""
    if trainer.global_step or not trainer.is_global_zero or trainer.fast_dev_run:  # type: ignore[attr-defined]
        return
    data, found = trainer.datamodule, []  # type: ignore[attr-defined]
    train, val = len(data.train_samples), len(data.val_samples)
    if steps < FEW_STEPS:
        found.append(f"{steps} steps in all, below {FEW_STEPS}: {_for_more_steps(trainer, steps)}")
    if val < FEW_SAMPLES and isinstance(trainer.checkpoint_callback, ModelCheckpoint):
        share = math.ceil(100 * FEW_SAMPLES / (train + val)) / 100
        more = f"set data.val_fraction={share:g}, or " if share <= MOST_TO_VALIDATE else ""
        samples = f"{val} sample{'s' if val > 1 else ''}"
        found.append(
            f"{samples} to validate, below {FEW_SAMPLES}: the best checkpoint is chance; {more}use more prompts"
        )
    if found:
        log.warning("a small training of %d samples: %s", train, "; ".join(found))


def _for_more_steps(trainer: Trainer, steps: int) -> str:
    data, accumulate = trainer.datamodule, trainer.accumulate_grad_batches  # type: ignore[attr-defined]
    now, longest = data.settings.pack_tokens, int(data.train_samples.tokens.max())
    smaller = min(now, max(longest, accumulate * now * steps // FEW_STEPS))
    changes = [f"data.pack_tokens={smaller}"] if smaller < now else []
    changes += ["trainer.accumulate_grad_batches=1"] if accumulate > 1 else []
    return f"{'set ' * bool(changes)}{' '.join(changes)}{', or ' * bool(changes)}train longer (trainer.max_epochs)"


class BestCheckpoint(ModelCheckpoint):
    """Keeps the best checkpoints, and deletes unfinished ones, which a kill has left.

    A resumed run keeps the best checkpoints that the resumed one knows, even if the folder has moved. In that folder it
    deletes other leftovers of a kill: a checkpoint of steps that are trained again, or one that was about to be
    deleted. Missing files are dropped from the ranking: a score without a file would keep later ones from being saved.
    """

    kept: Set[str] = frozenset()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        folder, paths = Path(str(self.dirpath)), state_dict["best_k_models"]
        self.kept = {Path(path).name for path in paths}
        moved = {str(folder / Path(path).name): score for path, score in paths.items()}
        here = {path: score for path, score in moved.items() if Path(path).is_file()}
        if len(here) == len(paths) or state_dict["dirpath"] == self.dirpath:
            ranked = sorted(here, key=lambda path: here[path], reverse=self.mode == "max") or [""]
            best = {"best_model_path": ranked[0], "best_model_score": here.get(ranked[0])}
            best |= {"best_k_models": here, "kth_best_model_path": ranked[-1]}
            state_dict = {**state_dict, **best, "dirpath": self.dirpath}
        super().load_state_dict(state_dict)

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        super().on_train_start(trainer, module)
        warn_of_no_validation(trainer)
        folder, beginning = Path(str(self.dirpath)).resolve(), str(self.filename).partition("{")[0]
        if not beginning:
            return
        if trainer.is_global_zero:
            for name in ("last.ckpt", f"{escape(beginning)}*.ckpt"):
                LocalFolder(folder).delete_unfinished(name)
        if trainer.ckpt_path is None or Path(trainer.ckpt_path).resolve().parent != folder:
            return
        for path in folder.glob(f"{escape(beginning)}*.ckpt"):
            if path.name not in {"last.ckpt", *self.kept}:
                trainer.strategy.remove_checkpoint(path)


class EarlyStopping(callbacks.EarlyStopping):
    """Ends a run that no longer improves.

    A resumed run has the patience that it is given: Lightning would continue with the checkpoint's. The class has
    Lightning's name, which its state in a checkpoint is found by."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict | {"patience": self.patience})

    def on_load_checkpoint(self, trainer: Trainer, module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """End a run at once that has ended before: it would train on to its next validation."""
        kept = checkpoint["callbacks"].get(self.state_key, {})
        trainer.should_stop = kept.get("wait_count", 0) >= self.patience

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        if self.wait_count >= self.patience:
            log.info("callbacks.early_stopping: no better %s in %d validations", self.monitor, self.wait_count)


# SLURM sends the ranks SIGUSR1 where sbatch has --signal=USR1@SECONDS; Lightning would save a file of its own then.
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class Stop(Enum):
    """Progress of a stop by a signal. A signal handler moves only NO to SIGNALLED, so none is lost."""

    NO = auto()
    SIGNALLED = auto()  # this rank got a signal, the others do not know yet
    AGREED = auto()  # all ranks know; the next checkpoint is the last one
    SAVED = auto()  # the run ends before its next batch


class LastCheckpoint(Checkpoint):
    """Saves `last.ckpt` every `every_n_steps` optimizer steps unless it has saved within `min_seconds`, at the end, and
    on a signal that stops any rank.

    It saves between steps, where the state is complete: a resumed run repeats nothing and skips nothing. If a
    validation or the end of an epoch follows, which Lightning would skip on resuming, it saves after the next step or
    at the end of the epoch. Lightning calls a `Checkpoint` after the callbacks whose state it saves.
    """

    def __init__(self, *, dirpath: str, every_n_steps: int, min_seconds: float) -> None:
        self.path = Path(dirpath) / "last.ckpt"
        self.every_n_steps, self.min_seconds = every_n_steps, min_seconds
        self.stop, self.due_step, self.saved_at = Stop.NO, 0, 0.0
        self.handlers: dict = {}

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        self.handlers = {number: signal.signal(number, self._remember) for number in STOPPING}
        self.due_step, self.saved_at = trainer.global_step, time.monotonic()
        if trainer.global_step:
            log.info("resumed at step %d of %s", trainer.global_step, trainer.estimated_stepping_batches)
        skip_sigterm_broadcast(trainer)  # a host sync in every step; ranks agree in _signalled_anywhere instead

    def on_train_batch_end(
        self, trainer: Trainer, module: LightningModule, outputs: object, batch: Batch, batch_idx: int
    ) -> None:
        if not ends_step(trainer, batch_idx):
            return
        if self.stop in (Stop.NO, Stop.SIGNALLED) and self._signalled_anywhere(trainer):
            self.stop = Stop.AGREED
        if not validates(trainer, batch_idx) and not trainer.is_last_batch:
            self._save_if_due(trainer)

    def on_train_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:
        self._save_if_due(trainer)

    # A signal ends the run only here, after the step that was saved has been logged.
    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Batch, batch_idx: int) -> None:
        if self.stop is Stop.SAVED:
            raise Interrupted(f"stopped by a signal; {how_to_resume(self.path)}")

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        with unfinished_epoch(trainer, at_validation=validates(trainer, trainer.fit_loop.epoch_loop.batch_idx)):
            self._save(trainer)

    def teardown(self, trainer: Trainer, module: LightningModule, stage: str) -> None:
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
        self.handlers = {}

    def _save_if_due(self, trainer: Trainer) -> None:
        step, every = trainer.global_step, self.every_n_steps
        due = bool(every) and step // every > self.due_step // every
        if due:
            self.due_step = step
            # A step of a small head takes milliseconds, saving it half a second. Ranks save together; one decides.
            due = trainer.strategy.broadcast(time.monotonic() - self.saved_at >= self.min_seconds)
        if due or self.stop is Stop.AGREED:
            self._save(trainer)
            self.saved_at = time.monotonic()
            if self.stop is Stop.AGREED:
                self.stop = Stop.SAVED

    def _save(self, trainer: Trainer) -> None:
        checkpoint_io = trainer.strategy.checkpoint_io
        if trainer.is_global_zero and isinstance(checkpoint_io, AtomicCheckpointIO):
            checkpoint_io.require_claimed()  # before metrics.csv is copied, too
        for logger in trainer.loggers:
            if isinstance(logger, MetricsCSV):
                logger.copy()
        trainer.save_checkpoint(self.path)

    def _signalled_anywhere(self, trainer: Trainer) -> bool:
        """Ranks save together, but a signal may reach only one; they agree at logging steps, where they wait anyway."""
        signalled = self.stop is Stop.SIGNALLED
        if trainer.world_size == 1:
            return signalled
        if trainer.global_step % max(trainer.log_every_n_steps, 1):  # type: ignore[attr-defined]
            return False
        return trainer.strategy.reduce_boolean_decision(signalled, all=False)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if self.stop is Stop.NO:
            self.stop = Stop.SIGNALLED


class SameOnAllRanks(Callback):
    """Ends a training whose ranks were started with other settings, features, checkpoints or code than the first."""

    def __init__(self, own: dict[str, Any]) -> None:
        self.own = own

    def setup(self, trainer: Trainer, module: LightningModule, stage: str) -> None:
        ranks: list[Any] = [(platform.node(), self.own)] * trainer.world_size
        if trainer.world_size > 1:
            dist.all_gather_object(ranks, ranks[0])
        (first_host, first), *others = ranks
        for rank, (host, own) in enumerate(others, start=1):
            keys = [key for key in first | own if first.get(key) != own.get(key) and "" not in (first[key], own[key])]
            if keys:  # a machine without git does not know its commit
                differing = ", ".join(f"{key}: {own.get(key)}, not {first.get(key)}" for key in keys)
                raise InputError(
                    f"rank {rank} on {host} is not of the same training as rank 0 on {first_host} ({differing}); start "
                    f"all ranks with one command, on the same code, features and hydra.run.dir"
                )


class TrainingBar(Bar, Tqdm):
    """Lightning's bar in the style of all others."""


class RunProgress(TQDMProgressBar):
    """Reads `metrics` when it redraws. Lightning's own bar would read everything logged with prog_bar=True after every
    step, and make the host wait for the GPU each time (tests/training/test_callbacks.py)."""

    def __init__(self, *, refresh_seconds: float, metrics: Sequence[str]) -> None:
        super().__init__()
        self.metrics, self.refresh_seconds, self.drawn = metrics, refresh_seconds, time.monotonic()

    def init_train_tqdm(self) -> Tqdm:
        return self._bar(self.train_description, position=0, smoothing=0)

    def init_validation_tqdm(self) -> Tqdm:
        return self._bar(self.validation_description, position=1, leave=False)

    def init_sanity_tqdm(self) -> Tqdm:
        return self._bar(self.sanity_check_description, position=0, leave=False)

    def _bar(self, desc: str, **options: Any) -> Tqdm:
        look = {"dynamic_ncols": True, "bar_format": self.BAR_FORMAT, "file": sys.stdout}
        return TrainingBar(desc=desc, disable=self.is_disabled, **look, **options)

    def _should_update(self, current: int, total: int) -> bool:
        now = time.monotonic()
        due = self.is_enabled and (now - self.drawn >= self.refresh_seconds or current == total)
        self.drawn = now if due else self.drawn
        return due

    def get_metrics(self, trainer: Trainer, module: LightningModule) -> dict[str, Any]:
        logged = trainer.callback_metrics
        shown = {name: logged[name].item() for name in self.metrics if name in logged}
        return super().get_metrics(trainer, module) | shown


class Throughput(Callback):
    """Logs anchors (about one per answer token) and tokens per second of all ranks, and this rank's wait for data."""

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        self._start(time.perf_counter(), 0.0)

    def on_train_epoch_start(self, trainer: Trainer, module: LightningModule) -> None:
        self._start(time.perf_counter(), 0.0)

    def on_validation_start(self, trainer: Trainer, module: LightningModule) -> None:
        self.paused = time.perf_counter()

    def on_validation_end(self, trainer: Trainer, module: LightningModule) -> None:
        if not trainer.sanity_checking:  # before the first `_start`
            self.started += time.perf_counter() - self.paused

    def on_train_batch_end(
        self, trainer: Trainer, module: LightningModule, outputs: object, batch: Batch, batch_idx: int
    ) -> None:
        self.anchors += batch.num_anchors
        self.tokens += len(batch.pack.input_ids)
        if logs_step(trainer, batch_idx):
            loader: PackLoader = trainer.train_dataloader  # type: ignore[assignment]
            now, waited = time.perf_counter(), loader.waited
            counts = torch.tensor([self.anchors, self.tokens], dtype=torch.float32)
            if trainer.world_size > 1:
                counts = trainer.strategy.reduce(counts.to(module.device), reduce_op="sum").cpu()
            anchors, tokens = counts / (now - self.started)
            module.log("train/anchors_per_s", anchors, batch_size=1)
            module.log("train/tokens_per_s", tokens, batch_size=1)
            share = torch.tensor((waited - self.waited) / (now - self.started))  # on the CPU, like the others
            module.log("train/data_wait_share", share, batch_size=1)
            self._start(now, waited)  # logging waits for the GPU: that time counts for the next steps

    def _start(self, now: float, waited: float) -> None:
        self.anchors = self.tokens = 0
        self.started, self.waited = now, waited
