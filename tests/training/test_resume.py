"""Which checkpoint a run resumes from: never one that would cost the run its own."""

import platform
import shutil
import time
from collections.abc import Callable
from contextlib import closing, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from object_stores import faulty_proxy, new_folder, running_store
from scripts import finished
from stores import random_samples, write_store

from eagle3.errors import InputError
from eagle3.serving.head.export import find_checkpoint
from eagle3.storage.folder import Storage, open_folder, write_file
from eagle3.training import copies as copies_module
from eagle3.training import resume
from eagle3.training.callbacks import LastCheckpoint
from eagle3.training.checkpoint import AtomicCheckpointIO
from eagle3.training.loggers import MetricsCSV
from eagle3.training.resume import RunCheckpoints, read_resumed

Saved = Callable[..., Path]


@pytest.fixture
def save(checkpoint: Path) -> Saved:
    """Save a checkpoint of a step, of the training with this seed."""
    content = torch.load(checkpoint, weights_only=True)

    def saved(path: Path, step: int, seed: int = 0) -> Path:
        record = {**content["eagle3"], "settings": {"seed": seed}}
        path.parent.mkdir(parents=True, exist_ok=True)
        AtomicCheckpointIO(copies=None).save_checkpoint({**content, "eagle3": record, "global_step": step}, path)
        return path

    return saved


def read_step(path: str | None) -> int:
    assert path is not None
    return torch.load(path, weights_only=True)["global_step"]


def started(run: Path, copies: Path | str, ckpt_path: Path | str | None = "auto") -> RunCheckpoints:
    """Begin a training as the command does, up to its first step."""
    checkpoints = RunCheckpoints(run, str(copies))
    checkpoints.resume_from(ckpt_path and str(ckpt_path))
    checkpoints.claim()
    return checkpoints


def kill(checkpoints: RunCheckpoints, copies: Path) -> None:
    """Give back what the system gives back, and leave the rest."""
    owner = (copies / "run.json").read_bytes()
    checkpoints.close()
    (copies / "run.json").write_bytes(owner)


def refusal(run: Path, ckpt_path: Path | str | None, copies: Path | str | None = None) -> str:
    before = {path: path.read_bytes() for path in run.glob("checkpoints/*")}
    with pytest.raises(InputError) as refused:
        RunCheckpoints(run, copies and str(copies)).resume_from(ckpt_path and str(ckpt_path))
    assert {path: path.read_bytes() for path in run.glob("checkpoints/*")} == before
    assert "\n" not in str(refused.value)
    return str(refused.value)


LAST, BEST8, BEST10 = "last.ckpt", "best-step8.ckpt", "best-step10.ckpt"  # names do not sort as the steps do
Steps = dict[str, int]
# Steps of the checkpoints in the run and in its copies; what is to be resumed; the checkpoint that it is, or why not.
STARTS: list[tuple[Steps, Steps, str | None, str | None]] = [
    ({}, {}, None, None),
    ({}, {}, "auto", None),
    ({}, {}, "last", "checkpoints has no checkpoint; set hydra.run.dir"),
    ({}, {}, "OTHER/last.ckpt", "OTHER/last.ckpt"),
    ({}, {}, "s3://bucket/run/last.ckpt", "set checkpoint_copies=s3://bucket/run ckpt_path=auto"),
    ({LAST: 9}, {}, None, "has checkpoints of an earlier training; resume it with ckpt_path=RUN/last.ckpt, or give"),
    ({LAST: 9}, {}, "auto", "RUN/last.ckpt"),
    ({LAST: 9}, {}, "last", "RUN/last.ckpt"),
    ({LAST: 9}, {}, "RUN/last.ckpt", "RUN/last.ckpt"),
    ({LAST: 9}, {}, "OTHER/last.ckpt", "ckpt_path=OTHER/last.ckpt would replace the checkpoints of hydra.run.dir="),
    ({BEST8: 8, BEST10: 10}, {}, f"RUN/{BEST8}", f"give ckpt_path=RUN/{BEST10}, or"),  # killed before the first last
    ({BEST8: 8, BEST10: 10, LAST: 20}, {}, f"RUN/{BEST10}", "give ckpt_path=RUN/last.ckpt, or"),
    ({}, {LAST: 9}, None, "checkpoint_copies=COPIES has checkpoints of an earlier training"),
    ({}, {LAST: 500}, "COPIES/last.ckpt", "resume with ckpt_path=auto, which fetches all"),
    ({LAST: 600}, {LAST: 500}, "COPIES/last.ckpt", "give ckpt_path=RUN/last.ckpt, or"),
    ({LAST: 600}, {LAST: 500}, "auto", "RUN/last.ckpt"),
]


