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
from scripts import Script, run_script
from stores import random_samples, shard_of, write_store

from eagle3.errors import InputError

WEIGHTS = {"shuffled": None, "weighted": [1.5]}


def data_of(store: Path, state: dict[str, Any] | None = None, **changes: Any) -> Any:
    return feature_data(str(store), state=json.loads(json.dumps(state)), current_epoch=1, readers=1, **changes)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return write_store(tmp_path / "store", random_samples(120))


@pytest.mark.parametrize(
    ("weights", "lives"),  # ranks, micro-batches, packs that each rank trains before the run ends
    [
        (None, [(1, 1, 3), (2, 1, None)]),
        (None, [(4, 1, 2), (2, 2, 2), (1, 1, 3), (3, 1, None)]),
        ([1.5], [(2, 1, 2), (2, 1, 1), (1, 1, 0), (2, 1, 1), (4, 1, None)]),
    ],
)
def test_every_sample_is_trained_once_whatever_the_ranks(
    store: Path, weights: list[float] | None, lives: list[tuple[int, int, int | None]]
) -> None:
    state, trained, behind = None, Counter[str](), 0
    for ranks, micro_batches, packs in lives:
        states = []
        for rank in range(ranks):
            spread = {"global_rank": rank, "world_size": ranks, "accumulate_grad_batches": micro_batches}
            data = data_of(store, state, **spread, weights=weights)
            loader = data.train_dataloader()
            left = len(loader) - behind
            for _, batch in zip(range(left if packs is None else packs), loader, strict=False):
                trained.update(batch.pack.sample_ids)
            states.append(data.state_dict())
        assert all(each == states[0] for each in states)
        state, behind = states[0], behind + (left if packs is None else packs)
    whole = data_of(store, weights=weights)
    expected = Counter(name for batch in whole.train_dataloader() for name in batch.pack.sample_ids)
    assert trained == expected
    following = data_of(store, state, weights=weights)
    assert following.epochs.resumed.before == state["before"]  # the epoch was ended: the next one is another


@pytest.mark.parametrize("weights", WEIGHTS.values(), ids=WEIGHTS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_loader_that_was_asked_for_before_the_restore_loads_what_is_left(
    store: Path, weights: list[float] | None, ranks: int
) -> None:
    """As under trainer=fsdp, where Lightning counts the steps of an epoch before it restores a checkpoint."""
    first = data_of(store, weights=weights)
    begun = [batch.pack.sample_ids for _, batch in zip(range(4), first.train_dataloader(), strict=False)]
    rest = []
    for rank in range(ranks):
        data = data_of(store, global_rank=rank, world_size=ranks, weights=weights)
        loader = data.train_dataloader()
        whole = len(loader)
        data.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert data.state_dict()["consumed"] == (4 if ranks == 1 else 0)
        rest += [batch.pack.sample_ids for batch in loader]
        assert len(loader) == (whole if ranks == 1 else 4 + len(rest) / (rank + 1))
        assert bool(vars(data.trainer.fit_loop)) == (len(loader) != whole)  # Lightning has counted its packs
    expected = data_of(store, weights=weights).train_dataloader()
    assert Counter(sum(begun + rest, ())) == Counter(sum((batch.pack.sample_ids for batch in expected), ()))


def test_a_step_that_would_be_cut_is_refused(store: Path) -> None:
    data = data_of(store, world_size=2)
    loader = iter(data.train_dataloader())
    next(loader)
    with pytest.raises(
        InputError, match=r"in the middle of a step of trainer\.accumulate_grad_batches=2; resume with 1"
    ):
        data_of(store, data.state_dict(), accumulate_grad_batches=2)


def train(run: Path, devices: int, *, stopped: bool, strategy: str = "ddp") -> dict[str, Any]:
    """Train the epoch, or a few steps of it; return what last.ckpt says then."""
    last, log = run / "checkpoints/last.ckpt", run.with_suffix(".log")
    settings = [
        f"data.path={run.parent}/store", f"hydra.run.dir={run}", "data.pack_tokens=48",
        "model.draft_vocab_size=16", "ttt_steps=3", f"trainer={strategy}", "trainer.accelerator=cpu",
        "trainer.precision=32-true", f"trainer.devices={devices}", "trainer.max_epochs=1",
        f"callbacks.last.every_n_steps={1 if stopped else 0}", "callbacks.last.min_seconds=0",
        *([f"ckpt_path={last}"] if last.exists() else []),
    ]  # fmt: skip
    version = last.stat().st_mtime_ns if last.exists() else 0
    with log.open("wb") as file:
        process = Script("train", *settings, stdout=file, stderr=file, own_session=True)
    while stopped and process.poll() is None and not (last.exists() and last.stat().st_mtime_ns > version):
        time.sleep(0.01)
    if stopped:
        os.killpg(process.pid, signal.SIGKILL)
    assert process.wait() == (-signal.SIGKILL if stopped else 0), log.read_text()
    return torch.load(last, weights_only=True)


@pytest.mark.slow
def test_a_training_continues_with_more_processes_and_with_fewer(tmp_path: Path) -> None:
    write_store(tmp_path / "store", random_samples(600))
    run = tmp_path / "run"
    lives = [train(run, 1, stopped=True), train(run, 2, stopped=True)]
    assert "ranks=2 and trainer.accumulate_grad_batches=1 instead of ranks=1 and" in run.with_suffix(".log").read_text()
    lives.append(train(run, 1, stopped=False, strategy="fsdp"))  # restores after it has counted the packs of the epoch
    assert "ranks=1 and trainer.accumulate_grad_batches=1 instead of ranks=2 and" in run.with_suffix(".log").read_text()
    states = [each["FeatureData"] for each in lives]
    assert [state["epoch"] for state in states] == [0, 0, 0]
    assert [len(state["before"]) for state in states] == [0, 1, 2]
    done = [*states[2]["before"], states[2]]
    assert sum(each["consumed"] for each in done) == lives[2]["global_step"]
    assert states[2]["consumed"] == states[2]["packs"] > 0
    assert json.loads((run / "result.json").read_text())["epochs"] == 1


@pytest.mark.slow
def test_a_damaged_shard_in_the_share_of_one_rank_is_one_line_of_each(tmp_path: Path) -> None:
    store = write_store(tmp_path / "store", random_samples(60))
    damaged = shard_of(store, 1)  # the second rank's
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    done = run_script(
        "train", f"data.path={store}", f"hydra.run.dir={tmp_path}/run", "data.pack_tokens=48", "ttt_steps=3",
        "model.draft_vocab_size=16", "trainer=ddp", "trainer.accelerator=cpu", "trainer.precision=32-true",
        "trainer.devices=2",
    )  # fmt: skip
    said = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode == 1 and len(said) == 2 and all(f"{damaged} has sha256" in line for line in said)
    assert "Traceback" not in done.stderr
