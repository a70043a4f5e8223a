"""The entry scripts as a user meets them: the commands of the README in order, then what goes wrong on the way."""

import errno
import json
import math
import os
import re
import shlex
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import wandb
from hydra.errors import ConfigCompositionException
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, StochasticWeightAveraging
from object_stores import http_server, send
from omegaconf import OmegaConf
from scripts import call_script, composed, finished, run_script, start_script
from stores import ASSETS, CONF, ROOT

from eagle3 import cli, messages
from eagle3.commands.serve import DO
from eagle3.errors import InputError
from eagle3.features.index import index_name
from eagle3.features.loss_mask import AllTurns
from eagle3.features.store import FeatureStore
from eagle3.head.divergence import PlainDivergence
from eagle3.hydra_run import job_name
from eagle3.messages import message_for_user, wrong_override
from eagle3.settings.nearest import did_you_mean
from eagle3.settings.serving import ACTIONS
from eagle3.storage.files import read_jsonl, sha256_file
from eagle3.storage.folder import LocalFolder
from eagle3.storage.records import read_sealed_json
from eagle3.training import module

TINY, PROMPTS = ASSETS / "tiny", ASSETS / "prompts" / "train.jsonl"
SHORT = ("max_new_tokens=16", "limit=2")  # of serve.py
COMPARE = ["action=compare", f"prompts.path={PROMPTS}"]
Call = Callable[..., Any]
Fails = Callable[..., str]
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*GPU available but not used.*",
    "ignore:.*treespec, LeafSpec.*",
    "ignore:.*smaller than the logging interval.*",
    "ignore:Checkpoint directory.*",
    "ignore:The dirpath has changed.*",  # of the copy of a run
)


class World:
    """What the commands left: DIR with prompts, answers and features, a run, an exported head."""

    def __init__(self, root: Path) -> None:
        self.root, self.out_dir, self.store = root, root / "dir", root / "dir" / "features"
        self.run, self.head = root / "run", root / "head"
        self.said: dict[str, list[str]] = {}  # by script, the lines of its log
        self.precompute = (
            f"target.path={TINY}", f"prompts.path={root}/prompts.jsonl", f"out_dir={root}/dir",
            "prompts/privacy=patterns", "sampling.max_new_tokens=24", "features.shard_mb=1",
        )  # fmt: skip

    def count_answered_once(self, folder: Path) -> int:
        """Count the answers in `folder`, which must have one row for each prompt."""
        rows = Counter(row["prompt_id"] for row in read_jsonl(folder / "answers" / "answers.jsonl"))
        assert rows == Counter(row["id"] for row in read_jsonl(self.out_dir / "prompts" / "prompts.jsonl"))
        return len(rows)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    root = tmp_path_factory.mktemp("cli")
    lines = PROMPTS.read_text().splitlines(keepends=True)[:30]
    (root / "prompts.jsonl").write_text("".join(lines))
    made = World(root)
    training = (f"data.path={made.store}", "data.val_fraction=0.2", "trainer.max_epochs=2")
    for script, arguments in (
        ("precompute", made.precompute),
        ("train", (*training, f"hydra.run.dir={made.run}")),
        ("serve", ("action=export", f"run={made.run}", f"head={made.head}", "check.min_accept_length=1.0", *SHORT)),
    ):  # fmt: skip
        made.said[script] = finished(script, *arguments).stderr.splitlines()
    return made


@pytest.fixture
def call(tmp_path: Path) -> Call:
    """Run an entry script's task in this process; a training without a picture, which takes longer than its steps."""

    def run(script: str, *overrides: str) -> Any:
        overrides += ("callbacks.curves=null",) if script == "train" else ()
        given = [Path(item.partition("=")[2]) for item in overrides if item.startswith("hydra.run.dir=")]
        return call_script(script, *overrides, output_dir=given[0] if given else tmp_path / "run")

    return run


@pytest.fixture
def fails(call: Call, error_line: Callable[..., str]) -> Fails:
    """Run a task that must end with an error; returns its line."""
    return lambda script, *overrides: error_line(call, script, *overrides)


def hashes(folder: Path) -> dict[str, str]:
    files = [path for path in folder.rglob("*") if path.is_file() and "logs" not in path.parts]
    return {str(path.relative_to(folder)): sha256_file(path) for path in files}


# --- the way through -------------------------------------------------------------------------------------------------


