"""The run's folder of ranks that a launcher starts: the same on all machines."""

import pytest

from eagle3 import cli


@pytest.mark.parametrize(
    ("environment", "name"),
    [
        ({}, None),
        ({"SLURM_NTASKS": "1", "SLURM_JOB_ID": "7"}, None),  # one process in a job: a run each
        ({"SLURM_NTASKS": "16", "SLURM_JOB_ID": "7"}, "slurm-7"),
        ({"TORCHELASTIC_RUN_ID": "first"}, "torchrun-first"),
    ],
)
def test_ranks_of_a_launcher_go_by_its_job(
    environment: dict[str, str], name: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key in ("SLURM_NTASKS", "SLURM_JOB_ID", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(key, raising=False)
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    assert cli.job_name() == name
