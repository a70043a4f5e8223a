"""metrics.csv of a run, kept across a resume (Lightning's CSVLogger starts an empty file)."""

import csv
from pathlib import Path

from lightning.fabric.loggers.csv_logs import _ExperimentWriter
from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch.loggers import CSVLogger, Logger, WandbLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter


class MetricsFile(ExperimentWriter):
    """Starts from the rows of an earlier part of the run that lie before `resume_step`."""

    def __init__(self, log_dir: str, resume_step: int) -> None:
        super().__init__(log_dir)
        path = Path(self.metrics_file_path)
        lines = path.read_text().splitlines() if path.exists() else []
        whole = [row for row in csv.DictReader(lines) if (row["step"] or "").isdigit()]  # a full disk cuts the last
        rows = [row for row in whole if int(row["step"]) < resume_step]
        kept = [{name: value for name, value in row.items() if value != ""} for row in rows]
        self.metrics = kept  # type: ignore[assignment]  # text as it stands in the file
        path.unlink(missing_ok=True)

    def _check_log_dir_exists(self) -> None:
        """The folder is Hydra's and never empty; what is in the file is kept by __init__."""


class MetricsCSV(CSVLogger):
    """Writes RUN/metrics.csv: one row per log call, empty cells where a metric was not logged."""

    def __init__(self, *, run_dir: str, resume_step: int, flush_every_n_steps: int) -> None:
        super().__init__(save_dir=run_dir, name="", version="", flush_logs_every_n_steps=flush_every_n_steps)
        self.resume_step = resume_step

    @property
    @rank_zero_experiment
    def experiment(self) -> _ExperimentWriter:
        if self._experiment is None:
            self._experiment = MetricsFile(self.log_dir, self.resume_step)
        return self._experiment


def close(loggers: list[Logger], status: str) -> None:
    """Flush; end the W&B run, so that the next job of a sweep gets its own."""
    for logger in loggers:
        logger.finalize(status)
        if isinstance(logger, WandbLogger):
            logger.experiment.finish(exit_code=0 if status == "success" else 1)
