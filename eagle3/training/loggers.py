"""Loggers: metrics.csv that survives a resume; trackers with short run names and searchable settings.

W&B's run id is in the run's folder, so that a training resumed there continues the same run.
"""

import csv
import io
import logging
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, Logger, WandbLogger
from lightning.pytorch.utilities import rank_zero_only

from eagle3.adapters.hydra import HydraConfig, in_sweep
from eagle3.adapters.lightning import ExperimentWriter, _ExperimentWriter, rank_zero_experiment
from eagle3.features.source import FeatureSource
from eagle3.secrets import public
from eagle3.settings.flat import flattened
from eagle3.storage.files import atomic_write, write_whole

log = logging.getLogger(__name__)
EXTRAS = ("tensorboard",)  # trackers whose package is an extra of the same name
PATH_KEYS = re.compile(r"(path|dir|uri|url|urls|logger)$|^logger\.|^callbacks\..*\.(dirpath|filename)$")
PATH = re.compile(r"^(/|~|\.{1,2}/|[a-z0-9]+://)")


class MetricsFile(ExperimentWriter):
    """metrics.csv of a run, which keeps the rows before `resume_step`; the resumed run logs the later ones again."""

    def __init__(self, log_dir: str, resume_step: int) -> None:
        super().__init__(log_dir)
        self.path = Path(self.metrics_file_path)
        rows = [row for row in self._rows() if int(row["step"]) < resume_step]
        if rows:
            self.metrics_keys = list(rows[0])
            self._replace(rows)
        else:
            self.path.unlink(missing_ok=True)

    def _check_log_dir_exists(self) -> None:
        """Say nothing about Hydra's folder, which is never empty."""

    def _rewrite_with_new_header(self, fieldnames: list[str]) -> None:
        self._replace(self._rows())

    def _rows(self) -> list[dict[str, str]]:
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        return [row for row in csv.DictReader(lines) if (row["step"] or "").isdigit()]  # a full disk cuts the last one

    def _replace(self, rows: list[dict[str, str]]) -> None:
        """Replace the file by one with these rows and the current columns; a kill leaves the old one or the new one."""
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, self.metrics_keys)
        writer.writeheader()
        writer.writerows(rows)
        with atomic_write(self.path) as file:
            file.write(text.getvalue().encode())


class MetricsCSV(CSVLogger):
    """Writes RUN/metrics.csv: one row per log call, empty cells where a metric was not logged."""

    def __init__(self, *, run_dir: str, resume_step: int = 0, flush_every_n_steps: int = 10) -> None:
        super().__init__(save_dir=run_dir, name="", version="", flush_logs_every_n_steps=flush_every_n_steps)
        self.resume_step = resume_step

    @property
    @rank_zero_experiment
    def experiment(self) -> _ExperimentWriter:
        if self._experiment is None:
            self._experiment = MetricsFile(self.log_dir, self.resume_step)
        return self._experiment


class WandbRun(WandbLogger):
    """Lightning's logger for W&B, with a run name and id of our own."""

    def __init__(
        self,
        *,
        save_dir: str,
        name: str | None,
        group: str | None,
        tags: Sequence[str],
        artifacts: bool,
        **options: Any,
    ) -> None:
        folder = Path(save_dir)
        sweep = sweep_dir(folder)
        by_agent = "WANDB_SWEEP_ID" in os.environ  # then `wandb agent` sets name, group and id
        super().__init__(
            save_dir=save_dir,
            name=None if by_agent else name or run_name(folder),
            group=group or (sweep.name if sweep and not by_agent else None),
            tags=list(tags),
            version=None if by_agent else kept_id(folder / "wandb_id"),
            **options,
        )
        self.artifacts = artifacts

    @rank_zero_only
    def log_lineage(self, best: ModelCheckpoint, source: FeatureSource) -> None:
        """Log the best checkpoint as an artifact made from the store's description; the store itself is too large."""
        import wandb

        name = f"features-{source.fingerprint[:12]}"
        made_of = wandb.Artifact(name, type="features", metadata=public(searchable(source.describe())))
        if self.experiment.offline:
            log.warning(
                "logger.wandb.offline=true: W&B takes a run's inputs only online, so only the head is an artifact"
            )
        else:
            self.experiment.use_artifact(made_of)
        facts: dict[str, Any] = {str(best.monitor): float(best.best_model_score or 0), "features": made_of.name}
        head = wandb.Artifact(f"head-{self.experiment.id}", type="model", metadata=facts)
        head.add_file(best.best_model_path, name="best.ckpt")
        self.experiment.log_artifact(head, aliases=["best"])


def run_name(folder: Path) -> str:
    """Return the name of the run's folder; of a sweep's job the sweep's name and its path there. A resumed run keeps
    it."""
    sweep = sweep_dir(folder)
    return f"{sweep.name}-{os.path.relpath(folder, sweep)}" if sweep else folder.name


def sweep_dir(folder: Path) -> Path | None:
    """Return the folder of the sweep that a run is a job of, also of a job in a process of its own."""
    if not HydraConfig.initialized():
        return None
    sweep = Path(HydraConfig.get().sweep.dir).absolute()
    return sweep if in_sweep() or sweep in folder.absolute().parents else None


def kept_id(path: Path) -> str | None:
    """Return the id in this file, which is created if necessary."""
    if rank_zero_only.rank != 0:  # type: ignore[attr-defined]
        return None
    if not path.is_file():
        write_whole(path, uuid4().hex[:8].encode())
    return path.read_text()


# --- what trackers are given ------------------------------------------------------------------------------------------


def log_settings(loggers: Sequence[Logger], config: dict, store: dict, versions: Mapping[str, str]) -> None:
    """Log config, store and versions without secrets: nested for hparams.yaml, flat and without paths for trackers."""
    nested = public({"config": config, "store": store, **versions})
    flat = public({**searchable(config), **searchable(store, "store."), **versions})
    for logger in loggers:
        logger.log_hyperparams(nested if isinstance(logger, MetricsCSV) else flat)


def searchable(values: Mapping[str, Any], inside: str = "") -> dict[str, Any]:
    """Return settings by the keys of the command line. Paths and URLs are shortened to their last part: `DIR/features`
    is `features` on every machine, and does not reveal whose disk it is."""
    return {key: _shortened(key, value) for key, value in flattened(values, inside)}


def _shortened(key: str, value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_shortened(key, each) for each in value]
    if isinstance(value, Mapping):
        return searchable(value)
    if isinstance(value, str) and (PATH_KEYS.search(key) or PATH.match(value)):
        return value.rstrip("/").rpartition("/")[2]
    return value


def log_lineage(loggers: Sequence[Logger], best: Checkpoint | None, source: FeatureSource) -> None:
    """Log the best checkpoint and the store it was made from to the trackers that keep artifacts."""
    if isinstance(best, ModelCheckpoint) and best.best_model_path:
        for logger in loggers:
            if isinstance(logger, WandbRun) and logger.artifacts:
                logger.log_lineage(best, source)


def close(loggers: list[Logger], status: str) -> None:
    """Flush the loggers, and end the W&B run, so that the next job of a sweep gets its own."""
    for logger in loggers:
        logger.finalize(status)
        if isinstance(logger, WandbLogger):
            logger.experiment.finish(exit_code=0 if status == "success" else 1)
