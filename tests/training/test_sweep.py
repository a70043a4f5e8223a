"""The ranked table of a sweep."""

import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest
import scripts
import yaml
from hydra.errors import MissingConfigException
from omegaconf import DictConfig, OmegaConf
from scripts import finished, run_script, start_script
from stores import ROOT, grow_store, random_samples
from training_runs import sweep, sweep_command

from eagle3.errors import install_command
from eagle3.messages import wrong_override
from eagle3.storage.lock import hold
from eagle3.storage.records import write_sealed_json
from eagle3.training.sweep import RankedTable, ranked_table, read_jobs

METRIC = "val/served_accept_length_3"
needs_optuna = pytest.mark.skipif(not find_spec("optuna"), reason="an extra")


def job(directory: Path, name: str, overrides: list[str], score: float | None, mode: str = "max") -> None:
    (directory / name / ".hydra").mkdir(parents=True)
    (directory / name / ".hydra" / "overrides.yaml").write_text("".join(f"- {item}\n" for item in overrides))
    (directory / name / ".hydra" / "job").write_text("0")
    if score is not None:
        result = {"metric": METRIC, "mode": mode, "score": score, "checkpoint": "c", "steps": 12, "epochs": 1}
        write_sealed_json(directory / name / "result.json", result)


@pytest.mark.parametrize("mode", ["max", "min"])
def test_jobs_are_ranked_by_their_metric_and_failed_ones_come_last(tmp_path, mode):
    for number, (lr, decay, result) in enumerate([("1e-4", 0.8, 1.25), ("3e-4", 0.8, None), ("3e-4", 1.0, 1.5)]):
        score = -result if result and mode == "min" else result
        job(tmp_path, str(number), ["data.path=x", f"optim.lr={lr}", f"loss.decay={decay}"], score, mode)
    lines = ranked_table(tmp_path).splitlines()[1:]
    assert [line.split()[0] for line in lines] == ["1", "2", "3"]
    assert ["1.5000" in lines[0], "1.2500" in lines[1], "no result" in lines[2]] == [True] * 3
    assert lines[0].endswith("  optim.lr=3e-4 loss.decay=1.0")


@pytest.mark.parametrize("mode", ["max", "min"])
def test_seeds_of_the_same_settings_are_averaged(tmp_path, mode):
    jobs = [("lk", 1.25), ("lk", 1.5), ("lk", None), ("early", 1.5), ("early", 1.75), ("early", 2.0), ("other", 3.0)]
    for number, (loss, score) in enumerate(jobs):
        job(tmp_path, str(number), ["data.path=x", f"loss={loss}", f"seed={number % 3}"], score, mode)
    lines = ranked_table(tmp_path).splitlines()
    assert [line.split() for line in lines[lines.index("") + 1 :]] == [
        ["mean", "range", "seeds", "settings"],
        *[
            ["1.7500", "1.5000", "to", "2.0000", "3", "loss=early"],
            ["1.3750", "1.2500", "to", "1.5000", "2", "loss=lk"],
        ][:: 1 if mode == "max" else -1],
    ]


def test_the_same_seed_again_is_no_other_seed(tmp_path):
    """Optuna chooses settings again, and a command line may name a seed twice."""
    for number, (loss, score) in enumerate([("lk", 1.25), ("lk", 1.25), ("early", 1.5)]):
        job(tmp_path, str(number), [f"loss={loss}", "seed=0"], score)
    assert len(ranked_table(tmp_path).splitlines()) == 4  # no means below it