@pytest.mark.parametrize(("here", "there", "given", "expected"), STARTS)
def test_a_start_resumes_the_latest_checkpoint_and_costs_none(tmp_path, save, here, there, given, expected):
    run = tmp_path / "run"
    places = {"RUN": run / "checkpoints", "COPIES": tmp_path / "copies", "OTHER": tmp_path / "other/checkpoints"}
    for place, steps in (("RUN", here), ("COPIES", there), ("OTHER", {LAST: 9})):
        for name, step in steps.items():
            save(places[place] / name, step)
    for place, folder in places.items():
        given, expected = (each and each.replace(place, str(folder)) for each in (given, expected))
    if expected is None or Path(expected).is_file():
        assert RunCheckpoints(run, str(places["COPIES"])).resume_from(given) == expected
        assert not here or read_step(expected) == here[LAST]
    else:
        assert expected in refusal(run, given, places["COPIES"])


def test_an_earlier_checkpoint_resumes_a_run_only_once_a_damaged_one_is_deleted_and_with_its_optimizer(tmp_path, save):
    folder = tmp_path / "run/checkpoints"
    best, last = save(folder / "best-step8.ckpt", 8), save(folder / "last.ckpt", 9)
    last.write_bytes(last.read_bytes()[:1000])
    assert "or delete that checkpoint if it is damaged" in refusal(tmp_path / "run", best)
    last.unlink()
    assert RunCheckpoints(tmp_path / "run", None).resume_from("auto") == str(best)
    with pytest.raises(InputError, match=f"ckpt_path={best} contains only weights .*init_from=HEAD"):
        read_resumed(str(best))


@pytest.mark.parametrize(
    ("given", "said"),
    [("", "is a folder"), ("checkpoints/", "is a folder"), ("checkpoints/step.ckpt", "does not exist")],
)
def test_a_place_in_a_run_that_is_no_checkpoint_is_told_the_last_one(tmp_path, save, given, said):
    last = save(tmp_path / "checkpoints/last.ckpt", 8)
    with pytest.raises(InputError, match=rf"{said} \(there is last\.ckpt\); give {last}"):
        read_resumed(f"{tmp_path}/{given}")


def test_files_that_macos_adds_to_a_copied_run_are_no_checkpoints(tmp_path, save):
    best = save(tmp_path / "run/checkpoints/best-step8.ckpt", 8)
    best.with_name(f"._{best.name}").write_bytes(b"\0\5\x16\7")
    assert RunCheckpoints(tmp_path / "run", None).resume_from("auto") == str(best)
    assert find_checkpoint(run=str(tmp_path / "run"), checkpoint=None) == best


def test_a_run_that_was_continued_elsewhere_resumes_from_the_later_copy(tmp_path, save):
    run, copies = tmp_path / "run", tmp_path / "copies"
    for step, folder in ((100, run / "checkpoints"), (500, copies)):
        save(folder / "last.ckpt", step)
        save(folder / f"best-step{step - 1}.ckpt", step - 1)
    resumed = RunCheckpoints(run, str(copies)).resume_from("auto")
    assert (resumed, read_step(resumed)) == (str(run / "checkpoints/last.ckpt"), 500)
    assert read_step(str(run / "checkpoints/best-step499.ckpt")) == 499


@pytest.mark.parametrize("inside", ["", "checkpoints"])
def test_copies_are_not_the_checkpoints_themselves(inside, tmp_path):
    run = tmp_path / "run"
    own = f"checkpoint_copies={run / inside} is the run's own folder"
    assert own in refusal(run, None, run / inside)
    assert own in refusal(run, "auto", run / inside)


def test_copies_of_another_training_are_refused(tmp_path, save):
    run, copies = tmp_path / "run", save(tmp_path / "copies/last.ckpt", 500, seed=1).parent
    save(run / "checkpoints/last.ckpt", 100)
    message = f"checkpoint_copies={copies} has another training than hydra.run.dir={run} (seed=0 then, 1 now)"
    assert message in refusal(run, "auto", copies)


def test_an_explicit_checkpoint_does_not_replace_the_copies_of_another_training(tmp_path, save):
    copies = tmp_path / "copies"
    started(tmp_path / "first", copies).close()  # nothing was saved: the folder is free again
    kill(started(tmp_path / "second", copies, None), copies)
    copied = save(copies / "last.ckpt", 500)
    other, own = save(tmp_path / "other/last.ckpt", 9), save(tmp_path / "third/checkpoints/last.ckpt", 9)
    before = {path.name: path.read_bytes() for path in copies.iterdir()}
    for run, given in ((tmp_path / "new", other), (tmp_path / "third", own), (tmp_path / "third", "auto")):
        assert f"checkpoint_copies={copies} is used by another run ({tmp_path}/second" in refusal(run, given, copies)
    (copies / "run.json").unlink()  # of an earlier version
    message = f"checkpoint_copies={copies} has checkpoints that ckpt_path={other} would replace"
    assert message in refusal(tmp_path / "new", other, copies)
    assert copied.read_bytes() == before["last.ckpt"]


