"""What is said of a GPU that the machine has and PyTorch does not see."""

import pytest
import torch

from eagle3.target.device import unseen_gpus

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="PyTorch sees a GPU here")


def test_gpus_that_pytorch_does_not_see_are_said_unless_they_are_hidden_on_purpose_or_not_there(tmp_path, monkeypatch):
    driver = tmp_path / "gpus"  # as of NVIDIA's driver, with one GPU
    (driver / "0000:01:00.0").mkdir(parents=True)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert str(unseen_gpus(driver)).startswith("PyTorch sees no GPU where the driver lists 1 (")
    assert unseen_gpus(tmp_path / "no driver") is None
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert unseen_gpus(driver) is None