def test_a_mistyped_folder_is_named(tmp_path):
    command = [sys.executable, "-m", "eagle3.training.sweep", str(tmp_path / "swep")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {tmp_path / 'swep'} has no jobs of a sweep; give the folder of one")


# --- a sweep in the folder of an earlier one --------------------------------------------------------------------------

RATES = ["optim.lr=1e-3,3e-3", "seed=0,1"]


def earlier_sweep(folder: Path, *overrides: str) -> None:
    job(folder, "0", ["optim.lr=1e-3", "seed=0"], 1.5)
    OmegaConf.save(composed(folder, *overrides), folder / "multirun.yaml")


def composed(folder: Path, *overrides: str) -> DictConfig:
    """Return what Hydra hands a callback at the start of a sweep."""
    of_all_jobs = [each for each in overrides if "," not in each]
    config = scripts.composed("train", f"hydra.sweep.dir={folder}", *of_all_jobs, return_hydra_config=True)
    OmegaConf.update(config, "hydra.overrides.task", [each for each in overrides if not each.startswith("hydra")])
    return config


def test_the_same_sweep_continues_in_its_folder_by_any_launcher(tmp_path):
    earlier_sweep(tmp_path, *RATES)  # without ckpt_path
    RankedTable().on_multirun_start(composed(tmp_path, "ckpt_path=auto", *RATES, "hydra/launcher=basic"))


WORST = "hydra.sweeper.direction=minimize looks for the worst head: callbacks.best.mode=max; give"


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (RATES, "holds an earlier sweep; add ckpt_path=auto to continue it, or give another folder"),
        (["ckpt_path=auto", *RATES[::-1]], "of other jobs (optim.lr=1e-3,3e-3 seed=0,1); give its overrides in its"),
        (["ckpt_path=auto", *RATES, "loss.decay=0.8"], "of other jobs (optim.lr=1e-3,3e-3 seed=0,1)"),
        (["ckpt_path=auto", *RATES, "hydra.sweep.subdir=x"], "of other jobs (optim.lr=1e-3,3e-3 seed=0,1)"),
        (["hydra.sweep.subdir=all"], "hydra.sweep.subdir=all is one folder for all jobs"),
        (["hydra.output_subdir=null"], "hydra.output_subdir=None must be .hydra"),
        pytest.param(["hydra/sweeper=optuna"], WORST, marks=needs_optuna),
        pytest.param(["hparams_search=optuna", "hydra.sweeper.n_trials=0"], "n_trials=0 must be 1", marks=needs_optuna),
        pytest.param(["hparams_search=optuna", "hydra.sweeper.n_jobs=0"], "n_jobs=0 must be 1", marks=needs_optuna),
    ],
)  # fmt: skip
def test_a_sweep_that_would_mix_jobs_or_look_for_the_worst_is_one_line(tmp_path, error_line, overrides, reason):
    if RATES[0] in overrides:
        earlier_sweep(tmp_path, *RATES)
    assert reason in error_line(RankedTable().on_multirun_start, composed(tmp_path, *overrides))


def test_a_sweep_without_a_job_is_one_line(tmp_path, error_line):
    line = error_line(RankedTable().on_multirun_end, composed(tmp_path))
    assert line.startswith("error: the sweep has no jobs: a range(…) is empty, or a glob(…) fits no option")


@pytest.mark.parametrize("given", ["hparams_search=optuna", "hydra/launcher=joblib", "hydra.sweeper.n_trials=3"])
def test_what_only_a_sweep_reads_is_refused_in_a_single_run(tmp_path, error_line, given):
    config = composed(tmp_path)
    config.hydra.overrides["task" if given.startswith("hparams") else "hydra"] = [given]
    config.hydra.mode = "RUN"
    line = error_line(RankedTable().on_job_start, config)
    assert line == f"error: {given} is for a sweep, and this is a single run; add -m, or leave it out"


def test_a_sweep_whose_overrides_are_not_recorded_is_not_continued(tmp_path, error_line):
    """A study of Optuna: another one would choose other settings for the jobs that have checkpoints."""
    job(tmp_path, "0", ["optim.lr=1e-3", "seed=0"], 1.5)
    line = error_line(RankedTable().on_multirun_start, composed(tmp_path, *RATES, "ckpt_path=auto"))
    assert "cannot be continued: it has no multirun.yaml" in line


def test_a_sweep_whose_jobs_still_run_is_not_continued(tmp_path, error_line):
    earlier_sweep(tmp_path, *RATES)
    with hold(tmp_path / "0"):
        line = error_line(RankedTable().on_multirun_start, composed(tmp_path, *RATES, "ckpt_path=auto"))
    assert f"{tmp_path}/0 is being written by process" in line


FAILING = ("-m", "data.path=nowhere/features")
BY_OVERRIDES = "hydra.sweep.subdir=${hydra.job.override_dirname}"


def test_a_sweep_whose_folders_have_slashes_has_a_table_a_status_and_its_folder_for_itself(tmp_path):
    command = (*FAILING, f"hydra.sweep.dir={tmp_path}/sweep", BY_OVERRIDES)
    done = run_script("train", *command, "optim.lr=1e-3,3e-3")
    names = [f"data.path=nowhere/features,optim.lr={rate}" for rate in ("0.001", "0.003")]
    assert done.returncode == 1 and [job["name"] for job in read_jobs(tmp_path / "sweep")] == names
    assert [line.split()[-2] for line in done.stdout.splitlines()[-2:]] == names
    again = run_script("train", *command, "optim.lr=5e-3,7e-3")
    assert again.returncode == 1 and "holds an earlier sweep of other jobs" in again.stderr