def test_the_commands_leave_what_they_promise(world):
    for path in (
        "dir/prompts/prompts.jsonl", "dir/answers/answers.jsonl", "dir/features/manifest.json",
        "run/checkpoints/last.ckpt", "run/metrics.csv", "run/result.json",
        "head/config.json", "head/model.safetensors", "head/training.json", "head/README.md",
    ):  # fmt: skip
        assert (world.root / path).is_file(), path
    card = (world.head / "README.md").read_text()  # with the prompts' licences, as ledger.json counts them
    assert "license: other" in card and "| CC-BY-4.0 |" in card and str(world.root) not in card
    trained = json.loads((world.head / "training.json").read_text())["origin"]["tokens_of_99_percent"]
    assert trained in FeatureStore(LocalFolder(world.store)).samples.tokens
    shared = {(world.store / name).stat().st_mode for name in ("manifest.json", "target.safetensors")}
    assert len(shared) == 1, "whoever may read the manifest may train"


def test_the_last_line_says_what_was_written_how_long_it_took_and_the_next_command(world):
    following = {
        "precompute": f"{world.store}: N; next: python train.py data.path={world.store} hydra.run.dir=RUN",
        "train": f"{world.run}: N; next: python serve.py action=export run={world.run} head=HEAD",
        "serve": f"{world.head}: N; next: python serve.py action=decode target.path=TARGET head={world.head} "
        "prompts.path=FILE.jsonl",
    }
    for script, line in following.items():
        assert re.sub(r"(?<=: )[\d.]+ (s|min)(?=;)", "N", world.said[script][-1]) == line


def test_a_log_line_of_validation_has_the_loss(world):
    losses = [line for line in world.said["train"] if re.search(r"step \d+: val/loss [\d.]+, val/accept_length", line)]
    assert losses


def test_a_second_precompute_changes_nothing(world, call):
    before = hashes(world.out_dir)
    call("precompute", *world.precompute)
    assert hashes(world.out_dir) == before


def test_one_stage_runs_alone_from_what_the_folder_holds(world, call, tmp_path):
    shutil.copytree(world.out_dir / "answers", tmp_path / "dir" / "answers")
    call("precompute", f"target.path={TINY}", f"out_dir={tmp_path}/dir", "stages=[features]", "features.shard_mb=1")
    again, first = (FeatureStore(LocalFolder(path)) for path in (tmp_path / "dir" / "features", world.store))
    assert again.fingerprint == first.fingerprint  # every byte of every shard


def test_a_run_is_resumed_in_its_folder(world, call, tmp_path, caplog, monkeypatch):
    run = shutil.copytree(world.run, tmp_path / "run")
    reads, load = [], torch.load
    monkeypatch.setattr(torch, "load", lambda *arguments, **options: reads.append(1) or load(*arguments, **options))
    resume = (
        "train", f"data.path={world.store}", "data.val_fraction=0.2", f"hydra.run.dir={run}", "trainer.max_epochs=3",
        f"ckpt_path={run}/checkpoints/last.ckpt",
    )  # fmt: skip
    call(*resume)
    assert len(reads) == 1
    assert "nothing was trained" not in caplog.text
    assert json.loads((run / "result.json").read_text())["epochs"] == 3
    epochs = [line.split(",")[0] for line in (run / "metrics.csv").read_text().splitlines()[1:]]
    assert set(epochs) == {"0", "1", "2"}
    call(*resume)
    assert "max_steps, max_time or callbacks.early_stopping: nothing was trained" in caplog.text


def test_fewer_epochs_than_a_checkpoint_has_are_one_line_and_cost_a_finished_run_nothing(world, fails, tmp_path):
    run = shutil.copytree(world.run, tmp_path / "run")
    before = hashes(run / "checkpoints"), (run / "result.json").read_bytes()
    resume = (f"hydra.run.dir={run}", f"ckpt_path={run}/checkpoints/last.ckpt", "trainer.max_epochs=1")
    line = fails("train", f"data.path={world.store}", "data.val_fraction=0.2", *resume)
    assert f"trainer.max_epochs=1 is less than the 2 epochs of ckpt_path={run}/checkpoints/last.ckpt; give" in line
    assert (hashes(run / "checkpoints"), (run / "result.json").read_bytes()) == before


def test_every_action_has_a_config_a_schema_and_a_function():
    options = {path.stem for path in (CONF / "action").glob("*.yaml")}
    assert options == set(ACTIONS) == set(DO)


@pytest.mark.parametrize(
    ("action", "key", "meant"),
    [
        ("export", "bench.repeats", ""),
        ("compare", "temperature", " (did you mean compare.samplings?)"),
        ("tune", "steps", " (did you mean tune.steps?)"),
    ],
)
def test_a_key_without_effect_on_an_action_is_not_one_of_its_keys(monkeypatch, action, key, meant):
    monkeypatch.setattr(sys, "argv", ["serve.py", f"action={action}", f"{key}=1"])
    with pytest.raises(ConfigCompositionException) as refused:
        composed("serve", f"action={action}", f"{key}=1")
    assert wrong_override(refused.value).startswith(f"{key} is not a key of action={action}{meant}")


