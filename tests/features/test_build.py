"""What the features stage makes of a config."""

from pathlib import Path

import pytest
import torch

from eagle3.compose import compose_run
from eagle3.errors import InputError
from eagle3.features.build import feature_settings, sharding
from eagle3.target.stored import stored_target
from eagle3.workers.task import WorkerId


@pytest.mark.parametrize(
    ("overrides", "gpu_here", "expected"),
    [
        (["target.dtype=float16"], False, "float16"),
        (["target.dtype=auto"], False, "float32"),
        (["target.dtype=auto"], True, "bfloat16"),  # of the checkpoint
        (["target.dtype=auto", "target.device=cpu"], True, "float32"),
        (["target.dtype=auto", "target.device=balanced"], False, "bfloat16"),
        (["target.dtype=auto", "workers=ray"], False, "bfloat16"),  # the cluster's nodes have GPUs
        (["target.dtype=auto", "workers=ray", "workers.gpus=0"], True, "float32"),
        (["target.dtype=float32", "features=sglang"], False, "auto"),
        (["target.dtype=float32", "features=sglang", "launch.dtype=float16"], False, "float16"),
    ],
)
def test_a_store_says_in_what_its_target_computes(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: list[str], gpu_here: bool, expected: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu_here)
    settings = (f"target.path={tiny_path}", "prompts.path=x", "out_dir=x", "features=huggingface")
    run = compose_run("precompute", *settings, *overrides)
    target = stored_target(path=str(tiny_path), revision=None, trust_remote_code=False)
    assert feature_settings(run, target).target_dtype == expected


def test_a_worker_refuses_a_folder_that_is_not_the_drivers(tiny_path: Path, tmp_path: Path) -> None:
    settings = (f"target.path={tiny_path}", "target.device=cpu", "prompts.path=x", f"out_dir={tmp_path}")
    run = compose_run("precompute", *settings, "features=huggingface")
    with pytest.raises(InputError, match=r"is not the folder that the driver sees; let all nodes share it"):
        sharding(run, tmp_path / "logs", WorkerId()).__enter__()