def test_another_command_in_the_folder_of_a_sweep_is_not_in_its_table(tmp_path):
    job(tmp_path, "0", ["seed=0"], 1.5)
    job(tmp_path, "compared", ["action=compare"], None)
    (tmp_path / "compared" / ".hydra" / "job").unlink()  # which only jobs of a sweep have
    assert [each["name"] for each in read_jobs(tmp_path)] == ["0"]


def test_another_sweep_below_the_folder_of_one_is_not_in_its_table(tmp_path):
    job(tmp_path / "group", "0", ["seed=0"], 1.5)
    for name in ("2", "3"):
        job(tmp_path / "other", name, ["seed=0"], 1.5)
    (tmp_path / "other" / "multirun.yaml").touch()
    assert [each["name"] for each in read_jobs(tmp_path)] == ["group/0"]


def test_jobs_that_change_into_their_folders_are_in_the_table(tmp_path):
    done = run_script("train", *FAILING, "hydra.job.chdir=true", "hydra.sweep.dir=sweep", "seed=0,1", cwd=tmp_path)
    assert done.returncode == 1 and [job["name"] for job in read_jobs(tmp_path / "sweep")] == ["0", "1"], done.stderr


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("hydra.sweep.subdir=../${hydra:job.num}",), "hydra.sweep.subdir=../0 is not a folder below hydra.sweep.dir="),
        ((BY_OVERRIDES, "hydra.job.config.override_dirname.exclude_keys=[seed]"), "is the folder of jobs 0 and 1"),
        (("hydra.run.dir=mine",), "hydra.run.dir=mine is for a single run"),
    ],
)
def test_jobs_without_a_folder_of_their_own_in_the_sweep_s_are_one_line(tmp_path, words, reason):
    done = run_script("train", *FAILING, f"hydra.sweep.dir={tmp_path}/sweep", "seed=0,1", *words, cwd=tmp_path)
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 1 and last.startswith("error: ") and reason in last, done.stderr


@pytest.mark.parametrize("command", [("precompute", "out_dir=DIR"), ("serve", "action=check", "head=HEAD")])
def test_a_failed_job_of_any_script_is_in_the_exit_status(tmp_path, command):
    script, *words = command
    done = run_script(script, "-m", *words, f"hydra.sweep.dir={tmp_path}/sweep", "progress=true,false", cwd=tmp_path)
    assert done.returncode == 1 and done.stderr.count("error: ") == 2, done.stderr


@pytest.mark.slow
def test_a_killed_sweep_continues_by_the_same_command(tmp_path, store_path):
    folder = tmp_path / "sweep"
    every_step = ("callbacks.last.every_n_steps=1", "callbacks.last.min_seconds=0", "data.pack_tokens=48")
    options = ("trainer.log_every_n_steps=1", *every_step, "seed=0,1,2", "ckpt_path=auto")
    command = sweep_command(store_path, folder, *options)
    killed = start_script("train", *command, log=tmp_path / "log")
    while not (folder / "1" / "checkpoints" / "last.ckpt").exists():
        assert killed.poll() is None
        time.sleep(0.01)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    before = [(folder / "0" / name).read_text() for name in ("result.json", "metrics.csv")]
    assert not (folder / "1" / "result.json").exists() and not (folder / "2").exists()
    done = finished("train", *command)
    assert [(folder / "0" / name).read_text() for name in ("result.json", "metrics.csv")] == before
    table = done.stdout.partition("job  settings\n")[2].splitlines()
    assert sorted(line.split()[-1] for line in table[:3]) == ["seed=0", "seed=1", "seed=2"]


EARLY = """\
defaults: [soft_cross_entropy, _self_]
_target_: eagle3.head.loss.UnrollLoss
decay: {decay}
"""