def test_an_action_that_is_not_named_is_one_line(call, fails):
    assert fails("serve").startswith("error: action is not set; take one of action=export, action=check")


def test_a_launch_warns_of_keys_that_load_the_target_here(fails, caplog):
    fails("serve", "action=launch", "target.dtype=float32", "target.path=/nowhere")
    assert "target.dtype has no effect on action=launch" in caplog.text


@pytest.mark.parametrize(
    ("overrides", "unread"),
    [
        (["stages=[features]", "sampling.temperature=0", "chat=default", "features.shard_mb=1"],
         ["sampling.temperature", "chat"]),
        (["stages=[answers]", "answers=imported", "sampling.seed=3", "sampling.max_prompt_tokens=9",
          "prompts.limit=3"], ["sampling.seed", "prompts.limit"]),
        (["stages=[prompts]", "prompts.path=/nowhere", "prompts/privacy=patterns", "features.shard_mb=1"],
         ["features.shard_mb"]),
    ],
)  # fmt: skip
def test_precompute_names_the_keys_without_effect_on_its_stages(fails, tmp_path, caplog, overrides, unread):
    fails("precompute", f"out_dir={tmp_path}", *overrides)
    named = [record.getMessage() for record in caplog.records if "has no effect on stages=" in record.getMessage()]
    assert [message.split()[0] for message in named] == unread


@pytest.mark.parametrize(("mode", "of", "score"), [("max", "accept_length", 0.0), ("min", "loss", math.inf)])
def test_a_failed_job_of_a_sweep_is_worse_than_any_other_and_ends_no_study(call, capsys, mode, of, score):
    """Optuna refuses nan, and ends with what raises."""
    settings = ("hydra.mode=MULTIRUN", f"callbacks.best.mode={mode}", f"callbacks.best.monitor=val/{of}")
    assert call("train", "data.path=/nowhere", *settings) == score
    assert "error: /nowhere/manifest.json does not exist" in capsys.readouterr().err


def test_two_samples_and_more_steps_than_an_answer_has_tokens_train(world, call):
    settings = (f"data.path={world.store}", "data.limit_samples=2", "ttt_steps=64", "trainer.max_epochs=1")
    settings += ("trainer.accumulate_grad_batches=8", "trainer.enable_progress_bar=false", "callbacks.progress=null")
    assert call("train", *settings) >= 1


def test_compare_prints_a_table_and_leaves_it_as_sealed_json(world, call, capsys, tmp_path, monkeypatch):
    tracked: list[Any] = []
    monkeypatch.setattr("eagle3.commands.serve.track", lambda *given: tracked.append(given))
    other = shutil.copytree(world.head, tmp_path / "other")
    capsys.readouterr()
    call(
        "serve", "action=compare", f"target.path={TINY}", f"heads=[{world.head},{other}]",
        f"prompts.path={world.root}/prompts.jsonl", "max_new_tokens=16", "limit=4", "logger=wandb",
    )  # fmt: skip
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("4 prompts of 4 conversations (prompts.path=")
    assert lines[5].endswith("| +0.000 | +0.000 to +0.000 | 0.000 |")  # the same head once more
    found = read_sealed_json(tmp_path / "run" / "compare.json", made_by="")
    assert found["prompts"] == 4 and {"commit", "command", "machine", "versions"} <= found.keys()
    [([logger], _, rows)] = tracked
    assert rows == found["rows"] and logger._wandb_init["job_type"] == "compare"


# --- what a user can get wrong ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_what_fails_before_the_task_is_one_line_too(tmp_path):
    (tmp_path / "file").touch()
    overrides = ("optim.bogus=1", f"hydra.run.dir={tmp_path}/file/run")
    messages = ("error: optim.bogus is not a key of this config", f"error: {tmp_path}/file")
    for override, message in zip(overrides, messages, strict=True):
        done = run_script("train", override)
        assert done.returncode == 1
        assert [line.startswith(message) for line in done.stderr.splitlines()] == [True], done.stderr
    log = tmp_path / "logs/precompute.log"
    log.mkdir(parents=True)
    done = run_script("precompute", f"out_dir={tmp_path}", "target.path=TARGET", "stages=[answers]")
    assert done.returncode == 1 and done.stderr.startswith(f"error: {log}: Is a directory; give a path"), done.stderr


