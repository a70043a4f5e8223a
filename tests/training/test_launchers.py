"""Ranks that torchrun or srun has started: they are those of trainer, of one training, and say once what is wrong."""

import errno
import os
import signal
import socket
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from omegaconf import OmegaConf
from scripts import call_script, composed, start_script
from serving_fixtures import free_port, wait_until
from training_runs import LIGHTNING_WARNS, SHORT

from eagle3 import cli
from eagle3.commands.devices import require_launched
from eagle3.errors import InputError
from eagle3.hydra_run import launched_rank
from eagle3.messages import message_for_user
from eagle3.training.callbacks import SameOnAllRanks

pytestmark = LIGHTNING_WARNS
TORCHRUN = {"TORCHELASTIC_RUN_ID": "first", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
SRUN = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "2", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "7"}
UNEVEN = SRUN | {"SLURM_STEP_NUM_TASKS": "3"}
OTHERS = ("SUBMITIT_EXECUTOR", "SLURM_NNODES", "SLURM_NTASKS_PER_NODE", "SLURM_JOB_NAME", "NODE_RANK", "RANK")
OTHERS += ("LOCAL_RANK", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
TWO_OF_TWO = ("trainer.num_nodes=2", "trainer.devices=2")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*TORCHRUN, *SRUN, *OTHERS):
        monkeypatch.setenv(name, "")  # so that what a test's subject sets is taken back, too
        monkeypatch.delenv(name)


