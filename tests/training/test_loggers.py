"""Loggers: metrics.csv across a resume, W&B offline with config, git revision and store."""

import csv
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import wandb
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf, open_dict, read_write
from pydantic import ValidationError
from scripts import composed, finished
from training_runs import LIGHTNING_WARNS, SHORT, Run, sweep

from eagle3.commands.train import build_loggers
from eagle3.errors import InputError
from eagle3.messages import message_for_user
from eagle3.settings.flat import searchable
from eagle3.settings.parts import plain
from eagle3.training.loggers import EXTRAS, MetricsCSV, WandbRun, log_settings
from eagle3.training.sweep import ranked_table


def rows(directory: Path) -> list[dict[str, str]]:
    return list(csv.DictReader((directory / "metrics.csv").read_text().splitlines()))


def log(directory: Path, steps: range, value: float, resume_step: int = 0) -> None:
    logger = MetricsCSV(run_dir=str(directory), resume_step=resume_step, flush_every_n_steps=1)
    for step in steps:
        logger.log_metrics({"loss": value}, step)
    logger.finalize("success")


def test_a_resume_keeps_rows_before_its_step_and_replaces_the_rest(tmp_path):
    log(tmp_path, range(8), 1.0)
    log(tmp_path, range(5, 9), 2.0, resume_step=5)
    assert [row["step"] for row in rows(tmp_path)] == [str(step) for step in range(9)]
    assert [float(row["loss"]) for row in rows(tmp_path)] == [1.0] * 5 + [2.0] * 4
    log(tmp_path, range(2), 3.0)  # a new run
    assert [float(row["loss"]) for row in rows(tmp_path)] == [3.0, 3.0]


def test_rows_that_only_the_copies_have_are_in_the_resumed_run(tmp_path):
    first = MetricsCSV(run_dir=str(tmp_path / "a"), copies=str(tmp_path / "copies"), flush_every_n_steps=100)
    for step in range(8):
        first.log_metrics({"loss": 1.0}, step)
    first.copy()
    log(tmp_path / "b", range(3), 1.0)  # the run was continued elsewhere, and comes back to its first folder
    again = MetricsCSV(
        run_dir=str(tmp_path / "b"), copies=str(tmp_path / "copies"), resume_step=5, flush_every_n_steps=10
    )
    again.log_metrics({"loss": 2.0}, 5)
    again.save()
    kept = [(str(step), "1.0") for step in range(5)]
    assert [(row["step"], row["loss"]) for row in rows(tmp_path / "b")] == [*kept, ("5", "2.0")]


def test_a_resumed_run_that_is_killed_before_its_first_flush_keeps_the_rows_before_it(tmp_path):
    log(tmp_path, range(8), 1.0)
    killed = MetricsCSV(run_dir=str(tmp_path), resume_step=5, flush_every_n_steps=100)
    killed.log_metrics({"loss": 2.0, "lr": 3.0}, 5)
    assert [(row["step"], row["loss"]) for row in rows(tmp_path)] == [(str(step), "1.0") for step in range(5)]
    killed.save()
    kept = [(str(step), "") for step in range(5)]
    assert [(row["step"], row["lr"]) for row in rows(tmp_path)] == [*kept, ("5", "3.0")]


def test_a_new_column_leaves_the_file_whole_if_the_disk_is_full(tmp_path, monkeypatch):
    log(tmp_path, range(3), 1.0)
    logger = MetricsCSV(run_dir=str(tmp_path), resume_step=3, flush_every_n_steps=100)
    logger.log_metrics({"loss": 2.0, "lr": 3.0}, 3)
    monkeypatch.setattr(csv.DictWriter, "writerow", raise_full_disk)
    monkeypatch.setattr(csv.DictWriter, "writerows", raise_full_disk)
    with pytest.raises(OSError, match="full"):
        logger.save()
    assert [row["step"] for row in rows(tmp_path)] == ["0", "1", "2"]


def raise_full_disk(*_: Any) -> None:
    raise OSError("the disk is full")


