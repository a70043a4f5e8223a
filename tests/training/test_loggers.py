"""Loggers: metrics.csv across a resume, W&B offline with config, git revision and store."""

import csv
import os
import subprocess
import sys
from pathlib import Path

from stores import ROOT

from eagle3.training.loggers import MetricsCSV


def rows(directory: Path) -> list[dict[str, str]]:
    return list(csv.DictReader((directory / "metrics.csv").read_text().splitlines()))


def log(directory: Path, steps: range, value: float, resume_step: int = 0) -> None:
    logger = MetricsCSV(run_dir=str(directory), resume_step=resume_step, flush_every_n_steps=1)
    for step in steps:
        logger.log_metrics({"loss": value}, step)
    logger.finalize("success")


def test_a_resume_keeps_rows_before_its_step_and_replaces_the_rest(tmp_path: Path) -> None:
    log(tmp_path, range(8), 1.0)
    log(tmp_path, range(5, 9), 2.0, resume_step=5)
    assert [(row["step"], float(row["loss"])) for row in rows(tmp_path)] == [
        *((str(step), 1.0) for step in range(5)),
        *((str(step), 2.0) for step in range(5, 9)),
    ]


def test_a_last_line_that_a_full_disk_cut_is_left_out(tmp_path: Path) -> None:
    log(tmp_path, range(3), 1.0)
    path = tmp_path / "metrics.csv"
    path.write_text(path.read_text().rstrip().rpartition(",")[0])
    log(tmp_path, range(3, 5), 2.0, resume_step=3)
    assert [row["step"] for row in rows(tmp_path)] == ["0", "1", "3", "4"]


def test_a_new_run_in_an_old_folder_starts_a_new_file(tmp_path: Path) -> None:
    log(tmp_path, range(3), 1.0)
    log(tmp_path, range(2), 2.0)
    assert [float(row["loss"]) for row in rows(tmp_path)] == [2.0, 2.0]


def test_a_wandb_sweep_has_one_run_a_job_with_config_revision_and_store(tmp_path: Path, store_path: Path) -> None:
    sweep = tmp_path / "sweep"
    command = [
        sys.executable, "train.py", "-m", f"data.path={store_path}", "data.val_fraction=0.2", "ttt_steps=2",
        "trainer=cpu", "trainer.max_epochs=1", "trainer.enable_progress_bar=false", "callbacks.progress=null",
        "logger=wandb", "logger.wandb.offline=true", "optim.lr=1e-4,3e-3", f"hydra.sweep.dir={sweep}",
    ]  # fmt: skip
    environment = {**os.environ, "WANDB_MODE": "offline", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    table = done.stdout.splitlines()
    assert "val/served_accept_length_2" in table[-3]
    assert "optim.lr=" in table[-2]
    for job, lr in (("0", b"0.0001"), ("1", b"0.003")):
        [record] = (sweep / job / "wandb").glob("offline-run-*/*.wandb")
        logged = record.read_bytes().replace(b" ", b"")  # W&B's own format; what it quotes is JSON
        for expected in (b'"lr":' + lr, b"git_revision", b'"capture_layers":[2,4,5]', b"val/accept_length"):
            assert expected in logged, expected
    again = subprocess.run(
        [sys.executable, "-m", "eagle3.training.sweep", str(sweep)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=environment,
    )
    assert again.stdout.splitlines() == table[-3:]