def test_a_sweep_whose_files_have_changed_since_a_job_finished_does_not_continue(tmp_path, store_path):
    """The overrides are the same. What they name is not, and the table would show the jobs as one setting."""
    own = tmp_path / "team" / "conf" / "loss" / "early.yaml"
    own.parent.mkdir(parents=True)
    own.write_text(EARLY.format(decay=0.5))
    given = ("--config-dir", str(own.parent.parent))
    keys = ("loss=early", "seed=0", "trainer.max_steps=1", "trainer.val_check_interval=1", "ckpt_path=auto")
    command = [*given, *sweep_command(store_path, tmp_path / "sweep", *keys)]
    finished("train", *command)
    result = (tmp_path / "sweep" / "0" / "result.json").read_text()
    finished("train", *command)  # nothing has changed, and nothing is trained

    own.write_text(EARLY.format(decay=0.9))
    done = run_script("train", *command)
    assert done.returncode == 1
    assert "was finished with other settings (loss.decay=0.5 then, 0.9 now)" in done.stderr.splitlines()[-1]

    own.write_text(EARLY.format(decay=0.5))
    grow_store(store_path, random_samples(61)[60:])
    done = run_script("train", *command)
    assert done.returncode == 1
    assert "was finished with other settings (other features in data.path)" in done.stderr.splitlines()[-1]
    assert (tmp_path / "sweep" / "0" / "result.json").read_text() == result


# --- Hydra's plugins --------------------------------------------------------------------------------------------------

LAUNCHERS = [
    (("hydra/launcher=joblib", "hydra.launcher.n_jobs=2"), "hydra_joblib_launcher"),
    (("hydra/launcher=submitit_local",), "hydra_submitit_launcher"),
    (("hydra/launcher=ray", "+hydra.launcher.ray.remote.num_cpus=1"), "hydra_ray_launcher"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("launcher", "plugin"), LAUNCHERS)
def test_jobs_on_other_processes_share_the_store_and_one_failure_ends_no_other(tmp_path, store_path, launcher, plugin):
    pytest.importorskip(f"hydra_plugins.{plugin}")
    done = sweep(store_path, tmp_path / "sweep", *launcher, "optim.lr=-1,1e-3")
    table = done.stdout.splitlines()
    assert done.returncode == 1, done.stderr[-2000:]  # one job has no result
    assert [line.split()[-1] for line in table[-2:]] == ["optim.lr=0.001", "optim.lr=-1"]
    assert (tmp_path / "sweep" / "1" / "result.json").is_file()


@pytest.mark.slow
def test_a_study_continues_after_a_failed_trial_and_looks_for_the_longest_accept_length(tmp_path, store_path):
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    drawn = ("hydra/sweeper/sampler=random", "hydra.sweeper.sampler.seed=1")  # with a rate of -1 among them, and others
    study = ("hparams_search=optuna", "hydra.sweeper.n_trials=3", *drawn, "loss.decay=0.8")
    done = sweep(store_path, tmp_path / "sweep", *study, "optim.lr=choice(-1,1e-3,1e-2)")
    assert "Traceback" not in done.stderr
    found = yaml.safe_load((tmp_path / "sweep" / "optimization_results.yaml").read_text())
    scores = {path.parent.name: json.loads(path.read_text())["score"] for path in tmp_path.glob("sweep/*/result.json")}
    assert 0 < len(scores) < 3 and len(read_jobs(tmp_path / "sweep")) == 3
    assert found["best_value"] == max(scores.values())


def test_a_launcher_of_slurm_on_a_machine_without_it_is_one_line(tmp_path):
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    done = run_script(
        "train", *sweep_command(tmp_path, tmp_path / "sweep", "hydra/launcher=submitit_slurm", "seed=0,1"),
        cwd=tmp_path, env={"PATH": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: hydra/launcher=submitit_slurm: this machine has no srun; ")


@pytest.mark.parametrize(
    ("option", "extra"),
    [("sweeper/optuna", "optuna"), ("launcher/joblib", "joblib"), ("launcher/submitit_slurm", "submitit"),
     ("launcher/submitit_local", "submitit"), ("launcher/ray", "ray-sweep")],
)  # fmt: skip
def test_a_plugin_that_is_not_installed_is_one_line(option, extra):
    group, plugin = option.split("/")
    missing = f"In 'hydra/config': Could not load 'hydra/{option}'."
    told = wrong_override(MissingConfigException(missing, missing_cfg_file=None))
    assert told == f"hydra/{group} needs the package of Hydra's {plugin}; install it: {install_command(extra)}"
    assert extra in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


@pytest.mark.parametrize(("mode", "direction"), [("max", "maximize"), ("min", "minimize")])
def test_a_search_looks_for_what_callbacks_best_calls_better(mode, direction):
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    overrides = ["hparams_search=optuna", f"callbacks.best.mode={mode}"]
    config = scripts.composed("train", *overrides, return_hydra_config=True)
    assert config.hydra.sweeper.direction == direction
    assert "OptunaSweeper" in config.hydra.sweeper._target_