FULL_DISK = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "RUN/last.ckpt")


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (OSError(errno.EACCES, "Permission denied", "DIR/file"), "DIR/file: Permission denied; give a path"),
        (OSError(errno.EIO, "Input error", "DIR/file"), "DIR/file: Input error; the file system"),
        (FULL_DISK, "no space left on the disk of RUN/last.ckpt; make room"),
        (FULL_DISK, "train.py with ckpt_path=auto"),  # the same command alone refuses its own checkpoints
        (torch.OutOfMemoryError("CUDA out of memory.\nTried to"), "(CUDA out of memory.); take smaller packs"),
        (wandb.errors.UsageError("Invalid project name 'a/b'"), "correct it in logger.wandb.* or in W&B's variable"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), "take smaller packs"),
    ],
)
def test_an_error_of_the_machine_is_one_line(error, advice):
    line = message_for_user(error)
    assert line is not None and advice in line and "\n" not in line


def one_argument(logits: torch.Tensor) -> torch.Tensor:
    return logits @ torch.ones(9)


def failure_message(call: Callable[[], Any]) -> str | None:
    with pytest.raises((TypeError, RuntimeError, AttributeError)) as raised:
        call()
    return message_for_user(raised.value)


def test_an_exception_of_the_users_own_code_is_one_line_with_its_place_and_a_fault_of_ours_none():
    two = torch.zeros(2)
    by_a_library, ours = failure_message(lambda: one_argument(two)), failure_message(lambda: did_you_mean(None, [None]))  # type: ignore
    own = PlainDivergence(function=f"{__name__}.one_argument")
    wrong_signature = failure_message(lambda: own.value(two, two, two))
    assert by_a_library is not None and wrong_signature is not None and ours is None
    place = f"{__file__} line {one_argument.__code__.co_firstlineno + 1}, in one_argument: RuntimeError: "
    assert by_a_library.startswith(place) and "hydra.verbose=true" in by_a_library
    assert wrong_signature.startswith(f"{__file__}: TypeError: one_argument() takes 1 positional argument but 2 were")


