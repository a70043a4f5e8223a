"""Commands that are killed at any moment and started again end with what they would have made without.

KILLS=50 python -m pytest tests/test_kills.py    # the long form of each; by default a short one
"""

import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from extraction import conversation, write_answers
from object_stores import new_folder, running_store
from scripts import finished, start_script
from stores import ASSETS, assert_same_samples, random_samples, write_store

from eagle3.features.concat import open_source
from eagle3.storage.folder import open_folder

KILLS = int(os.environ.get("KILLS", "1"))
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


def killed(log: Path, state: Callable[[], Any], drawn: random.Random, *command: str) -> bool:
    """Run a command and kill it up to 0.3 s after `state` has changed; return whether it still ran then."""
    before = state()
    process = start_script(*command, log=log)
    while state() == before and process.poll() is None:
        time.sleep(0.1)  # asked more often, the server of objects in this process would do little else
    time.sleep(0.3 * drawn.random())
    if alive := process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    assert process.wait() in (0, -signal.SIGKILL), log.read_text(errors="replace")
    return alive


STAGES = (
    "precompute", f"target.path={ASSETS}/tiny", "target.device=cpu", "features.batch_tokens=64",
    "features.shard_mb=0.2", "features.dtype=bfloat16",
)  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a command that nobody killed."""
    folder = tmp_path_factory.mktemp("whole")
    lines = (ASSETS / "prompts" / "train.jsonl").read_text().splitlines(keepends=True)[: 60 + 30 * KILLS]
    (folder / "prompts.jsonl").write_text("".join(lines))
    prompts = (f"prompts.path={folder}/prompts.jsonl", "prompts/privacy=off", "answers=imported")
    finished(*STAGES, f"out_dir={folder}", *prompts)
    return folder


@pytest.mark.parametrize("scheme", ["s3", "gs"])
def test_features_whose_command_is_killed_while_it_uploads_are_those_of_one_that_is_not(data, tmp_path, scheme):
    shutil.copytree(data / "answers", tmp_path / "answers")
    with running_store(scheme):
        url, drawn = new_folder(scheme), random.Random(0)
        command = (*STAGES, f"out_dir={tmp_path}", "stages=[features]", f"features.path={url}")
        folder = open_folder(url, setting="data.path")

        def shards() -> list[str]:
            return folder.names("*.index")

        kills = sum(killed(tmp_path / "log", shards, drawn, *command) for _ in range(KILLS))
        finished(*command)
        assert kills == KILLS  # else it was too quick for them
        assert_same_samples(open_source(str(data / "features")), open_source(url), tolerance=2e-2)


LIVE = ("data=live", "features=huggingface", "target.device=cpu", "features.batch_tokens=1")


@pytest.mark.parametrize("live", [False, True])
def test_a_training_that_is_killed_ends_with_the_weights_of_one_that_is_not(tmp_path, target, live):
    if live:
        rows = [conversation(number, 3 + number % 5, 2 + number * 7 % 30) for number in range(60)]
        write_answers(tmp_path, target.identity, rows)
        data = (f"data.path={tmp_path}/answers", *LIVE)
    else:
        data = (f"data.path={write_store(tmp_path / 'store', random_samples(60))}",)
    steps = 20 + 40 * KILLS

    def command(run: Path) -> list[str]:
        last = run / "checkpoints/last.ckpt"
        return [
            "train", *data, f"hydra.run.dir={run}", "trainer=cpu", "data.pack_tokens=48",
            "model.draft_vocab_size=16", "ttt_steps=3", "trainer.max_epochs=-1", f"trainer.max_steps={steps}",
            "callbacks.last.every_n_steps=3", "callbacks.last.min_seconds=0", "callbacks.early_stopping=null",
            "callbacks.curves=null",
            *([f"ckpt_path={last}"] if last.exists() else []),
        ]  # fmt: skip

    def saved() -> int | None:
        last = tmp_path / "killed/checkpoints/last.ckpt"
        return last.stat().st_mtime_ns if last.exists() else None

    drawn = random.Random(0)
    finished(*command(tmp_path / "whole"))
    kills = sum(killed(tmp_path / "log", saved, drawn, *command(tmp_path / "killed")) for _ in range(KILLS))
    finished(*command(tmp_path / "killed"))
    assert kills == KILLS
    one, other = (
        torch.load(tmp_path / name / "checkpoints/last.ckpt", weights_only=True) for name in ("whole", "killed")
    )
    assert one["global_step"] == other["global_step"] == steps
    assert one["state_dict"].keys() == other["state_dict"].keys()
    for name, weights in one["state_dict"].items():
        assert torch.equal(weights, other["state_dict"][name]), name
