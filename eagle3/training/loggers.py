"""Loggers: metrics.csv that survives a resume; trackers with short run names and searchable settings.

The id of a run is in its folder and in the folder of its checkpoint copies, as metrics.csv is, so that a training that
is resumed from either continues the same W&B run and the same curves.
"""

import csv
import io
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, Logger, WandbLogger
from lightning.pytorch.utilities import rank_zero_only

from eagle3.adapters.hydra import HydraConfig, in_sweep
from eagle3.adapters.lightning import ExperimentWriter, _ExperimentWriter, rank_zero_experiment
from eagle3.errors import InputError
from eagle3.features.source import FeatureSource
from eagle3.hydra_run import hydra_sweep_dir
from eagle3.secrets import public
from eagle3.settings.flat import flattened, searchable
from eagle3.storage.files import atomic_write, write_whole
from eagle3.storage.folder import open_folder, write_file

log = logging.getLogger(__name__)
METRICS = "metrics.csv"
EXTRAS = ("tensorboard",)  # trackers whose package is an extra of the same name


class MetricsFile(ExperimentWriter):
    """metrics.csv of a run, which keeps the rows before `resume_step`; the resumed run logs the later ones again.

    `copied` is the content of its copy, which has more of them if the run was continued elsewhere."""

    def __init__(self, log_dir: str, resume_step: int, copied: str = "") -> None:
        super().__init__(log_dir)
        self.path = Path(self.metrics_file_path)
        both = [self._rows(), parsed_rows(copied)]
        rows = max(([row for row in rows if int(row["step"]) < resume_step] for rows in both), key=len)
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
        return parsed_rows(self.path.read_text()) if self.path.exists() else []

    def _replace(self, rows: list[dict[str, str]]) -> None:
        """Replace the file by one with these rows and the current columns; a kill leaves the old one or the new one."""
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, self.metrics_keys)
        writer.writeheader()
        writer.writerows(rows)
        with atomic_write(self.path) as file:
            file.write(text.getvalue().encode())


def parsed_rows(text: str) -> list[dict[str, str]]:
    """Return the rows of a metrics.csv without a last one that a full disk has cut."""
    return [row for row in csv.DictReader(text.splitlines()) if (row["step"] or "").isdigit()]


class MetricsCSV(CSVLogger):
    """Writes RUN/metrics.csv: one row per log call, empty cells where a metric was not logged.

    `copies` is where checkpoints are copied to; metrics.csv is too, by `copy`."""

    def __init__(
        self, *, run_dir: str, flush_every_n_steps: int, resume_step: int = 0, copies: str | None = None
    ) -> None:
        super().__init__(save_dir=run_dir, name="", version="", flush_logs_every_n_steps=flush_every_n_steps)
        self.resume_step, self.copies = resume_step, copies

    @property
    @rank_zero_experiment
    def experiment(self) -> _ExperimentWriter:
        if self._experiment is None:
            copied = ""
            if self.copies and self.resume_step:
                folder = open_folder(self.copies, setting="checkpoint_copies")
                copied = bytes(folder.read(METRICS)).decode() if folder.names(METRICS) else ""
            self._experiment = MetricsFile(self.log_dir, self.resume_step, copied)
        return self._experiment

    @rank_zero_only
    def copy(self) -> None:
        """Copy the rows so far, before a checkpoint is: a resumed run drops those past its step."""
        self.save()
        path = Path(self.log_dir) / METRICS
        if self.copies and path.is_file():
            write_file(open_folder(self.copies, setting="checkpoint_copies"), METRICS, path.read_bytes())


# W&B's own variables, by our keys. A variable takes precedence over the default of conf/logger/wandb.yaml, and a key
# that the user sets over the variable.
VARIABLES = {
    "entity": "WANDB_ENTITY",
    "project": "WANDB_PROJECT",
    "name": "WANDB_NAME",
    "group": "WANDB_RUN_GROUP",
    "tags": "WANDB_TAGS",
    "job_type": "WANDB_JOB_TYPE",
    "notes": "WANDB_NOTES",
    "mode": "WANDB_MODE",
    "save_dir": "WANDB_DIR",
    "id": "WANDB_RUN_ID",
    "resume": "WANDB_RESUME",
}
MODES = {"offline": "dryrun", "online": "run"}  # other names that W&B knows them by


