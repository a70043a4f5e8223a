"""What the features stage makes of a config."""

from dataclasses import replace

import pytest
import torch

from eagle3.compose import compose_run
from eagle3.errors import InputError
from eagle3.features.build import feature_settings, sharding
from eagle3.settings.precomputing import PrecomputeRun
from eagle3.target.stored import stored_target
from eagle3.workers.task import WorkerId


def test_a_store_says_in_what_its_target_computes(tiny_path, monkeypatch):
    settings = (f"target.path={tiny_path}", "prompts.path=x", "out_dir=x")
    here, on_ray, by_sglang = (
        compose_run("precompute", *settings, *options)
        for options in (["features=huggingface"], ["features=huggingface", "workers=ray"], ["features=sglang"])
    )
    target = stored_target(path=str(tiny_path), revision=None, trust_remote_code=False)

    def dtype(run: PrecomputeRun, *, gpu_here: bool = False, gpus: int | None = None, **changes: str) -> str:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu_here)
        workers = run.workers if gpus is None else run.workers.with_keys(gpus=gpus)
        return feature_settings(
            replace(run, target=replace(run.target, **changes), workers=workers), target
        ).target_dtype

    assert dtype(here, dtype="float16") == "float16"
    assert dtype(here, dtype="auto") == "float32"
    assert dtype(here, dtype="auto", gpu_here=True) == "bfloat16"  # of the checkpoint
    assert dtype(here, dtype="auto", gpu_here=True, device="cpu") == "float32"
    assert dtype(here, dtype="auto", device="balanced") == "bfloat16"
    assert dtype(on_ray, dtype="auto") == "bfloat16"  # the cluster's nodes have GPUs
    assert dtype(on_ray, dtype="auto", gpu_here=True, gpus=0) == "float32"
    assert dtype(by_sglang, dtype="float32") == "auto"
    flags = {"--dtype": "float32", "kv_cache_dtype": "fp8_e4m3", "quantization": "fp8", "attention-backend": "triton"}
    launch = replace(by_sglang.launch, dtype="float16")
    assert dtype(replace(by_sglang, launch=launch)) == "float16"
    launch = replace(launch, extra_flags=flags)
    stored = "float32, quantization=fp8, kv-cache-dtype=fp8_e4m3"
    assert dtype(replace(by_sglang, launch=launch)) == stored


def test_a_worker_refuses_a_folder_that_is_not_the_drivers(tiny_path, tmp_path):
    settings = (f"target.path={tiny_path}", "target.device=cpu", "prompts.path=x", f"out_dir={tmp_path}")
    run = compose_run("precompute", *settings, "features=huggingface")
    with pytest.raises(InputError, match=r"is not the folder that the driver sees; let all nodes share it"):
        sharding(run, tmp_path / "logs", WorkerId()).__enter__()