def test_a_last_line_that_a_full_disk_cut_is_left_out(tmp_path):
    log(tmp_path, range(3), 1.0)
    path = tmp_path / "metrics.csv"
    path.write_text(path.read_text().rstrip().rpartition(",")[0])
    log(tmp_path, range(3, 5), 2.0, resume_step=3)
    assert [row["step"] for row in rows(tmp_path)] == ["0", "1", "3", "4"]


@pytest.mark.slow
def test_a_wandb_sweep_has_one_run_a_job_with_config_revision_and_store(tmp_path, store_path):
    folder = tmp_path / "sweep"
    done = sweep(store_path, folder, "logger=wandb", "logger.wandb.offline=true", "optim.lr=1e-4,3e-3")
    assert done.returncode == 0, done.stderr[-2000:]
    table = done.stdout.splitlines()
    assert "val/served_accept_length_2" in table[-3]
    assert "optim.lr=" in table[-2]
    for job, lr in (("0", b"0.0001"), ("1", b"0.003")):
        [record] = (folder / job / "wandb").glob("offline-run-*/*.wandb")
        logged = record.read_bytes().replace(b" ", b"")  # W&B's own format; what it quotes is JSON
        for expected in (
            b"optim.lr", lr, b"git_revision", b"store.made_from.capture_layers", b"[2,4,5]", b"val/accept_length",
            f"sweep-{job}".encode(),
        ):  # fmt: skip
            assert expected in logged, expected
    assert ranked_table(folder).splitlines() == table[-3:]


# --- trackers ---------------------------------------------------------------------------------------------------------

STORE = {"samples": 60, "made_from": {"target": {"name": "/models/tiny", "revision": None}, "capture_layers": [2, 4]}}


@pytest.fixture(params=["MULTIRUN", "RUN"], ids=["in the sweep's process", "in its own"])
def in_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Path:
    """The folder of job 3 of a sweep; jobs on several GPUs have a process of their own."""
    config = composed("train", f"hydra.sweep.dir={tmp_path}/rates", return_hydra_config=True)
    with read_write(config), open_dict(config):
        config.hydra.mode = request.param
    monkeypatch.setattr(HydraConfig.instance(), "cfg", config)
    return tmp_path / "rates" / "3"


def wandb_run(folder: Path, **options: Any) -> WandbRun:
    """Make the logger of a run, with the keys of its config."""
    config = composed("train", "logger=wandb", "data.path=DIR")
    with open_dict(config):
        config.run_dir = str(folder)
    given = plain(OmegaConf.to_container(config.logger.wandb, resolve=True)) | {"offline": True, **options}
    return WandbRun(**{key: value for key, value in given.items() if key != "_target_"})


def test_a_resumed_run_is_the_same_for_wandb_and_another_folder_is_another(tmp_path):
    first, again, other = (wandb_run(tmp_path / name) for name in ("run", "run", "other"))
    assert first._wandb_init["id"] == again._wandb_init["id"] != other._wandb_init["id"]
    assert [first._wandb_init[key] for key in ("name", "resume", "job_type")] == ["run", "allow", "train"]


def test_a_job_of_a_sweep_is_named_after_it_and_grouped_by_it(in_sweep):
    told = wandb_run(in_sweep)._wandb_init
    assert (told["name"], told["group"]) == ("rates-3", "rates")
    assert wandb_run(in_sweep / "seed=1")._wandb_init["name"] == "rates-3/seed=1"
    told = wandb_run(in_sweep, name="mine", group="ours")._wandb_init
    assert (told["name"], told["group"]) == ("mine", "ours")


def test_under_wandb_agent_the_run_is_the_agent_s(in_sweep, monkeypatch):
    monkeypatch.setenv("WANDB_SWEEP_ID", "abc")
    told = wandb_run(in_sweep)._wandb_init
    assert (told["name"], told.get("group"), told["id"]) == (None, None, None)


SET = {
    "WANDB_PROJECT": "theirs", "WANDB_ENTITY": "team", "WANDB_NAME": "second", "WANDB_RUN_GROUP": "ablation",
    "WANDB_JOB_TYPE": "probe", "WANDB_TAGS": "a,b", "WANDB_NOTES": "why", "WANDB_MODE": "offline",
    "WANDB_RUN_ID": "id1", "WANDB_RESUME": "auto",
}  # fmt: skip