def test_a_run_that_resumes_from_a_named_checkpoint_keeps_its_copies_unless_they_are_later(tmp_path, save):
    run, copies = tmp_path / "run", tmp_path / "copies"
    kill(started(run, copies, None), copies)
    last, copy = save(run / "checkpoints/last.ckpt", 100), save(copies / "last.ckpt", 90)
    started(run, copies, last).close()
    save(copy, 500)
    message = f"checkpoint_copies={copies} has a later checkpoint (step 500) than ckpt_path={last} (step 100)"
    assert message in refusal(run, last, copies)


@pytest.mark.parametrize("saved", [False, True])
def test_a_restart_without_its_folder_is_the_run_of_its_copies(tmp_path, save, saved):
    run, copies = tmp_path / "run", tmp_path / "copies"
    killed = started(run, copies)
    if saved:
        save(copies / "last.ckpt", 500)
    kill(killed, copies)
    first = (run / "run_id").read_text()
    shutil.rmtree(run)
    again = started(run, copies)
    assert (run / "run_id").read_text() == first and bool(again.latest()) is saved
    if saved:  # also on another machine
        again.close()
        started(tmp_path / "elsewhere", copies).close()
        assert (tmp_path / "elsewhere/run_id").read_text() == first


@pytest.mark.parametrize(("word", "locked"), [(None, True), ("auto", False)])
def test_of_two_trainings_that_start_together_the_second_is_refused(tmp_path, word, locked, monkeypatch):
    """Not locked: as in a bucket, or on two machines with a file system that has no locks."""
    copies = tmp_path / "copies"
    if not locked:
        monkeypatch.setattr("eagle3.training.copies.hold", lambda folder: nullcontext())
    first, second = (RunCheckpoints(tmp_path / name, str(copies)) for name in ("first", "second"))
    for each in (first, second):
        each.resume_from(word)
    first.claim()
    owner = (copies / "run.json").read_bytes()
    with pytest.raises(InputError, match=f"{copies} is (being written by process|used by another run)"):
        second.claim()
    second.close()
    assert "is used by another run" in refusal(tmp_path / "third", word, copies)
    assert (copies / "run.json").read_bytes() == owner


def test_copies_that_cannot_be_released_do_not_hide_why_a_training_ends(tmp_path, monkeypatch, caplog):
    with running_store() as store, faulty_proxy(store.url) as proxy:
        monkeypatch.setenv(store.endpoint, proxy.url)
        copies = started(tmp_path / "run", new_folder())
        proxy.fault = lambda number, method, path: "403"
        with pytest.raises(InputError, match=r"^the shard is damaged$"), closing(copies):
            raise InputError("the shard is damaged")
    assert "run.json: access is denied (403 Forbidden" in caplog.text and "may wait for 90 s" in caplog.text


def test_in_a_bucket_a_second_start_is_refused_while_the_first_runs_and_a_restart_after_a_kill_continues(
    tmp_path, save, monkeypatch, caplog
):
    """A pod with a disk of its own has the run's folder under the same name, on another host."""
    caplog.set_level("INFO")
    for name, seconds in (("RENEWED", 0.05), ("WATCHED", 1.0)):
        monkeypatch.setattr(copies_module, name, seconds)
    run, running = tmp_path / "run", f"{tmp_path}/run on {platform.node()}, since .*which still runs"
    with running_store():
        copies = new_folder()
        bucket = open_folder(copies, setting="test")
        first = started(run, copies)
        shutil.rmtree(run)
        monkeypatch.setattr(platform, "node", lambda: "another-pod")
        for word in (None, "auto"):  # before the first checkpoint
            with pytest.raises(InputError, match=running):
                started(run, copies, word)
        write_file(bucket, "last.ckpt", save(tmp_path / "last.ckpt", 500).read_bytes())
        for each in (run, tmp_path / "elsewhere"):
            with pytest.raises(InputError, match=running):
                started(each, copies)
            assert not [*each.glob("checkpoints/*")]

        assert first.copies is not None
        monkeypatch.setattr(first.copies.folder, "delete", lambda name: None)  # a kill leaves what it leaves
        first.close()
        before = time.monotonic()
        second = started(run, copies)
        assert time.monotonic() - before > 0.9 and read_step(str(second.latest())) == 500
        second.close()  # ended, or told to
        assert not bucket.names("alive.json") and bucket.names("run.json")
        third = started(tmp_path / "third", copies)
        assert "waiting up to" in caplog.text
        caplog.clear()
        again = started(tmp_path / "third", copies)
        assert "waiting up to" not in caplog.text  # it has the lock of that process
        for each in (third, again):
            each.close()


