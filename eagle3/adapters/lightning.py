"""Everything private or unstable that we use of Lightning: its loops, the writer of its CSV logger."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from eagle3.adapters.library import Library

LIGHTNING = Library(
    "lightning",
    oldest="2.6.4",  # 2.6.2 and 2.6.3 were compromised
    newest="2.6",
    parts=(
        "lightning.pytorch.loops.training_epoch_loop:_TrainingEpochLoop._broadcast_sigterm_tensor",
        "lightning.pytorch.loops.training_epoch_loop:_TrainingEpochLoop._should_check_val_epoch",
        "lightning.pytorch.loops.fit_loop:_FitLoop._iteration_based_training",
        "lightning.pytorch.callbacks:TQDMProgressBar._should_update(current)",
        "lightning.pytorch.callbacks:TQDMProgressBar._should_update(total)",
        "lightning.pytorch.loggers.csv_logs:ExperimentWriter(log_dir)",
        "lightning.fabric.loggers.csv_logs:_ExperimentWriter._check_log_dir_exists",
        "lightning.fabric.loggers.csv_logs:_ExperimentWriter._rewrite_with_new_header(fieldnames)",
        "lightning.fabric.loggers.logger:rank_zero_experiment",
        "lightning.pytorch.trainer.connectors.logger_connector.result:_ResultMetric.to",
    ),
)

with LIGHTNING.uses():
    from lightning.fabric.loggers.csv_logs import _ExperimentWriter
    from lightning.fabric.loggers.logger import rank_zero_experiment
    from lightning.pytorch.loggers.csv_logs import ExperimentWriter
    from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultMetric

__all__ = ["ExperimentWriter", "_ExperimentWriter", "rank_zero_experiment"]


def require_lightning(trainer: lightning.Trainer) -> None:
    """Raise InputError for a Lightning that this project cannot train with."""
    LIGHTNING.require()
    with LIGHTNING.uses():
        _epoch_counts(trainer)
        _begun_batches(trainer)
        trainer.fit_loop._last_train_dl_reload_epoch  # noqa: B018
        trainer.fit_loop.epoch_loop._batches_that_stepped  # noqa: B018
        trainer.log_every_n_steps, trainer.fast_dev_run  # type: ignore[attr-defined]  # noqa: B018


def skip_sigterm_broadcast(trainer: lightning.Trainer) -> None:
    """Leave out Lightning's own question to the first rank, for which every rank's host waits before every step."""
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]


def resume_after_finished_epochs(trainer: lightning.Trainer) -> None:
    """Let a training with max_steps that was saved at the end of an epoch resume with the next one, as others do.

    Lightning would go through the finished epoch once more, without a batch, and count it and a step that is logged."""
    trainer.fit_loop._iteration_based_training = lambda: False  # type: ignore[method-assign]


def skip_needless_moves() -> None:
    """Do not move a logged metric to the device it is on. Lightning walks through all of its attributes for that, which
    is three quarters of the time of `log`, and the GPU waits meanwhile."""
    _ResultMetric.to = _to_another_device  # type: ignore[assignment, method-assign]


_move = _ResultMetric.to


def _to_another_device(metric: _ResultMetric, device: torch.device) -> _ResultMetric:
    return metric if metric.value.device == device else _move(metric, device)


@contextmanager
def unfinished_epoch(trainer: lightning.Trainer, *, at_validation: bool) -> Iterator[None]:
    """Count an epoch that ended early as unfinished, while a checkpoint of it is saved.

    Where max_steps, max_time or early stopping ends a run inside an epoch, Lightning counts the epoch as done, and a
    resumed run would skip its rest. If a validation was due there, the resumed run counts its logged step again.
    """
    early, loop = int(_begun_batches(trainer) < trainer.num_training_batches), trainer.fit_loop.epoch_loop
    for counts in _epoch_counts(trainer):
        counts.processed, counts.completed = counts.processed - early, counts.completed - early
    twice = int(early and at_validation and loop._should_check_val_epoch())
    loop._batches_that_stepped -= twice
    try:
        yield
    finally:
        loop._batches_that_stepped += twice
        for counts in _epoch_counts(trainer):
            counts.processed, counts.completed = counts.processed + early, counts.completed + early


def reload_train_loader(trainer: lightning.Trainer) -> None:
    """Let Lightning ask for the training loader, and its length, again before the next epoch starts.

    With trainer=fsdp it asks before it restores a checkpoint, and would keep the length of another plan."""
    trainer.fit_loop._last_train_dl_reload_epoch = float("-inf")


def _begun_batches(trainer: lightning.Trainer) -> int:
    return trainer.fit_loop.epoch_loop.batch_progress.current.ready


def _epoch_counts(trainer: lightning.Trainer) -> tuple[Any, Any]:
    """Return the numbers of epochs, of this call of fit and in total, that a checkpoint saves."""
    progress = trainer.fit_loop.epoch_progress
    for counts in (progress.current, progress.total):
        counts.processed, counts.completed  # type: ignore[attr-defined]  # noqa: B018
    return progress.current, progress.total


def is_no_validation(error: ValueError) -> bool:
    """Tell whether Lightning refuses a val_check_interval that is longer than an epoch, by its only sign, the text."""
    return "`val_check_interval`" in str(error)


def is_too_small_share(error: MisconfigurationException) -> bool:
    """Tell whether Lightning refuses a share of the batches that is less than one, by its only sign, the text."""
    return "You requested to check" in str(error)
