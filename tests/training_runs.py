"""Trainings as users run them, on a small store, with what their batches were."""

import csv
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from forks import Forked
from scripts import run_script, start_script
from serving_fixtures import free_port
from torch.utils._python_dispatch import TorchDispatchMode

from eagle3.commands import live
from eagle3.commands.train import build_loggers, build_training, chosen_precision
from eagle3.compose import compose_run
from eagle3.errors import Interrupted
from eagle3.settings.training import TrainRun
from eagle3.training.resume import read_resumed

LIGHTNING_WARNS = pytest.mark.filterwarnings(
    "ignore:.*GPU available but not used.*",
    "ignore:.*does not have many workers.*",
    "ignore:.*treespec, LeafSpec.*",
    "ignore:Checkpoint directory.*",
)
Start = Callable[..., "Run"]


class Recorder(lightning.Callback):
    """Notes epoch, samples and number of anchors of every batch; can send a signal after a number of batches."""

    number = signal.SIGINT

    def __init__(self, signal_after: int | None = None) -> None:
        self.batches: list[tuple[int, tuple[str, ...], int]] = []
        self.signal_after = signal_after

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.batches.append((trainer.current_epoch, batch.pack.sample_ids, batch.num_anchors))
        if len(self.batches) == self.signal_after:
            signal.raise_signal(self.number)


class Run:
    """One training in `directory`."""

    def __init__(self, directory: Path, store: Path | str, *overrides: str, signal_after: int | None = None) -> None:
        run = composed(directory, store, *overrides)
        run, self.held = live.with_choices(run) if run.live else run, ExitStack()
        lightning.seed_everything(run.seed, verbose=False)
        resumed = read_resumed(run.ckpt_path)
        self.data, self.module = build_training(run, resumed and resumed.record.origin, self.held)
        self.recorder = Recorder(signal_after)
        callbacks = [callback.build() for callback in run.chosen_callbacks.values()]
        loggers = build_loggers(run, resumed.global_step if resumed else 0)
        trainer = run.trainer.with_keys(precision=chosen_precision(run.trainer.keys))
        self.trainer = trainer.build(callbacks=[*callbacks, self.recorder], logger=loggers)
        self.checkpoint = run.ckpt_path
        self.directory = directory

    def fit(self) -> "Run":
        with self.held:
            self.trainer.fit(self.module, datamodule=self.data, ckpt_path=self.checkpoint, weights_only=True)
        return self

    def stopped(self) -> "Run":
        """Train until the signal of `signal_after` ends it."""
        with pytest.raises(Interrupted, match=r"resume with ckpt_path=.*last\.ckpt"):
            self.fit()
        return self

    @property
    def resume(self) -> str:
        return f"ckpt_path={self.directory}/checkpoints/last.ckpt"

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return {name: parameter.detach().clone() for name, parameter in self.module.head.named_parameters()}


def composed(directory: Path, store: Path | str, *overrides: str) -> TrainRun:
    settings = [
        f"data.path={store}", f"run_dir={directory}", "data.pack_tokens=48", "data.val_fraction=0.2", "ttt_steps=3",
        "trainer=cpu", "trainer.max_epochs=3", "trainer.enable_progress_bar=false", "trainer.log_every_n_steps=1",
        "callbacks.progress=null", "callbacks.curves=null", "callbacks.last.every_n_steps=5", "optim.lr=3e-3",
        "callbacks.last.min_seconds=0",
    ]  # fmt: skip
    return compose_run("train", *settings, *overrides)


def metrics(done: Run) -> list[dict[str, str]]:
    return list(csv.DictReader((done.directory / "metrics.csv").read_text().splitlines()))


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


SHORT = (  # without a picture of the curves, which takes longer than such a training
    "data.val_fraction=0.2", "ttt_steps=2", "trainer=cpu", "trainer.max_epochs=1",
    "callbacks.curves=null", "progress=false",
)  # fmt: skip


def sweep_command(store: Path, folder: Path, *arguments: str) -> list[str]:
    return ["-m", f"data.path={store}", *SHORT, f"hydra.sweep.dir={folder}", *arguments]


def sweep(store: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_script("train", *sweep_command(store, folder, *arguments), env={"RAY_USAGE_STATS_ENABLED": "0"})


def start_ranks(*arguments: str, ranks: int, log: Path, env: Mapping[str, str] | None = None) -> list[Forked]:
    """Start train.py as torchrun does: Lightning would start each rank but the first in a process without imports."""
    port = str(free_port())
    job = {"TORCHELASTIC_RUN_ID": "tests", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GROUP_RANK": "0"}
    job |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), **(env or {})}
    own = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
    return [start_script("train", *arguments, log=log, env=job | each) for each in own]


def finished_ranks(*arguments: str, ranks: int, log: Path, env: Mapping[str, str] | None = None) -> None:
    """Train with ranks that must end with status 0; as by torchrun, the others end with the first that does not."""
    running = start_ranks(*arguments, ranks=ranks, log=log, env=env)
    while running and not any(rank.poll() for rank in running):
        running = [rank for rank in running if rank.poll() != 0]
        time.sleep(0.05)
    for rank in running:
        if rank.poll() is None:
            os.killpg(rank.pid, signal.SIGKILL)
            rank.wait()
    assert not running, log.read_text()
