"""A run goes on with other numbers of ranks in the middle of an epoch: each sample once, in whatever order."""

import json
import os
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from feature_data import feature_data
from scripts import finished, run_script
from stores import flip_a_bit, random_samples, shard_path, write_store
from training_runs import start_ranks

from eagle3.errors import InputError


def make_data(store: Path, state: dict[str, Any] | None = None, **changes: Any) -> Any:
    return feature_data(str(store), state=json.loads(json.dumps(state)), current_epoch=1, readers=1, **changes)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return write_store(tmp_path / "store", random_samples(120))


@pytest.mark.parametrize(
    ("weights", "lives"),  # ranks, micro-batches, packs that each rank trains before the run ends
    [
        (None, [(4, 1, 2), (2, 2, 2), (1, 1, 3), (3, 1, None)]),
        ([1.5], [(2, 1, 2), (2, 1, 1), (1, 1, 0), (2, 1, 1), (4, 1, None)]),
    ],
)
def test_every_sample_is_trained_once_whatever_the_ranks(store, weights, lives):
    state, trained, behind = None, Counter[str](), 0
    for ranks, micro_batches, packs in lives:
        states = []
        for rank in range(ranks):
            spread = {"global_rank": rank, "world_size": ranks, "accumulate_grad_batches": micro_batches}
            data = make_data(store, state, **spread, weights=weights)
            loader = data.train_dataloader()
            left = len(loader) - behind
            for _, batch in zip(range(left if packs is None else packs), loader, strict=False):
                trained.update(batch.pack.sample_ids)
            states.append(data.state_dict())
        assert all(each == states[0] for each in states)
        state, behind = states[0], behind + (left if packs is None else packs)
    whole = make_data(store, weights=weights)
    expected = Counter(name for batch in whole.train_dataloader() for name in batch.pack.sample_ids)
    assert trained == expected
    following = make_data(store, state, weights=weights)
    assert following.epochs.resumed.before == state["before"]  # the epoch was ended: the next one is another


@pytest.mark.parametrize(("weights", "ranks"), [(None, 1), ([1.5], 2)])
def test_a_loader_that_was_asked_for_before_the_restore_loads_what_is_left(store, weights, ranks):
    """As under trainer=fsdp, where Lightning counts the steps of an epoch before it restores a checkpoint."""
    first = make_data(store, weights=weights)
    begun = [batch.pack.sample_ids for _, batch in zip(range(4), first.train_dataloader(), strict=False)]
    rest = []
    for rank in range(ranks):
        data = make_data(store, global_rank=rank, world_size=ranks, weights=weights)
        loader = data.train_dataloader()
        whole = len(loader)
        data.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert data.state_dict()["consumed"] == (4 if ranks == 1 else 0)
        rest += [batch.pack.sample_ids for batch in loader]
        assert len(loader) == (whole if ranks == 1 else 4 + len(rest) / (rank + 1))
        assert bool(vars(data.trainer.fit_loop)) == (len(loader) != whole)  # Lightning has counted its packs
    expected = make_data(store, weights=weights).train_dataloader()
    assert Counter(sum(begun + rest, ())) == Counter(sum((batch.pack.sample_ids for batch in expected), ()))


def test_a_step_that_would_be_cut_is_refused(store):
    data = make_data(store, world_size=2)
    loader = iter(data.train_dataloader())
    next(loader)
    with pytest.raises(InputError, match=r"trainer\.accumulate_grad_batches=2; resume with 1"):
        make_data(store, data.state_dict(), accumulate_grad_batches=2)


def train_overrides(run: Path, devices: int, strategy: str) -> list[str]:
    last = run / "checkpoints/last.ckpt"
    return [
        f"data.path={run.parent}/store", f"hydra.run.dir={run}", "data.pack_tokens=48",
        "model.draft_vocab_size=16", "ttt_steps=3", f"trainer={strategy}", "trainer.accelerator=cpu",
        "trainer.precision=32-true", f"trainer.devices={devices}", "trainer.max_epochs=1",
        "callbacks.curves=null", "callbacks.last.min_seconds=0", *([f"ckpt_path={last}"] if last.exists() else []),
    ]  # fmt: skip


def train(run: Path, strategy: str, *options: str) -> str:
    done = finished("train", *train_overrides(run, 1, strategy), *options)
    return done.stdout + done.stderr


def train_until_killed(run: Path, devices: int) -> str:
    """Train a few steps, and kill all processes."""
    last, log = run / "checkpoints/last.ckpt", run.with_suffix(".log")
    version = last.stat().st_mtime_ns
    settings = (*train_overrides(run, devices, "ddp"), "callbacks.last.every_n_steps=1")
    ranks = start_ranks(*settings, ranks=devices, log=log)
    while all(rank.poll() is None for rank in ranks) and last.stat().st_mtime_ns == version:
        time.sleep(0.01)
    for rank in ranks:
        os.killpg(rank.pid, signal.SIGKILL)
    assert [rank.wait() for rank in ranks] == [-signal.SIGKILL] * devices, log.read_text()
    return log.read_text()


@pytest.mark.slow
def test_a_training_continues_with_more_processes_and_with_fewer(tmp_path):
    write_store(tmp_path / "store", random_samples(600))
    run, states = tmp_path / "run", []

    def saved() -> dict[str, Any]:
        content = torch.load(run / "checkpoints/last.ckpt", weights_only=True)
        states.append(content["FeatureData"])
        return content

    train(run, "auto", "trainer.max_steps=4", "trainer.val_check_interval=4")
    saved()
    changed = "ranks={} and trainer.accumulate_grad_batches=1 instead of ranks={} and"
    assert changed.format(2, 1) in train_until_killed(run, 2)
    saved()
    assert changed.format(1, 2) in train(run, "fsdp")  # restores after it has counted the packs of the epoch
    steps = saved()["global_step"]
    assert [state["epoch"] for state in states] == [0, 0, 0]
    assert [len(state["before"]) for state in states] == [0, 1, 2]
    assert sum(each["consumed"] for each in [*states[2]["before"], states[2]]) == steps
    assert states[2]["consumed"] == states[2]["packs"] > 0
    assert json.loads((run / "result.json").read_text())["epochs"] == 1


@pytest.mark.slow
def test_a_damaged_shard_in_the_share_of_one_rank_is_one_line(tmp_path):
    store = write_store(tmp_path / "store", random_samples(60))
    damaged = shard_path(store, 1)  # the second rank's
    flip_a_bit(damaged)
    done = run_script(
        "train", f"data.path={store}", f"hydra.run.dir={tmp_path}/run", "data.pack_tokens=48", "ttt_steps=3",
        "model.draft_vocab_size=16", "trainer=ddp", "trainer.accelerator=cpu", "trainer.precision=32-true",
        "trainer.devices=2",
    )  # fmt: skip
    said = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode == 1 and len(said) == 1 and f"{damaged} has sha256" in said[0]
    assert "Traceback" not in done.stderr