def test_a_process_whose_copies_another_one_has_claimed_writes_no_more(tmp_path, save, monkeypatch):
    """A pod that was taken for dead, say, while its Job was started again."""
    monkeypatch.setattr("eagle3.training.copies.hold", lambda folder: nullcontext())
    copies, last = tmp_path / "copies", tmp_path / "run/checkpoints/last.ckpt"
    checkpoints, writer = RunCheckpoints(tmp_path / "run", str(copies)), AtomicCheckpointIO(copies=str(copies))
    checkpoints.resume_from("auto")
    writer.claimed = checkpoints.claim()
    writer.save_checkpoint({"state_dict": {}}, last)
    kept = save(copies / "last.ckpt", 500).read_bytes()
    started(tmp_path / "elsewhere", copies)
    (run := tmp_path / "run/metrics.csv").write_text("step\n9\n")
    (copies / run.name).write_text("step\n500\n")
    strategy = SimpleNamespace(checkpoint_io=writer)
    loggers = [MetricsCSV(run_dir=str(run.parent), copies=str(copies), flush_every_n_steps=10)]
    trainer: Any = SimpleNamespace(is_global_zero=True, strategy=strategy, loggers=loggers)
    writes: list[Callable[[Path], None]] = [
        lambda path: writer.save_checkpoint({"state_dict": {}}, path), writer.remove_checkpoint,
        lambda path: LastCheckpoint(dirpath=str(path.parent), every_n_steps=200, min_seconds=60)._save(trainer),
    ]  # fmt: skip
    for write in writes:
        with pytest.raises(InputError, match=f"checkpoint_copies={copies} is written by another process"):
            write(last)
    assert (copies / "last.ckpt").read_bytes() == kept and "500" in (copies / run.name).read_text()


def test_a_kill_while_checkpoints_are_copied_loses_none(tmp_path, save, monkeypatch):
    run, copies = tmp_path / "run", save(tmp_path / "copies/last.ckpt", 500).parent
    save(copies / "best-step400.ckpt", 400)
    (run / "checkpoints").mkdir(parents=True)
    download, copied = resume._download, list[str]()

    def killed_after_one(bucket: Storage, name: str, path: Path) -> None:
        if copied:
            raise KeyboardInterrupt
        copied.append(name)
        download(bucket, name, path)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(resume, "_download", killed_after_one)
        RunCheckpoints(run, str(copies)).resume_from("auto")
    assert copied == ["last.ckpt"]
    assert read_step(RunCheckpoints(run, str(copies)).resume_from("auto")) == 500
    assert read_step(str(run / "checkpoints/best-step400.ckpt")) == 400


@pytest.mark.slow
def test_a_run_elsewhere_continues_from_copies_in_a_bucket(tmp_path):
    store = write_store(tmp_path / "store", random_samples(60))

    def train(run: str, *overrides: str) -> dict[str, Any]:
        finished(
            "train", f"data.path={store}", f"hydra.run.dir={tmp_path}/{run}", "trainer=cpu", "data.pack_tokens=48",
            "model.draft_vocab_size=16", "ttt_steps=3", "callbacks.early_stopping=null", "callbacks.curves=null",
            *overrides,
        )  # fmt: skip
        return torch.load(tmp_path / run / "checkpoints/last.ckpt", weights_only=True)

    with running_store():
        copies = f"checkpoint_copies={new_folder()}"
        first = train("first", "trainer.max_epochs=1", copies, "ckpt_path=auto")  # begins: nothing is there
        bucket = open_folder(copies.partition("=")[2], setting="test")
        here = {path.name: path.read_bytes() for path in (tmp_path / "first/checkpoints").iterdir()}
        assert {name: bytes(bucket.read(name)) for name in bucket.names("*.ckpt")} == here and len(here) == 2
        second = train("second", "trainer.max_epochs=2", copies, "ckpt_path=auto")
        assert {path.name for path in (tmp_path / "second/checkpoints").iterdir()} == {*bucket.names("*.ckpt")}
    assert second["global_step"] == 2 * first["global_step"] and second["epoch"] == 2
