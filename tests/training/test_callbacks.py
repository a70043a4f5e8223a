"""What callbacks and logging cost a training step."""

import re
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from feature_data import feature_data
from stores import random_samples, write_store
from training_runs import LIGHTNING_WARNS, CountPerStep, Run

from eagle3.training import callbacks
from eagle3.training.callbacks import BestCheckpoint, RunProgress, Throughput, warn_of_little

pytestmark = LIGHTNING_WARNS
LOG_EVERY = 5


def test_a_step_reads_no_number_but_where_it_logs(tmp_path, capsys, monkeypatch):
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


def test_rates_count_logging_as_work_leave_out_validation_and_show_a_slow_store(monkeypatch):
    """On a GPU logging waits until all steps so far are done: that time belongs to the next steps."""
    now, logged = 0.0, defaultdict[str, list[float]](list)
    monkeypatch.setattr(callbacks, "time", SimpleNamespace(perf_counter=lambda: now))
    pack = SimpleNamespace(num_anchors=4, pack=SimpleNamespace(input_ids=range(40)))
    loader = SimpleNamespace(waited=0.0)
    facts = {"accumulate_grad_batches": 1, "is_last_batch": False, "world_size": 1, "sanity_checking": False}
    trainer: Any = SimpleNamespace(log_every_n_steps=2, global_step=0, train_dataloader=loader, **facts)

    def log(name: str, value: torch.Tensor, **settings: Any) -> None:
        nonlocal now
        now += 5 / 3  # 5 seconds for all three
        logged[name].append(float(value))

    module: Any = SimpleNamespace(log=log, device="cpu")
    throughput = Throughput()
    throughput.on_train_start(trainer, module)
    for step in range(1, 7):
        now, trainer.global_step, loader.waited = now + 1, step, loader.waited + 0.25
        throughput.on_train_batch_end(trainer, module, None, pack, step - 1)  # type: ignore[arg-type]
        if step == 3:
            throughput.on_validation_start(trainer, module)
            now += 100
            throughput.on_validation_end(trainer, module)
    assert logged["train/tokens_per_s"] == pytest.approx([80 / 2, 80 / 7, 80 / 7])
    assert logged["train/anchors_per_s"] == pytest.approx([8 / 2, 8 / 7, 8 / 7])
    assert logged["train/data_wait_share"] == pytest.approx([0.5 / 2, 0.5 / 7, 0.5 / 7])


def test_a_training_too_small_for_its_schedule_or_its_best_checkpoint_says_so_in_one_line(tmp_path, caplog):
    def told() -> list[str]:
        lines = [record.getMessage() for record in caplog.records if "a small training" in record.getMessage()]
        caplog.clear()
        return lines

    options = ("trainer.max_epochs=1", "data.pack_tokens=40", "ttt_steps=1", "trainer.accumulate_grad_batches=2")
    Run(tmp_path / "run", write_store(tmp_path / "features", random_samples(60)), *options).fit()
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