def launch(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def trainer_with(*overrides: str) -> Any:
    return OmegaConf.to_container(composed("train", "trainer=cpu", *overrides).trainer, resolve=True)


@pytest.mark.parametrize("launcher", [TORCHRUN, SRUN, UNEVEN])
@pytest.mark.parametrize("overrides", [(), ("trainer.devices=4",), ("trainer.num_nodes=2",)])
def test_ranks_that_trainer_does_not_count_on_would_each_train_alone(monkeypatch, launcher, overrides):
    launch(monkeypatch, launcher)
    with pytest.raises(InputError, match=r"; give trainer.num_nodes=2 trainer.devices=(2|1.5), or start as many ranks"):
        require_launched(trainer_with(*overrides))


@pytest.mark.parametrize(
    "variables",
    [
        {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "host", "MASTER_PORT": "1"},  # Kubeflow's PyTorchJob
        {"WORLD_SIZE": "2", "LOCAL_RANK": "1"},
        {"OMPI_COMM_WORLD_SIZE": "2"},
        {"PMI_SIZE": "2"},
    ],
)
def test_processes_of_another_launcher_are_refused(monkeypatch, variables):
    launch(monkeypatch, variables)
    with pytest.raises(InputError, match="=2: a launcher has started 2 processes, each of which would train alone; st"):
        require_launched(trainer_with())


@pytest.mark.parametrize(
    "variables",
    [
        {"WORLD_SIZE": "1", "RANK": "0"},
        {"WORLD_SIZE": "2", "LOCAL_RANK": "1"},
        {"WORLD_SIZE": "4", "NODE_RANK": "0"},
        {"OMPI_COMM_WORLD_SIZE": "2", "WORLD_SIZE": "2", "LOCAL_RANK": "0"},
    ],
)
def test_processes_with_the_numbers_of_their_ranks_are_used(monkeypatch, variables):
    launch(monkeypatch, variables)
    require_launched(trainer_with("trainer.devices=2"))


@pytest.mark.parametrize("launcher", [TORCHRUN, SRUN])
def test_ranks_of_a_launcher_are_used(monkeypatch, launcher):
    launch(monkeypatch, launcher | {"SLURM_JOB_NAME": "interactive", "SLURM_NTASKS_PER_NODE": "8"})
    require_launched(trainer_with(*TWO_OF_TWO))
    if launcher is SRUN:  # Lightning reads the job's, in which srun may have started fewer
        names = ("SLURM_NTASKS", "SLURM_NNODES", "SLURM_NTASKS_PER_NODE", "SLURM_JOB_NAME")
        assert [os.environ[name] for name in names] == ["4", "2", "2", "train"]


def test_lightning_starts_the_ranks_in_a_job_without_srun(monkeypatch):
    launch(monkeypatch, {"SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "1"})
    require_launched(trainer_with("trainer.devices=2"))
    assert "SLURM_NTASKS" not in os.environ


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("trainer.num_nodes=2", "no launcher has started this rank"),
        ("trainer.strategy=ddp_spawn", "trainer.strategy=ddp_spawn trains in copies of this process"),
    ],
)
def test_ranks_that_would_wait_or_be_lost_are_refused(store_path, tmp_path, error_line, setting, message):
    settings = (f"data.path={store_path}", f"run_dir={tmp_path}/run", *SHORT, "trainer.devices=2", setting)
    assert message in error_line(call_script, "train", *settings, output_dir=tmp_path / "run")


@pytest.mark.parametrize(
    ("variables", "message"),
    [({}, "start it once, e.g. with srun --ntasks=1"), ({"SUBMITIT_EXECUTOR": "slurm"}, "give trainer.num_nodes=2")],
)
def test_a_sweep_is_started_once_and_a_job_of_it_uses_the_ranks_that_it_asked_for(
    monkeypatch, tmp_path, error_line, variables, message
):
    launch(monkeypatch, SRUN | variables)
    monkeypatch.setattr("eagle3.commands.train.in_sweep", lambda: True)
    assert message in error_line(
        call_script, "train", "data.path=DIR", f"run_dir={tmp_path}", *SHORT, output_dir=tmp_path
    )


def test_ranks_of_a_machine_without_a_loopback_interface_are_refused(monkeypatch):
    def unreachable(*_: Any) -> None:
        raise OSError(errno.ENETUNREACH, "Network is unreachable")

    monkeypatch.setattr(socket.socket, "connect", unreachable)
    with pytest.raises(
        InputError, match=r"^trainer\.devices=2: the ranks .* \(Network is unreachable\); start its loop"
    ):
        require_launched(trainer_with("trainer.devices=2"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_rank_that_waits_for_another_machine(store_path, tmp_path, number):
    port = free_port()
    env = {"NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    settings = (f"data.path={store_path}", f"hydra.run.dir={tmp_path}/run", *SHORT, "trainer.num_nodes=2")
    rank = start_script("train", *settings, log=tmp_path / "log", env=env)
    try:
        with socket.socket() as other:
            wait_until(lambda: other.connect_ex(("127.0.0.1", port)) == 0 or rank.poll() is not None)
        os.kill(rank.pid, number)
        wait_until(lambda: rank.poll() is not None)
    finally:
        if rank.poll() is None:
            os.kill(rank.pid, signal.SIGKILL)
    assert rank.wait() == -number, (tmp_path / "log").read_text()


def test_ranks_of_another_training_end_it_on_all(monkeypatch):
    own = {"optim.lr": 0.003, "the commit": "abc"}

    def gather(found: list, mine: Any) -> None:
        found[:] = [mine, ("other", own | changed)]

    monkeypatch.setattr(dist, "all_gather_object", gather)
    trainer: Any = SimpleNamespace(world_size=2)
    changed: dict[str, Any] = {"the commit": ""}  # that machine has no git
    SameOnAllRanks(own).setup(trainer, None, "fit")  # type: ignore[arg-type]
    changed["optim.lr"] = 0.1
    with pytest.raises(InputError, match=r"rank 1 on other is .* \(optim.lr: 0.1, not 0.003\); start all ranks with"):
        SameOnAllRanks(own).setup(trainer, None, "fit")  # type: ignore[arg-type]


def test_an_error_of_another_rank_than_the_first_names_it(monkeypatch, capsys):
    waited: list[float] = []
    monkeypatch.setattr(cli, "time", SimpleNamespace(sleep=waited.append))
    monkeypatch.setattr(cli.platform, "node", lambda: "host")
    for rank in ("0", "3"):
        monkeypatch.setenv("RANK", rank)
        assert launched_rank() == int(rank)
        for message, status in (("no store", 1), ("stopped", 130)):
            with pytest.raises(SystemExit):
                cli.exit_with(message, status)
    assert capsys.readouterr().err == "error: no store\nerror: stopped\nerror: rank 3 on host: no store\n"
    assert waited == [cli.FIRST_RANK_S] * 2


def test_a_lost_rank_is_one_line():
    gloo = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error [::1]:9: Connection reset. GLHF!"
    for error in (RuntimeError(gloo), dist.DistBackendError("NCCL error in: x.cpp:1, unhandled system error\nmore")):
        assert (message_for_user(error) or "").startswith("no connection to the other ranks (")
    assert message_for_user(RuntimeError("a fault of ours")) is None


def test_slurms_own_signal_saves_and_ends_like_others(train):
    run = train("run", signal_after=3)
    run.recorder.number = signal.SIGUSR1
    run.stopped()
    assert (run.directory / "checkpoints/last.ckpt").is_file()