def test_a_library_on_pythonpath_is_no_code_of_the_users_own(tmp_path, monkeypatch):
    (tmp_path / "packed.py").write_text("def fail():\n    raise RuntimeError('of the library')\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert (line := failure_message(lambda: import_module("packed").fail())) and "packed.py line 2, in fail" in line
    for name in ("packed-1.0.dist-info", "other-1.0.dist-info"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name[:-14]}\nVersion: 1.0\n")
    messages._library_folders.cache_clear()
    line = failure_message(lambda: import_module("packed").fail())
    assert line and "packed.py" not in line  # this test calls it
    messages._library_folders.cache_clear()


class RefusesItself(AllTurns):
    def __init__(self) -> None:
        raise InputError("loss_mask refuses itself")


LIGHTNING = "lightning.pytorch.callbacks"
NEEDS_A_NUMBER = f"{{_target_: {__name__}.NeedsANumber}}"


class NeedsANumber(Callback):
    def __init__(self, *, number: int) -> None: ...


class OwnAverages(StochasticWeightAveraging):
    def __init__(self) -> None:
        super().__init__(swa_lrs=1e-3)


@pytest.mark.parametrize(
    ("override", "line"),
    [
        (f"loss_mask._target_={__name__}.RefusesItself", "error: loss_mask refuses itself"),
        (f"+callbacks.mine={NEEDS_A_NUMBER}",
         f"error: callbacks.mine._target_={__name__}.NeedsANumber cannot be built (missing a required argument"),
        (f"+callbacks.mine={{_target_: {__name__}.World, root: x}}",
         f"error: callbacks.mine._target_={__name__}.World must be derived from lightning.pytorch.callbacks"),
        (f"+callbacks.mine={{_target_: {LIGHTNING}.GradientAccumulationScheduler, scheduling: {{4: 2}}}}",
         f"error: callbacks.mine._target_={LIGHTNING}.GradientAccumulationScheduler changes the number of steps"),
        (f"+callbacks.mine={{_target_: {LIGHTNING}.LearningRateFinder}}",
         f"error: callbacks.mine._target_={LIGHTNING}.LearningRateFinder sets one rate"),
        (f"+callbacks.mine={{_target_: {__name__}.OwnAverages}}",
         f"error: callbacks.mine._target_={__name__}.OwnAverages replaces the learning rate's schedule"),
        (f"+callbacks.mine={{_target_: {LIGHTNING}.TQDMProgressBar}}",
         "error: callbacks.mine is a second progress bar; leave it out, or set callbacks.progress=null"),
    ],
)  # fmt: skip
def test_classes_that_the_user_names_are_built_before_a_store_is_read(fails, override, line):
    assert fails("train", "data.path=NOWHERE", override).startswith(line)


def test_a_key_that_refers_to_a_group_without_keys_is_one_line(fails):
    line = fails("train", "data.path=NOWHERE", "callbacks.best=null")
    assert "callbacks.early_stopping.monitor is callbacks.best.monitor, but callbacks.best has no keys; give" in line


def test_ctrl_c_before_the_first_step_is_one_line(world, call, capsys, monkeypatch):
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(FeatureStore, "verify", interrupted)
    with pytest.raises(SystemExit) as ended:
        call("train", f"data.path={world.store}", "data.val_fraction=0.2")
    assert ended.value.code == 130
    assert capsys.readouterr().err.splitlines()[-1] == "error: interrupted"


@pytest.mark.parametrize(
    ("wrong", "line"),
    [
        (["trainer.max_steps=1"], r"validation would be after pack \d+, and the training ends after pack 1: no best"),
        (["trainer.max_epochs=1", "+trainer.check_val_every_n_epoch=3"], "no best checkpoint; set it lower, or train"),
        (["trainer.val_check_interval=1000"], r"trainer\.val_check_interval=1000 is more than the \d+ packs of a rank"),
        (["trainer.max_time='00:00:00:00'"], r"ended at step 0, before the first .*max_steps, max_time\) or set"),
        (  # it needs a key that this training does not have
            [f"+callbacks.size={{_target_:{LIGHTNING}.BatchSizeFinder}}"],
            r"trainer\.\* or a callback does not fit this training: Field",
        ),
        (
            [f"+callbacks.frozen={{_target_:{LIGHTNING}.BackboneFinetuning}}"],
            r"callback lightning\S+BackboneFinetuning: AttributeError: .* no attribute 'backbone'; correct its keys",
        ),
        (["+trainer.limit_val_batches=0.01"], r"trainer\.\* leaves no batch: .*Try at least `limit_val_batches="),
    ],
)
@pytest.mark.filterwarnings("ignore:.*could not find the monitored key.*")
def test_a_training_without_a_validation_is_named(wrong, line, world, fails, caplog):
    message = fails("train", f"data.path={world.store}", "data.pack_tokens=512", "ttt_steps=1", *wrong)
    assert re.search(line, caplog.text + message)


@pytest.mark.parametrize(
    ("override", "name"),
    [
        ("callbacks.progress=null", "_should_skip_saving_checkpoint"),
        (f"+callbacks.more={{_target_:{LIGHTNING}.ModelCheckpoint,every_n_train_steps:1}}", "asdict"),
    ],
)
def test_an_error_of_ours_in_a_callback_shows_its_traceback(override, name, world, call, monkeypatch, capsys):
    """Raised in Lightning for a callback of ours, and in our code that a callback of Lightning calls."""
    monkeypatch.setattr(ModelCheckpoint if name.startswith("_") else module, name, math.sqrt)
    with pytest.raises(SystemExit):
        call("train", f"data.path={world.store}", "data.val_fraction=0.2", "ttt_steps=1", override)
    assert capsys.readouterr().err.splitlines()[-1].startswith("TypeError: must be real number")


def test_the_report_of_a_profiler_and_what_a_callback_writes_are_logged(world, call, caplog):
    caplog.set_level("INFO")
    summary = f"+callbacks.summary={{_target_:{LIGHTNING}.ModelSummary}}"
    call(
        "train", f"data.path={world.store}", "ttt_steps=1", "+trainer.fast_dev_run=true", "+trainer.profiler=simple",
        summary,
    )  # fmt: skip
    assert "run_training_epoch" in caplog.text
    assert "Trainable params" in caplog.text


def test_a_config_that_is_not_yaml_is_one_line_with_its_place(tmp_path):
    (tmp_path / "loss").mkdir()
    (tmp_path / "loss" / "cut.yaml").write_text("divergence: [1,\n")
    done = run_script("train", "--config-dir", str(tmp_path), "loss=cut")
    assert done.returncode == 1
    assert re.fullmatch(r"error: a config is not valid YAML: .*loss/cut\.yaml.*line 2.*\n", done.stderr)


def test_an_option_of_ones_own_with_a_name_that_is_taken_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(cli, "own_config_dirs", lambda: [str(tmp_path)])
    for name in ("ours", "lk"):
        (tmp_path / "loss").mkdir(exist_ok=True)
        (tmp_path / "loss" / f"{name}.yaml").write_text("decay: 1\n")
        if name == "ours":
            cli.refuse_taken_names()
    with pytest.raises(InputError, match=r"loss/lk\.yaml is not read: eagle3 has conf/loss/lk\.yaml, which takes prec"):
        cli.refuse_taken_names()


def test_the_option_on_the_page_holds_the_keys_that_every_command_needs(tmp_path):
    page = (ROOT / "docs/start/command-line.md").read_text()
    (tmp_path / "launch").mkdir()
    (tmp_path / "launch" / "ours.yaml").write_text(page.partition("```yaml\n")[2].partition("```")[0])
    done = run_script("precompute", "--config-dir", str(tmp_path), "launch=ours", "out_dir=other", "--cfg", "job")
    config = OmegaConf.create(done.stdout)
    assert (config.target.path, config.launch.python) == ("/models/ours", "/opt/sglang/bin/python")
    assert config.out_dir == "other" and config.launch.max_running_requests == 512


def test_a_training_without_an_account_of_wandb_is_one_line(world, fails, monkeypatch, tmp_path):
    wandb.teardown()  # a test before this one in the same process may have set it up as offline
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("HOME", str(tmp_path))  # no ~/.netrc
    try:
        assert "logger.wandb.offline=true" in fails("train", f"data.path={world.store}", "logger=wandb")
    finally:
        wandb.teardown()


@pytest.mark.slow
def test_a_sweep_over_ranks_has_a_result_of_each_job_that_can_run(world, tmp_path):
    sweep = (
        "-m", f"data.path={world.store}", "data.val_fraction=0.2", "trainer=auto", "trainer.accelerator=cpu",
        "trainer.precision=32-true", "trainer.devices=2", "trainer.max_steps=2", "trainer.val_check_interval=1",
        "callbacks.curves=null", "ttt_steps=2", "optim.lr=-1,1e-4", f"hydra.sweep.dir={tmp_path}/sweep",
    )  # fmt: skip
    one_task = {"SLURM_NTASKS": "1", "SLURM_NTASKS_PER_NODE": "1", "SLURM_JOB_NAME": "sweep", "SLURM_PROCID": "0"}
    done = run_script("train", *sweep, env=one_task)  # as a launcher's job, whose ranks Lightning would leave to srun
    assert done.returncode == 1  # of the job with a negative rate
    table = done.stdout[done.stdout.index("rank  val/served_accept_length_2") :].splitlines()[1:]
    assert [line.split()[-1] for line in table] == ["optim.lr=0.0001", "optim.lr=-1"], table
    assert (tmp_path / "sweep" / "1" / "checkpoints" / "last.ckpt").is_file()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["target.path=/nowhere"], "target.path=/nowhere does not exist; give"),
        (["prompts.path=/nowhere.jsonl"], "prompts.path=/nowhere.jsonl does not exist; name"),
        (["stages=[responses]"], "(did you mean answers?); the default is stages=[prompts, answers, features]"),
        (["features.max_length=64"], "max_length=4096 then, 64 now); choose another out_dir"),
    ],
)
def test_precompute_names_the_key_and_loses_nothing(world, fails, overrides, message):
    before = hashes(world.out_dir)
    assert message in fails("precompute", *world.precompute, *overrides)
    assert hashes(world.out_dir) == before


