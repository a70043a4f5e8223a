"""trainer=auto: bf16 where there is a GPU to train on, float32 on the CPU and on Apple's GPUs."""

from typing import Any

import lightning
import pytest
import torch
from lightning import fabric
from lightning.pytorch.accelerators import MPSAccelerator
from omegaconf import OmegaConf
from scripts import composed
from stores import in_fp8, random_samples, write_store
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from training_runs import LIGHTNING_WARNS, Run

from eagle3.commands.devices import trains_on_several
from eagle3.commands.train import chosen_precision
from eagle3.data.pack import OnDevice, pack_samples

pytestmark = LIGHTNING_WARNS


@pytest.mark.parametrize(
    ("accelerator", "gpu", "precision"),
    [("auto", True, "bf16-mixed"), ("auto", False, "32-true"), ("gpu", True, "bf16-mixed"), ("cpu", True, "32-true")],
)
def test_auto_takes_bf16_where_it_trains_on_a_gpu(monkeypatch, accelerator, gpu, precision):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    assert chosen_precision({"precision": "auto", "accelerator": accelerator}) == precision
    assert chosen_precision({"precision": "32-true", "accelerator": accelerator}) == "32-true"


@pytest.mark.parametrize(
    ("overrides", "gpus", "several"),
    [
        ([], 1, False),
        ([], 8, True),
        (["trainer.accelerator=cpu"], 8, False),
        (["trainer=gpu", "trainer.devices=2"], 8, True),
        (["trainer.devices=[0,2]"], 8, True),
        (["trainer.devices='0,'"], 8, False),
        (["trainer.devices='2'"], 8, True),
        (["trainer.devices='-1'"], 8, True),
        (["trainer=gpu", "trainer.num_nodes=2"], 1, True),
    ],
)
def test_every_gpu_trains_unless_fewer_are_named(monkeypatch, overrides, gpus, several):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    assert trains_on_several(OmegaConf.to_container(composed("train", *overrides).trainer, resolve=True)) is several


class FailsAsMpsDoes(TorchDispatchMode):
    """Apple's GPUs have no float64 and no float8; PyTorch raises an error where one would be made there."""

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = operator(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(made):
            if isinstance(tensor, torch.Tensor) and tensor.dtype in (torch.float64, torch.float8_e4m3fn):
                raise RuntimeError(f"{operator} makes {tensor.dtype}")
        return made


class OnMps(lightning.Callback):
    """Steps on a device that fails as MPS does; the epoch's end of a validation is computed on the CPU."""

    def __init__(self) -> None:
        self.mode, self.steps = FailsAsMpsDoes(), 0

    def on_train_batch_start(self, *_: Any) -> None:
        self.mode.__enter__()

    def on_train_batch_end(self, *_: Any) -> None:
        self.mode.__exit__(None, None, None)
        self.steps += 1

    def on_exception(self, *_: Any) -> None:
        self.mode.__exit__(None, None, None)

    on_validation_batch_start, on_validation_batch_end = on_train_batch_start, on_train_batch_end


def test_steps_use_no_float64_where_auto_finds_apples_gpu_only(tmp_path, monkeypatch):
    for accelerator in (MPSAccelerator, fabric.accelerators.MPSAccelerator):
        monkeypatch.setattr(accelerator, "is_available", lambda: True)
    monkeypatch.setattr(MPSAccelerator, "get_parallel_devices", lambda devices: [torch.device("cpu")])
    monkeypatch.setattr(MPSAccelerator, "setup_device", lambda *_: None)
    store = write_store(tmp_path / "features", random_samples(26))
    options = ("trainer.accelerator=auto", "trainer.precision=auto", "trainer.max_epochs=1")
    run = Run(tmp_path / "run", store, *options)
    assert isinstance(run.trainer.accelerator, MPSAccelerator) and run.trainer.precision == "32-true"
    assert torch.float64 not in {tensor.dtype for tensor in run.module.buffers()}
    run.trainer.callbacks.append(on_mps := OnMps())
    run.fit()
    assert on_mps.steps > 6


def test_fp8_is_unpacked_before_it_goes_to_apples_gpu(monkeypatch):
    """The device has no float8."""
    pack = pack_samples([in_fp8(random_samples(1)[0])], anchors_in_step=1, samples_in_step=1, pin=False)
    on_cpu, sent = pack.to(torch.device("cpu")), list[Any]()
    monkeypatch.setattr(OnDevice, "to", lambda moving, device, non_blocking=False: sent.append(moving) or moving)
    pack.to(torch.device("mps"))
    assert sent[0].aux_hidden_states.dtype == torch.bfloat16 and sent[0].aux_exponents is None
    assert torch.equal(sent[0].aux_hidden_states, on_cpu.aux_hidden_states)
    assert torch.equal(sent[0].last_hidden_state, on_cpu.last_hidden_state)
