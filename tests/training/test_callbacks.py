"""What callbacks and logging cost a training step."""

import re
from collections import defaultdict
from itertools import count
from pathlib import Path
from threading import Semaphore
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from feature_data import feature_data
from stores import random_samples, write_store
from training_runs import LIGHTNING_WARNS, CountPerStep, Run

from eagle3.data import loader
from eagle3.data.datamodule import FeatureData
from eagle3.data.pack import Batch
from eagle3.data.plan import PlannedPack
from eagle3.training import callbacks
from eagle3.training.callbacks import BestCheckpoint, RunProgress, warn_of_little
from eagle3.training.module import HeadTraining

pytestmark = LIGHTNING_WARNS
LOG_EVERY = 5


def test_a_step_reads_no_number_but_where_it_logs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)  # tqdm 4.66 cuts the bar to this width, which a library may set
    options = ["trainer.max_epochs=1", f"trainer.log_every_n_steps={LOG_EVERY}"]
    options += [f"callbacks.last.every_n_steps={LOG_EVERY}", "callbacks.last.min_seconds=0"]  # saving reads all
    run = Run(tmp_path / "run", write_store(tmp_path / "features", random_samples(80)), *options)
    counter = CountPerStep()
    run.trainer.callbacks += [counter, RunProgress(refresh_seconds=3600, metrics=["train/loss", "val/accept_length"])]
    run.fit()
    read = torch.tensor(counter.at_start).diff().tolist()
    assert len(read) > 3 * LOG_EVERY
    assert {step % LOG_EVERY for step, numbers in enumerate(read, start=1) if numbers} == {0}
    captured = capsys.readouterr()
    shown = captured.out + captured.err
    assert "train/loss=" in shown
    assert "val/accept_length=" in shown


class Clock:
    """Stands still but for what a test says takes time: no machine is too slow or too fast for it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.logged, self.tokens = 0.0, defaultdict[str, list[float]](list), list[int]()
        self.patch = monkeypatch
        for module in (callbacks, loader):
            monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: self.now, monotonic=lambda: 0.0))
        log, step = HeadTraining.log, HeadTraining.training_step

        def noted_log(module: HeadTraining, name: str, value: Any, **settings: Any) -> None:
            self.logged[name].append(float(value))
            log(module, name, value, **settings)

        def noted_step(module: HeadTraining, batch: Batch, batch_idx: int) -> Any:
            self.tokens.append(len(batch.pack.input_ids))
            return step(module, batch, batch_idx)

        monkeypatch.setattr(HeadTraining, "log", noted_log)
        monkeypatch.setattr(HeadTraining, "training_step", noted_step)
        self.takes("training_step", seconds=1)

    def takes(self, method: str, *, seconds: float) -> None:
        call = getattr(HeadTraining, method)

        def slow(*given: Any, **settings: Any) -> Any:
            self.now += seconds
            return call(*given, **settings)

        self.patch.setattr(HeadTraining, method, slow)


def fit_on_small_packs(tmp_path: Path, *options: str) -> None:
    options = ("trainer.max_epochs=1", "trainer.log_every_n_steps=1", "data.pack_tokens=40", "ttt_steps=1", *options)
    Run(tmp_path / "run", write_store(tmp_path / "features", random_samples(60)), *options).fit()


def test_the_time_that_logging_takes_counts_in_rates_and_is_no_wait_for_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU logging waits until all steps so far are done."""
    clock = Clock(monkeypatch)
    clock.takes("log", seconds=5)
    fit_on_small_packs(tmp_path)
    assert len(clock.tokens) > 10
    seconds = 1 + 5 * sum(name.startswith("train/") for name in clock.logged)
    assert clock.logged["train/tokens_per_s"][1:] == pytest.approx([tokens / seconds for tokens in clock.tokens[1:]])
    assert set(clock.logged["train/data_wait_share"]) == {0}


def test_a_slow_store_shows_as_wait_for_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, asked = Clock(monkeypatch), Semaphore(0)
    load, calls = FeatureData._load, count()

    def asked_and_answered() -> float:
        if next(calls) % 2 == 0:
            asked.release()
        return clock.now

    def slow(data: FeatureData, planned: PlannedPack) -> Any:
        asked.acquire()  # not before the step waits for it
        clock.now += 3
        return load(data, planned)

    monkeypatch.setattr(loader.time, "perf_counter", asked_and_answered)
    monkeypatch.setattr(FeatureData, "_load", slow)
    fit_on_small_packs(tmp_path, "data.readers=1", "data.prefetch=1")
    assert len(clock.tokens) > 10
    assert clock.logged["train/data_wait_share"] == [3 / (3 + 1)] * len(clock.tokens)


def test_rates_leave_validation_in_the_middle_of_an_epoch_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    clock.takes("on_validation_epoch_start", seconds=100)
    fit_on_small_packs(tmp_path, "trainer.val_check_interval=0.5")
    assert clock.now > 200, "validation did not take place in the middle"
    assert clock.logged["train/tokens_per_s"] == clock.tokens


def test_a_training_too_small_for_its_schedule_or_its_best_checkpoint_says_so_in_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def told() -> list[str]:
        lines = [record.getMessage() for record in caplog.records if "a small training" in record.getMessage()]
        caplog.clear()
        return lines

    fit_on_small_packs(tmp_path, "trainer.accumulate_grad_batches=2")
    [line] = told()
    assert "steps in all, below 500: set data.pack_tokens=20 trainer.accumulate_grad_batches=1" in line
    assert re.search(r"\d+ samples to validate, below 30: the best checkpoint is chance; use more prompts", line)

    few, many = (feature_data(str(tmp_path / "features"), val_fraction=fraction) for fraction in (0.1, 0.7))
    trainer = SimpleNamespace(global_step=0, is_global_zero=True, fast_dev_run=False, accumulate_grad_batches=1)
    for data, steps, parts in ((few, 500, ["to validate"]), (many, 499, ["below 500: set data.pack"]), (many, 500, [])):
        trainer.datamodule, trainer.checkpoint_callback = data, BestCheckpoint(monitor="val/loss")
        warn_of_little(trainer, steps)  # type: ignore[arg-type]
        lines = told()
        assert len(lines) == len(parts) and all(part in line for part, line in zip(parts, lines, strict=True))