@pytest.mark.parametrize("override", ["target.path=null", "features.dtype=int8"])
def test_what_later_stages_lack_is_said_before_the_prompts_are_read(world, fails, tmp_path, override):
    assert override.partition("=")[0] in fails("precompute", *world.precompute, f"out_dir={tmp_path}/dir", override)
    assert not (tmp_path / "dir").exists()


@pytest.mark.parametrize(("path", "said"), [("/nowhere.ckpt", "does not exist"), (__file__, "is damaged")])
def test_train_names_the_key(world, fails, path, said):
    line = fails("train", f"data.path={world.store}", f"ckpt_path={path}")
    assert f"ckpt_path={path}" in line and f"{path} {said}" in line


@pytest.mark.slow
def test_prompts_answered_twice_train_as_one_store_and_their_validation_prompts_are_found_again(world, call, tmp_path):
    shutil.copytree(world.out_dir / "prompts", tmp_path / "dir" / "prompts")
    call("precompute", *world.precompute, f"out_dir={tmp_path}/dir", "sampling.seed=1", "sampling.temperature=1.0")
    stores, head = [str(world.store), f"{tmp_path}/dir/features"], tmp_path / "head"
    call(
        "train", f"data.path=[{','.join(stores)}]", f"hydra.run.dir={tmp_path}/run", "data.val_fraction=0.2",
        "trainer.max_epochs=1", "ttt_steps=1",
    )  # fmt: skip
    call("serve", "action=export", f"run={tmp_path}/run", f"head={head}", "check.min_accept_length=1.0", *SHORT)
    training = json.loads((head / "training.json").read_text())
    assert [os.path.normpath(head / path) for path in training["origin"]["path"]] == stores
    assert training["accept_length"]["prompts_from"] == f"validation prompts of [{','.join(stores)}]"