class WandbRun(WandbLogger):
    """Lightning's logger for W&B, with a run name and id of our own. It joins the group of the sweep that it
    `compares`, else of that it is a job of."""

    def __init__(
        self, *, run_dir: str, offline: bool | None, artifacts: bool, compares: Path | None = None, **options: Any
    ) -> None:
        folder = Path(run_dir)
        sweep = compares or sweep_dir(folder)
        name = f"{compares.name}-compared" if compares else run_name(folder)
        if offline is not None:  # Lightning would set WANDB_MODE, also for the next job
            mode = "offline" if offline else "online"
            if (given_mode := options.get("mode")) not in (None, mode):
                raise InputError(f"logger.wandb.mode={given_mode} is not logger.wandb.offline={offline}; leave one out")
            options["mode"] = mode
        given = {key: value for key, value in options.items() if value is not None}
        warn_of_variables(given)
        ours: dict[str, Any] = {}
        if "WANDB_SWEEP_ID" not in os.environ:  # else `wandb agent` sets them
            ours = {"name": name, "group": sweep.name if sweep else None, "id": kept_id(folder / "run_id")}
        ours = {key: value for key, value in ours.items() if not os.environ.get(VARIABLES[key])}
        ours["resume"] = os.environ.get(VARIABLES["resume"]) or "allow"  # Lightning would set it
        super().__init__(**ours | given)
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


def warn_of_variables(given: Mapping[str, Any]) -> None:
    """Warn of each variable of W&B that a key overrides."""
    for key, variable in VARIABLES.items():
        value, other = given.get(key), os.environ.get(variable)
        text = ",".join(value) if key == "tags" and value is not None else str(value)
        if value is not None and other and other not in (text, MODES.get(text)):
            setting = "offline" if key == "mode" else key
            log.warning("logger.wandb.%s is set (%s) and used, not %s=%s", setting, text, variable, other)


def run_name(folder: Path) -> str:
    """Return the name of the run's folder; of a sweep's job the sweep's name and its path there. A resumed run keeps
    it."""
    sweep = sweep_dir(folder)
    return f"{sweep.name}-{os.path.relpath(folder, sweep)}" if sweep else folder.name


def sweep_dir(folder: Path) -> Path | None:
    """Return the folder of the sweep that a run is a job of, also of a job in a process of its own."""
    if not HydraConfig.initialized():
        return None
    sweep = hydra_sweep_dir(HydraConfig.get())
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


def log_table(loggers: Sequence[WandbLogger], name: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Log rows as a table, numbers as numbers; a value inside another has a column of its own, `difference.low`."""
    flat = [{key: value for key, value in flattened(public(row)) if value is not None} for row in rows]
    columns = [*dict.fromkeys(key for row in flat for key in row)]
    cells = [[row.get(column) for column in columns] for row in flat]
    data = [[", ".join(map(str, cell)) if isinstance(cell, list) else cell for cell in row] for row in cells]
    for logger in loggers:
        logger.log_table(name, columns=columns, data=data)


def log_lineage(loggers: Sequence[Logger], best: Checkpoint | None, source: FeatureSource) -> None:
    """Log the best checkpoint and the store it was made from to the trackers that keep artifacts."""
    if isinstance(best, ModelCheckpoint) and best.best_model_path:
        for logger in loggers:
            if isinstance(logger, WandbRun) and logger.artifacts:
                logger.log_lineage(best, source)


def close(loggers: Sequence[Logger], status: str) -> None:
    """Flush the loggers, and end the W&B run, so that the next job of a sweep gets its own."""
    for logger in loggers:
        logger.finalize(status)
        if isinstance(logger, WandbLogger):
            logger.experiment.finish(exit_code=0 if status == "success" else 1)
