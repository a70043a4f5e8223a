"""The learning rate over samples: after a resume it is that of a training without a break."""

import csv
import os
import signal
from pathlib import Path
from typing import Any

import defaults
import lightning
import numpy as np
import pytest
from heads import make_head
from scripts import run_script
from stores import ROOT, in_float32, random_sample, write_store
from training_runs import LIGHTNING_WARNS, Run, finished_ranks

from eagle3.settings.training import OptimSettings
from eagle3.training.optim import AdamWCosine
from eagle3.training.resume import read_resumed

pytestmark = LIGHTNING_WARNS
PEAK, PACKS, EPOCHS = 3e-3, 16, 3
SETTINGS = [f"trainer.max_epochs={EPOCHS}", "data.pack_tokens=12", "data.val_fraction=0.02", "data.verify=false",
            "optim.warmup_fraction=0.25", "callbacks.early_stopping=null", "ttt_steps=1"]  # fmt: skip


def adamw(**changes: Any) -> AdamWCosine:
    return AdamWCosine(**vars(defaults.part("optim", **changes).read(OptimSettings)))


class StopsAt(lightning.Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.step and trainer.is_global_zero:
            signal.raise_signal(signal.SIGINT)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two samples fill a pack, so that packs are a measure of samples; three more validate."""
    samples = [random_sample([0, 0, 1, 1, 1, 0], seed=n, sample_id=f"p{n}#0") for n in range(2 * PACKS + 3)]
    return write_store(tmp_path_factory.mktemp("store") / "features", [in_float32(each) for each in samples])


def rates(run: Path) -> list[float]:
    """Return the learning rate of each step."""
    rows = csv.DictReader((run / "metrics.csv").read_text().splitlines())
    by_step = {int(row["step"]): float(row["train/lr"]) for row in rows if row["train/lr"]}
    assert list(by_step) == list(range(len(by_step)))
    return list(by_step.values())


def stopped_at(run: Path) -> int:
    saved = read_resumed(f"{run}/checkpoints/last.ckpt")
    assert saved is not None
    return saved.global_step


def assert_as_without_a_break(found: list[float], *, then: int, now: int, steps: int) -> None:
    """Steps had `then` packs, and have `now` after so many steps."""
    packs = [min(step, steps) * then + max(0, step - steps) * now for step in range(len(found))]
    assert packs[-1] + now == PACKS * EPOCHS
    length, optim = PACKS * EPOCHS // then, adamw(warmup_fraction=0.25)
    without_break = [PEAK * optim.scale(step, length) for step in range(length)]
    np.testing.assert_allclose(found, np.interp(packs, then * np.arange(length), without_break), atol=0.02 * PEAK)


CHANGES = [(1, 2, 4), (2, 1, 15)]  # packs of a step then and now, steps before


@pytest.mark.parametrize(("then", "now", "steps"), CHANGES)
def test_accumulation_that_changes_at_a_resume_leaves_the_rate_over_samples_as_it_was(
    tmp_path, store, then, now, steps
):
    accumulate = "trainer.accumulate_grad_batches="
    first = Run(tmp_path, store, *SETTINGS, f"{accumulate}{then}", signal_after=then * steps).stopped()
    Run(tmp_path, store, *SETTINGS, f"{accumulate}{now}", first.resume).fit()
    assert_as_without_a_break(rates(tmp_path), then=then, now=now, steps=steps)


@pytest.mark.slow
def test_ranks_that_change_at_a_resume_leave_the_rate_over_samples_as_it_was(tmp_path, store):
    then, now, steps = 1, 2, 6
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    settings = [f"data.path={store}", f"hydra.run.dir={tmp_path}", "ckpt_path=auto", "trainer.accelerator=cpu",
                f"optim.lr={PEAK}", "trainer.log_every_n_steps=1", "callbacks.last.every_n_steps=1",
                "callbacks.last.min_seconds=0", *SETTINGS]  # fmt: skip
    stop = f"+callbacks.stop={{_target_: {__name__}.StopsAt, step: {steps}}}"
    stopped = run_script("train", *settings, f"trainer.devices={then}", stop, env={"PYTHONPATH": path})
    assert stopped.returncode == 130, stopped.stderr
    before = stopped_at(tmp_path)
    finished_ranks(*settings, f"trainer.devices={now}", ranks=now, log=tmp_path / "log", env={"PYTHONPATH": path})
    assert_as_without_a_break(rates(tmp_path), then=then, now=now, steps=before)


def test_a_training_that_becomes_longer_warms_up_again_and_falls_to_its_end():
    optim = adamw(lr=PEAK, warmup_fraction=0.2, final_lr_fraction=0.02)
    optimizer, schedule = optim.build(make_head(), total_steps=20)
    assert schedule.start(steps_in_epoch=10, max_epochs=2, max_steps=-1) is None
    found = []

    def train(steps: int) -> None:
        for _ in range(steps):
            found.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            schedule.step()

    train(20)
    assert schedule.start(steps_in_epoch=10, max_epochs=2, max_steps=-1) is None, "nothing is left"
    message = schedule.start(steps_in_epoch=10, max_epochs=4, max_steps=-1)
    assert message is not None and "50% of the training is done" in message and "in 4 steps" in message
    train(20)
    risen, whole = found[20:24], [PEAK * optim.scale(step, 40) for step in range(40)]
    assert found[19] < 0.1 * whole[20] and np.diff([found[19], *risen]).max() < 0.3 * whole[20], "no jump"
    np.testing.assert_allclose(found[23:], whole[23:])
    state = schedule.state_dict()
    assert state["lr_lambdas"] == [None] and all(type(value) in (int, float) for value in state["base_lrs"])


@pytest.mark.parametrize(("bound", "then", "now", "risen"), [("max_steps", 20, 30, True), ("max_epochs", 3, 2, False)])
def test_the_log_of_a_resume_says_what_the_rate_does_when_the_training_has_another_length(
    tmp_path, store, caplog, bound, then, now, risen
):
    caplog.set_level("INFO", "eagle3")
    settings = [*SETTINGS, "trainer.val_check_interval=4"]
    first = Run(tmp_path, store, *settings, f"trainer.{bound}={then}", signal_after=None if risen else 20)
    first.fit() if risen else first.stopped()
    steps = stopped_at(tmp_path)
    Run(tmp_path, store, *settings, f"trainer.{bound}={now}", first.resume).fit()
    [line] = [record.getMessage() for record in caplog.records if "of the training is done" in record.getMessage()]
    found, length = rates(tmp_path), now if bound == "max_steps" else PACKS * now
    optim = adamw(lr=PEAK, warmup_fraction=0.25)
    assert f"ends at {PEAK * optim.final_lr_fraction:.2e} after step {length}" in line and "init_from" in line
    assert len(found) == length and f"{'rises to' if risen else 'continues at'} {max(found[steps:]):.2e}" in line
    assert (found[steps] > found[steps - 1]) is risen and found[steps] < found[steps - 1] + 0.2 * PEAK
