"""What callbacks and logging cost a training step."""

import time
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from stores import random_samples, write_store
from torch.utils._python_dispatch import TorchDispatchMode

from eagle3.data.datamodule import FeatureData
from eagle3.features.sample import Sample
from eagle3.features.store import SampleRef
from eagle3.training.callbacks import Progress
from eagle3.training.module import HeadTraining
from tests.training.test_training import Run

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*does not have many workers.*",
    "ignore:.*treespec, LeafSpec.*",
    "ignore:Checkpoint directory.*",
)
LOG_EVERY = 10


class NumbersRead(TorchDispatchMode):
    """Counts what a GPU would make the host wait for: a tensor's value or a shape that depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += operator.overloadpacket.__name__ in ("_local_scalar_dense", "nonzero", "masked_select", "equal")
        return operator(*args, **(kwargs or {}))


class CountPerStep(lightning.Callback):
    def __init__(self) -> None:
        self.mode = NumbersRead()
        self.at_start: list[int] = []

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        self.mode.__enter__()

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.at_start.append(self.mode.count)

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.mode.__exit__(None, None, None)


def test_a_step_reads_no_number_but_where_it_logs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # DenseAttention reads nothing; PaddedAttention reads its sizes from tensors that are on the CPU.
    options = ["kernels.attention=dense", "trainer.max_epochs=1", f"trainer.log_every_n_steps={LOG_EVERY}"]
    run = Run(tmp_path / "run", write_store(tmp_path / "features", random_samples(200)), *options)
    counter = CountPerStep()
    run.trainer.callbacks += [counter, Progress(refresh_seconds=3600, metrics=["train/loss", "val/accept_length"])]
    run.fit()
    read = torch.tensor(counter.at_start).diff().tolist()
    assert len(read) > 3 * LOG_EVERY
    assert {step % LOG_EVERY for step, numbers in enumerate(read, start=1) if numbers} == {0}
    captured = capsys.readouterr()
    shown = captured.out + captured.err
    assert "train/loss=" in shown
    assert "val/accept_length=" in shown


def test_the_time_that_logging_takes_counts_in_rates_and_is_no_wait_for_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU logging waits until all steps so far are done."""
    log, rates, waits, pause = HeadTraining.log, [], [], 0.05

    def slow(module: HeadTraining, name: str, value: Any, **settings: Any) -> None:
        if name == "train/data_wait_share":
            waits.append(value)
        if name == "train/tokens_per_s":
            rates.append(value)
            time.sleep(pause)
        log(module, name, value, **settings)

    monkeypatch.setattr(HeadTraining, "log", slow)
    options = ["trainer.max_epochs=1", "trainer.log_every_n_steps=1", "data.pack_tokens=40", "ttt_steps=1"]
    Run(tmp_path / "run", write_store(tmp_path / "features", random_samples(60)), *options).fit()
    assert len(rates) > 10
    assert max(rates[1:]) < 40 / pause
    assert max(waits[1:]) < 0.3


def test_a_slow_store_shows_as_wait_for_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, log, waits = FeatureData.read, HeadTraining.log, []

    def slow(data: FeatureData, ref: SampleRef) -> Sample:
        time.sleep(0.05)
        return read(data, ref)

    def noted(module: HeadTraining, name: str, value: Any, **settings: Any) -> None:
        if name == "train/data_wait_share":
            waits.append(value)
        log(module, name, value, **settings)

    monkeypatch.setattr(FeatureData, "read", slow)
    monkeypatch.setattr(HeadTraining, "log", noted)
    options = ["trainer.max_epochs=1", "trainer.log_every_n_steps=5", "data.pack_tokens=40", "ttt_steps=1"]
    Run(tmp_path / "run", write_store(tmp_path / "features", random_samples(60)), *options).fit()
    assert waits and min(waits) > 0.3


def test_rates_leave_validation_in_the_middle_of_an_epoch_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    validate, log, rates = HeadTraining.on_validation_epoch_start, HeadTraining.log, []

    def slow(module: HeadTraining) -> None:
        time.sleep(1)
        validate(module)

    def noted(module: HeadTraining, name: str, value: Any, **settings: Any) -> None:
        if name == "train/tokens_per_s":
            rates.append(float(value))
        log(module, name, value, **settings)

    monkeypatch.setattr(HeadTraining, "on_validation_epoch_start", slow)
    monkeypatch.setattr(HeadTraining, "log", noted)
    options = ["trainer.max_epochs=1", "trainer.log_every_n_steps=1", "trainer.val_check_interval=0.5"]
    options += ["data.pack_tokens=40", "ttt_steps=1"]
    Run(tmp_path / "run", write_store(tmp_path / "features", random_samples(60)), *options).fit()
    assert len(rates) > 10
    assert min(rates) > 40  # a pack of 40 tokens and a second of validation would be less