@pytest.mark.parametrize("name", ["shard-000000-*.tar", "target.safetensors", "manifest.json"])
def test_a_damaged_store_is_refused_and_the_advice_repairs_it(world, fails, call, tmp_path, name):
    shutil.copytree(world.out_dir, tmp_path / "dir")
    [path] = (tmp_path / "dir" / "features").glob(name)
    content = path.read_bytes()
    middle = len(content) // 2
    path.write_bytes(content[:middle] + b"?" + content[middle + 1 :])
    settings = (f"data.path={tmp_path}/dir/features", "data.limit_samples=6", "trainer.max_epochs=1", "ttt_steps=1")
    assert path.name in fails("train", *settings)
    if path.name != "target.safetensors":  # which is replaced even if it is not deleted
        path.unlink()
    if path.suffix == ".tar":
        path.with_name(index_name(path.name)).unlink()
    call("precompute", f"target.path={TINY}", f"out_dir={tmp_path}/dir", "stages=[features]", "features.shard_mb=1")
    assert path.name != "target.safetensors" or path.read_bytes() == content
    call("train", *settings)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["action=export", "run=/nowhere"], "run=/nowhere: /nowhere/checkpoints/last.ckpt does not exist"),
        (["action=export", f"checkpoint={__file__}"], f"{__file__} is damaged, or not a checkpoint"),
        (["action=show", "prompts.path=/nowhere.jsonl"], "prompts.path=/nowhere.jsonl does not exist"),
        (["action=show"], "prompts.path is not set; give prompts.path=VALUE"),
        (COMPARE, "heads is not set; give heads=[A,B], folders of exported h"),
        ([*COMPARE, "heads=[A]", "sweep=B"], "heads is set, and sweep=B too; give"),
        ([*COMPARE, "heads=[A]", "logger=csv"], "logger=csv: only W&B takes this"),
        (
            [*COMPARE, "heads=[A]", "logger=wandb", "logger.wandb.artifacts=true"],
            "logger.wandb.artifacts=true is for ch",
        ),
        ([*COMPARE, "heads=[/nowhere]"], "/nowhere/config.json does not exist; m"),
        (["action=bench"], "head is not set; give the folder of an exported head, made by: python serve.py"),
    ],
)
def test_serve_names_the_key(world, fails, overrides, message):
    head = () if overrides[0] in ("action=compare", "action=bench") else (f"head={world.head}",)
    assert message in fails("serve", f"target.path={TINY}", *head, *overrides)


# --- stopped on the way ----------------------------------------------------------------------------------------------


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """From now on, what is written to files whose name contains a text does not reach the disk."""
    fsync = os.fsync

    def fill(name: str) -> None:
        def fail(descriptor: int) -> None:
            if name in os.readlink(f"/proc/self/fd/{descriptor}"):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            fsync(descriptor)

        monkeypatch.setattr(os, "fsync", fail)

    return fill


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's /dev/full")
def test_a_log_on_a_full_disk_is_no_traceback(tmp_path):
    words = ("stages=[features]", f"target.path={ASSETS}/tiny", f"out_dir={tmp_path}/dir", "features=huggingface")
    done = run_script("precompute", *words, "sampling.seed=1", "hydra.job_logging.handlers.file.filename=/dev/full")
    assert "sampling.seed has no effect" in done.stderr and "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith(f"error: {tmp_path}/dir/answers/manifest.json does not exist")


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="finds out by Linux's /proc which file is written")
@pytest.mark.parametrize(
    ("name", "said"), [("answers.jsonl", "cannot be written (No space"), ("shard-000001-", "make room")]
)
def test_a_full_disk_keeps_what_was_written_and_the_same_command_continues(
    world, fails, call, full_disk, tmp_path, name, said
):
    settings = (*world.precompute, f"out_dir={tmp_path}/dir", "answers=huggingface", "answers.window=16")
    full_disk(name)
    line = fails("precompute", *settings)
    assert name in line and said in line
    assert not (tmp_path / "dir" / "features" / "manifest.json").exists()
    full_disk("no file has this name")
    call("precompute", *settings)
    world.count_answered_once(tmp_path / "dir")
    assert not list(tmp_path.rglob("*.tmp"))


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="finds out by Linux's /proc which file is written")
def test_a_full_disk_leaves_the_last_checkpoint_and_the_exported_head_whole(world, fails, full_disk, tmp_path):
    run, head = shutil.copytree(world.run, tmp_path / "run"), shutil.copytree(world.head, tmp_path / "head")
    last = run / "checkpoints" / "last.ckpt"
    before = sha256_file(last), hashes(head)
    full_disk("last.ckpt")
    resume = (f"hydra.run.dir={run}", f"ckpt_path={run}/checkpoints/last.ckpt", "trainer.max_epochs=3")
    saves = ("callbacks.last.every_n_steps=1", "callbacks.last.min_seconds=0")
    line = fails("train", f"data.path={world.store}", "data.val_fraction=0.2", *saves, *resume)
    assert f"no space left on the disk of {run}/checkpoints/last.ckpt" in line
    full_disk("model.safetensors")
    assert "no space left on the disk" in fails("serve", "action=export", f"run={world.run}", f"head={head}")
    assert (sha256_file(last), hashes(head)) == before


