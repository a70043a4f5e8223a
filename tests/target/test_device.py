"""What is said of a GPU that the machine has and PyTorch does not see."""

from pathlib import Path

import pytest
import torch

from eagle3.target.device import unseen_gpus

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="PyTorch sees a GPU here")


@pytest.fixture
def driver(tmp_path: Path) -> Path:
    """A folder like that of NVIDIA's driver: one GPU."""
    (tmp_path / "gpus" / "0000:01:00.0").mkdir(parents=True)
    return tmp_path / "gpus"


def test_a_gpu_that_pytorch_does_not_see_is_said_with_the_reason(driver: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    said = unseen_gpus(driver)
    assert said is not None and "CUDA_VISIBLE_DEVICES=1 where the driver lists 1 (" in said
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    said = unseen_gpus(driver)
    assert said is not None and said.startswith("PyTorch sees no GPU where the driver lists 1 (")


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_gpus_that_are_hidden_on_purpose_or_not_there_are_not_missed(
    driver: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hidden: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    assert unseen_gpus(driver) is None
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert unseen_gpus(tmp_path / "no driver") is None
    (tmp_path / "empty").mkdir()
    assert unseen_gpus(tmp_path / "empty") is None
