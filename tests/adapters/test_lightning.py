"""What we use of Lightning's private parts and no other test shows; tests/training has its CSV logger."""

from dataclasses import replace

import lightning
import pytest
import torch
from lightning.pytorch.trainer.connectors.logger_connector.result import _Metadata, _ResultMetric

from eagle3.adapters import lightning as adapter
from eagle3.adapters.lightning import LIGHTNING, reload_train_loader, skip_needless_moves, unfinished_epoch
from eagle3.commands.train import build_callbacks, build_trainer
from eagle3.compose import compose_run
from eagle3.errors import InputError

RELEASE = f"Lightning {lightning.__version__}"


@pytest.fixture
def trainer() -> lightning.Trainer:
    return lightning.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)


def test_a_part_that_is_gone_is_one_line_before_a_training_starts(tmp_path, monkeypatch):
    monkeypatch.setattr(adapter, "LIGHTNING", replace(LIGHTNING, parts=("lightning:no_such_part",)))
    run = compose_run("train", "data.path=x", f"run_dir={tmp_path}")
    with pytest.raises(InputError, match=r"lightning .* has no lightning:no_such_part; lightning 2\.6\.4 to 2\.6 is"):
        build_trainer(run, [], build_callbacks(run))


def test_the_training_loader_is_asked_for_again(trainer):
    trainer.reload_dataloaders_every_n_epochs = 1
    trainer.fit_loop._last_train_dl_reload_epoch = 0
    assert not trainer.fit_loop._should_reload_train_dl
    reload_train_loader(trainer)
    assert trainer.fit_loop._should_reload_train_dl, f"{RELEASE} decides otherwise when it asks for loaders"


def test_an_epoch_that_ended_early_is_saved_as_unfinished(trainer):
    batches, epochs = trainer.fit_loop.epoch_loop.batch_progress.current, trainer.fit_loop.epoch_progress
    trainer.fit_loop.max_batches, batches.ready = 4, 2
    for counts in (epochs.current, epochs.total):
        counts.processed = counts.completed = 1
    with unfinished_epoch(trainer, at_validation=True):
        saved = trainer.fit_loop.state_dict()["epoch_progress"]
        for counts in (saved["current"], saved["total"]):
            assert counts["processed"] == counts["completed"] == 0, f"{RELEASE} saves the number of epochs elsewhere"
    assert epochs.current.completed == epochs.total.completed == 1
    batches.ready = 4
    with unfinished_epoch(trainer, at_validation=True):
        assert epochs.current.completed == 1  # an epoch that ended by itself is finished


def test_a_metric_moves_to_another_device_only(monkeypatch):
    monkeypatch.setattr(_ResultMetric, "to", _ResultMetric.to)  # restored after the test
    skip_needless_moves()
    move = adapter._move
    metric = _ResultMetric(_Metadata("training_step", "loss"), is_tensor=True)
    walked: list[torch.device] = []
    monkeypatch.setattr(adapter, "_move", lambda metric, device: walked.append(device) or move(metric, device))
    for name in ("cpu", "meta", "meta"):
        assert metric.to(torch.device(name)).cumulated_batch_size.device.type == name
    assert [device.type for device in walked] == ["meta"]