@pytest.mark.slow
def test_a_stopped_precompute_continues_where_it_was(world, tmp_path):
    """tests/test_kills.py stops features."""
    settings = (
        *world.precompute, f"out_dir={tmp_path}/dir", "answers=huggingface", "answers.window=4", "answers.batch_size=4",
    )  # fmt: skip
    path = tmp_path / "dir" / "answers" / "answers.jsonl"
    process = start_script("precompute", *settings, log=tmp_path / "log")
    while not (path.exists() and path.stat().st_size):
        assert process.poll() is None
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait() == 130
    error = (tmp_path / "log").read_text()
    assert error.splitlines()[-1].startswith("error: interrupted; what was finished is kept")
    finished("precompute", *settings)
    samples = json.loads((tmp_path / "dir" / "features" / "manifest.json").read_text())["samples"]
    assert samples == world.count_answered_once(tmp_path / "dir")


@pytest.mark.slow
def test_a_stopped_training_says_how_to_go_on(world, tmp_path):
    settings = (f"data.path={world.store}", "data.val_fraction=0.2", f"hydra.run.dir={tmp_path}")
    settings += ("callbacks.curves=null",)
    process = start_script("train", *settings, "trainer.max_epochs=99", log=tmp_path / "log")
    while not list(tmp_path.glob("checkpoints/best-*.ckpt")):
        assert process.poll() is None
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait() == 130
    error = (tmp_path / "log").read_text()
    said, _, command = error.splitlines()[-1].partition(" resume with: ")
    assert said == "error: stopped by a signal;"
    done = finished("train", *shlex.split(command)[2:], "trainer.max_epochs=3")  # the last of two values counts
    [steps] = re.findall(r"resumed at step (\d+) of (\d+)", done.stderr)
    assert int(steps[0]) > 0 and int(steps[1]) == read_sealed_json(tmp_path / "result.json", made_by="")["steps"]


SECRET = "hunter2-0123456789abcdef"


@pytest.mark.slow
def test_no_secret_is_written_printed_or_logged(world, tmp_path):
    """A secret in every key that can hold one, then a look into everything that the commands leave."""

    def answer(request: BaseHTTPRequestHandler) -> None:
        content = b"" if "absent" in request.path else (world.root / "prompts.jsonl").read_bytes()
        send(request, 200 if content else 404, {"Content-Length": str(len(content))}, content)

    said = []
    with http_server(answer) as server:
        place = f"{server.removeprefix('http://')}/prompts.jsonl"
        for number, url in enumerate((f"http://me:{SECRET}@{place}", f"http://{place}?X-Amz-Signature={SECRET}&X=1")):
            settings = ("prompts/privacy=patterns", f"out_dir={tmp_path}/{number}", "stages=[prompts]")
            settings += (f"hydra.run.dir={tmp_path}/run{number}", f"prompts.path='{url}'")
            said.append(finished("precompute", *settings))
        said.append(run_script("precompute", *settings[:-1], f"prompts.path='{url.replace('prompts.', 'absent.')}'"))
        assert said[-1].returncode == 1
    launch = ("action=launch", "dry_run=true", f"target.path={TINY}", f"hydra.run.dir={tmp_path}/launch")
    for env in (f"launch.env={{HF_TOKEN: {SECRET}, OTHER: x}}", f"+launch.env.HF_TOKEN={SECRET}"):
        said.append(finished("serve", *launch, env))
        assert 'HF_TOKEN="$HF_TOKEN"' in said[-1].stdout
    for done in said:
        assert SECRET not in done.stdout and SECRET not in done.stderr, done
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    names = {path.name for path in written}
    assert {"ledger.json", "report.md", "overrides.yaml", "config.yaml", "hydra.yaml"} <= names
    assert [path for path in written if SECRET.encode() in path.read_bytes()] == []


@pytest.mark.parametrize(
    ("environment", "name"),
    [
        ({}, None),
        ({"SLURM_STEP_NUM_TASKS": "1", "SLURM_JOB_ID": "7"}, None),  # one process in a job: a run each
        ({"SLURM_NTASKS": "16"}, None),  # in a shell or script of a job, without srun
        ({"SLURM_STEP_NUM_TASKS": "16", "SLURM_JOB_ID": "7"}, "slurm-7"),
        ({"TORCHELASTIC_RUN_ID": "first"}, "torchrun-first"),
    ],
)
def test_ranks_of_a_launcher_go_by_its_job(environment, name, monkeypatch):
    for key in ("SLURM_NTASKS", "SLURM_STEP_NUM_TASKS", "SLURM_JOB_ID", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(key, raising=False)
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    assert job_name() == name