def wandb_settings(logger: WandbRun) -> dict[str, Any]:
    """Return what W&B makes of the variables and of what the logger gives it; a run cannot start without a network."""
    settings = wandb.Settings()
    settings.update_from_env_vars(dict(os.environ))
    given = {key: value for key, value in logger._wandb_init.items() if value is not None}
    names = {"name": "run_name", "group": "run_group", "tags": "run_tags", "job_type": "run_job_type",
             "notes": "run_notes", "id": "run_id", "dir": "root_dir"}  # fmt: skip
    settings.update_from_dict({names.get(key, key): value for key, value in given.items()})
    return settings.model_dump()


def test_variables_of_wandb_take_precedence_over_our_defaults(tmp_path, in_sweep, monkeypatch, caplog):
    for name, value in {**SET, "WANDB_DIR": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    told = wandb_settings(wandb_run(in_sweep, offline=None))
    assert [told[key] for key in ("project", "entity", "run_name", "run_group", "run_job_type", "run_notes")] == [
        "theirs", "team", "second", "ablation", "probe", "why",
    ]  # fmt: skip
    assert (*told["run_tags"], told["mode"], told["run_id"], told["resume"]) == ("a", "b", "offline", "id1", "auto")
    assert Path(told["root_dir"]) == tmp_path and not caplog.messages


def test_what_wandb_would_not_take_is_one_line(tmp_path):
    with pytest.raises(
        InputError, match=r"^logger.wandb.mode=disabled is not logger.wandb.offline=True; leave one out$"
    ):
        wandb_run(tmp_path, offline=True, mode="disabled")
    with pytest.raises(ValidationError) as refused:
        wandb.Settings().update_from_env_vars({"WANDB_MODE": "of"})
    line = str(message_for_user(refused.value))
    assert line.startswith("W&B: mode=of: Input should be 'online'") and "the variable WANDB_MODE, or" in line


def test_keys_of_the_user_take_precedence_over_variables_of_wandb_with_a_warning(tmp_path, monkeypatch, caplog):
    for name, value in {**SET, "WANDB_DIR": "/elsewhere"}.items():
        monkeypatch.setenv(name, value)
    keys = {
        "project": "p", "entity": "e", "name": "n", "group": "g", "job_type": "j", "tags": ["t"], "notes": "w",
        "offline": False, "save_dir": str(tmp_path), "id": "id2", "resume": "never",
    }  # fmt: skip
    told = wandb_settings(wandb_run(tmp_path, **keys))
    values = ("project", "entity", "run_name", "run_group", "run_job_type", "run_notes", "mode", "run_id", "resume")
    assert [told[key] for key in values] == ["p", "e", "n", "g", "j", "w", "online", "id2", "never"]
    assert [*told["run_tags"], Path(told["root_dir"])] == ["t", tmp_path]
    assert {message.split()[0].removeprefix("logger.wandb.") for message in caplog.messages} == set(keys)
    assert "logger.wandb.project is set (p) and used, not WANDB_PROJECT=theirs" in caplog.messages
    caplog.clear()
    for name, value in {"WANDB_PROJECT": "", "WANDB_NAME": "n", "WANDB_MODE": "dryrun", "WANDB_TAGS": "a,b"}.items():
        monkeypatch.setenv(name, value)
    for name in ("WANDB_ENTITY", "WANDB_RUN_ID", "WANDB_RESUME", "WANDB_DIR"):
        monkeypatch.delenv(name)
    told = wandb_run(tmp_path, name="n", tags=["a", "b"], offline=True)._wandb_init
    assert (told["project"], told["mode"]) == ("eagle3", "offline") and not caplog.messages  # the same, or nothing


def test_settings_for_trackers_are_flat_and_name_no_place_and_no_secret():
    config = {
        "data": {"path": ["s3://team/a/features", "/disk/of/anna/b/features/"], "pack_tokens": 4096, "weights": None},
        "optim": {"lr": 1e-3, "betas": [0.9, 0.95]},
        "run_dir": "outputs/train/one",
        "logger": {"wandb": {"save_dir": "/disk/x", "api_key": "sk-very-secret"}},
        "model": {"_target_": "eagle3.head.build.build_head", "rope_parameters": {}},
        "callbacks": {"best": {"monitor": "val/accept_length"}},
    }
    flat = searchable(config)
    assert flat["optim.lr"] == 1e-3 and flat["optim.betas"] == [0.9, 0.95]
    assert flat["data.path"] == ["features", "features"]
    assert flat["run_dir"] == "one"
    assert flat["callbacks.best.monitor"] == "val/accept_length"
    assert searchable(STORE, "store.")["store.made_from.target.name"] == "tiny"
    told: dict[str, Any] = {}
    log_settings([SimpleNamespace(log_hyperparams=told.update)], config, STORE, {"torch": "2"})  # type: ignore[list-item]
    assert told["optim.lr"] == 1e-3 and told["store.samples"] == 60
    assert "anna" not in str(told) and "very-secret" not in str(told)


@pytest.mark.parametrize("name", EXTRAS)
def test_a_tracker_that_is_not_installed_is_one_line(name, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    run: Any = SimpleNamespace(checkpoint_copies=None, logger=dict.fromkeys(["csv", name]))
    with pytest.raises(InputError, match=rf"logger={name} needs the package {name}; .*'\.\[{name}\]'"):
        build_loggers(run, 0)


@pytest.mark.slow
def test_a_restart_from_the_copies_continues_the_same_wandb_run_and_curves_with_the_head_as_an_artifact(
    tmp_path, store_path
):
    def train(pod: str, *arguments: str) -> tuple[str, list[int]]:
        """Return the id of the run, and the steps in metrics.csv."""
        folder = tmp_path / pod
        finished("train", f"data.path={store_path}", *SHORT, *options, f"hydra.run.dir={folder}", *arguments)
        name, [record] = (folder / "run_id").read_text(), (folder / "wandb").glob("offline-run-*/*.wandb")
        assert record.stem == f"run-{name}" and f"head-{name}".encode() in record.read_bytes()
        return name, [int(row["step"]) for row in rows(folder) if row["train/loss"]]

    options = ["logger=wandb", "logger.wandb.offline=true", "logger.wandb.artifacts=true", "ckpt_path=auto"]
    options += [f"checkpoint_copies={tmp_path}/copies", "data.pack_tokens=48", "trainer.log_every_n_steps=1"]
    (first, some), (again, steps) = train("pod 1"), train("pod 2", "trainer.max_epochs=2")
    assert first == again and steps == [*range(len(steps))] and some == steps[: len(some)] != steps


def test_online_the_store_is_an_input_of_the_run(tmp_path, monkeypatch):
    seen = []

    class Run:
        offline, id = False, "x1"

        def use_artifact(self, artifact: Any) -> None:
            seen.append(("in", artifact.name, artifact.metadata["samples"]))

        def log_artifact(self, artifact: Any, aliases: list[str]) -> None:
            seen.append(("out", artifact.name, artifact.metadata["features"]))

    monkeypatch.setattr(WandbRun, "experiment", Run())
    (tmp_path / "best.ckpt").write_text("weights")
    best = SimpleNamespace(monitor="m", best_model_score=2.5, best_model_path=str(tmp_path / "best.ckpt"))
    source = SimpleNamespace(fingerprint="0123456789abcdef", describe=lambda: STORE)
    wandb_run(tmp_path).log_lineage(best, source)  # type: ignore[arg-type]
    assert [each[:2] for each in seen] == [("in", "features-0123456789ab"), ("out", "head-x1")]
    assert seen[1][2].startswith("features-0123456789ab")


@LIGHTNING_WARNS
def test_tensorboard_by_one_key(tmp_path, store_path):
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    Run(tmp_path / "run", store_path, "logger=tensorboard", "trainer.max_epochs=1").fit()
    assert (tmp_path / "run" / "metrics.csv").is_file()
    events = event_accumulator.EventAccumulator(str(tmp_path / "run/tensorboard")).Reload()
    assert "val/accept_length" in events.Tags()["scalars"]
