"""The plan of kernels: what is named, what `auto` takes and why, and what cannot run."""

import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import defaults
import pytest
import torch
from heads import make_head
from triton_interpreter import needs_triton

from eagle3.errors import InputError
from eagle3.head.attention import PaddedAttention
from eagle3.head.divergence import SOFT_CROSS_ENTROPY, Divergence, NegativeLogAcceptance
from eagle3.head.fast.chain_keys import ChainKeys
from eagle3.head.fast.chunked_loss import ChunkedLoss, plain_loss_and_gradient
from eagle3.head.fast.elementwise import Elementwise
from eagle3.head.fast.flash_attention import FlashAttention
from eagle3.head.fast.flash_kernels import TorchFlash, flash_obstacle
from eagle3.head.fast.fused_layer import FusedLayer
from eagle3.head.fast.products import Float8Products, Products
from eagle3.head.kernels import KernelPlan, KernelSettings, choose_kernels, kernel_backend
from eagle3.head.layer import PlainLayer
from eagle3.head.loss import plain_loss

PretendGpu = Callable[..., None]
CPU, GPU = torch.device("cpu"), torch.device("cuda")


def kernel_settings(**changes: Any) -> KernelSettings:
    return defaults.part("kernels", **changes).build()


def choose(
    device: torch.device = CPU,
    precision: str = "bf16-mixed",
    head: dict[str, Any] | None = None,
    divergence: Divergence = SOFT_CROSS_ENTROPY,
    **settings: Any,
) -> KernelPlan:
    config = make_head(**head or {}).config
    asked = kernel_settings(**settings)
    return choose_kernels(asked, device=device, precision=precision, config=config, divergence=divergence)


@pytest.fixture
def pretend_gpu(monkeypatch: pytest.MonkeyPatch) -> PretendGpu:
    """A GPU of some compute capability, with PyTorch's flash kernel but, as far as one can look, without Triton."""

    def pretend(*capability: int) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "GPU of 2020")
        monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
        for module in ("kernels", "fast.flash_kernels"):
            monkeypatch.setattr(f"eagle3.head.{module}.find_spec", lambda _: None)

    return pretend


def test_auto_takes_the_fastest_that_can_run_and_one_table_says_why(caplog):
    with caplog.at_level("INFO"):
        plan = choose()
    elementwise, here = plan.loss.elementwise, "this run is on the CPU"
    assert isinstance(elementwise, Elementwise)
    assert plan == KernelPlan(
        PaddedAttention,
        PlainLayer,
        ChunkedLoss(chunk=8192, elementwise=elementwise, kernel=plain_loss_and_gradient, make_products=Products),
    )
    assert [line.split(maxsplit=2) for line in caplog.messages[0].splitlines()[1:5]] == [
        ["attention", "padded", f"triton, flash, torch_flash: needs a CUDA GPU (trainer.accelerator=gpu), {here}"],
        ["layer", "plain", f"fused: Triton needs a CUDA GPU, {here}"],
        ["loss", "chunked", "the fastest"],
        ["matmuls", "bf16-mixed", "kernels.fp8=false"],
    ]
    assert (
        caplog.messages[0].splitlines()[5].split() == f"launch one by one CUDA graphs need a CUDA GPU, {here}".split()
    )
    assert caplog.messages[0].endswith(f"  elementwise PyTorch      Triton needs a CUDA GPU, {here}")
    assert len(caplog.messages) == 1


def test_what_is_named_is_taken(caplog):
    plain = {"attention": "padded", "layer": "plain", "loss": "plain"}
    with caplog.at_level("INFO"):
        assert choose(precision="32-true", **plain) == KernelPlan(PaddedAttention, PlainLayer, plain_loss)
    assert [line.split()[-1] for line in caplog.messages[0].splitlines()[1:4]] == [
        f"kernels.{part}={name}" for part, name in plain.items()
    ]
    with pytest.raises(InputError, match=r"kernels\.attention=triton needs a CUDA GPU .*; kernels\.attention=auto"):
        choose(attention="triton")
    plan = choose(attention="padded", layer="fused", loss="chunked", loss_chunk=7)
    assert (plan.attention, plan.layer.func, plan.loss.chunk) == (PaddedAttention, FusedLayer, 7)
    assert plan.layer.keywords["make_products"] is plan.loss.make_products is Products
    assert plan.layer.keywords["elementwise"] is plan.loss.elementwise


def test_on_a_gpu_without_triton_auto_takes_pytorchs_flash_kernel_and_the_plain_layer(pretend_gpu, caplog):
    pretend_gpu(9, 0)
    with caplog.at_level("INFO"):
        plan = choose(GPU, head={"head_dim": 64})
    assert plan.attention.func is FlashAttention and isinstance(plan.attention.keywords["kernel"], TorchFlash)
    assert isinstance(plan.attention.keywords["chain_keys"], ChainKeys)
    assert plan.layer is PlainLayer
    assert "triton: needs Triton, a part of PyTorch's CUDA builds for Linux; flash: needs flash-attn" in caplog.text
    assert "fused: Triton, a part of PyTorch's CUDA builds for Linux, is not installed" in caplog.text


@needs_triton
def test_a_loss_that_tritons_kernel_does_not_compute_runs_in_pytorch_and_the_table_says_why(caplog, monkeypatch):
    monkeypatch.setattr("eagle3.head.kernels.flash_obstacle", lambda *_: "is not asked for")
    with caplog.at_level("INFO"):
        plan = choose(GPU, divergence=NegativeLogAcceptance())
    assert plan.loss.kernel is plain_loss_and_gradient
    kernels = kernel_backend(GPU)
    names = type(plan.loss.elementwise).__name__, type(kernels.chain_keys).__name__, kernels.loss.__name__
    assert names == ("TritonElementwise", "TritonChainKeys", "triton_loss_and_gradient")
    assert caplog.messages[0].endswith("loss=soft_cross_entropy, here loss.divergence is NegativeLogAcceptance")


@needs_triton
@pytest.mark.parametrize(
    ("changes", "obstacle"),
    [
        ({}, None),
        ({"attention": "padded"}, "CUDA graphs need kernels.attention=triton, here it is padded"),
        ({"loss": "plain"}, "CUDA graphs need kernels.loss=chunked, here it is plain"),
        ({"graphs_obstacle": "Loss is your own"}, "Loss is your own"),
    ],
)
def test_steps_are_recorded_where_nothing_reads_a_batch_on_the_host(changes, obstacle, monkeypatch, caplog):
    monkeypatch.setattr("eagle3.head.kernels.flash_obstacle", lambda *_: None)
    given = {"device": GPU, "precision": "bf16-mixed", "config": make_head().config}
    given["graphs_obstacle"] = changes.get("graphs_obstacle")
    settings = {key: value for key, value in changes.items() if key in vars(kernel_settings())}
    with caplog.at_level("INFO"):
        assert choose_kernels(kernel_settings(**settings), **given).cuda_graphs is (obstacle is None)
    assert (obstacle or "launch      by graph") in caplog.text
    wanted = kernel_settings(**settings | {"cuda_graphs": True})
    with pytest.raises(InputError, match=f"kernels.cuda_graphs=true: {obstacle}") if obstacle else nullcontext():
        assert choose_kernels(wanted, **given).cuda_graphs
    assert not choose_kernels(kernel_settings(**settings | {"cuda_graphs": False}), **given).cuda_graphs


@needs_triton
def test_large_heads_are_launched_one_by_one_unless_graphs_are_named(monkeypatch):
    monkeypatch.setattr("eagle3.head.kernels.flash_obstacle", lambda *_: None)
    monkeypatch.setattr("eagle3.head.kernels.HOST_BOUND", 8)
    assert not choose(GPU).cuda_graphs and choose(GPU, cuda_graphs=True).cuda_graphs


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"fp8": True, "layer": "plain"}, r"kernels\.fp8=true is for kernels\.layer=fused .* kernels\.layer=plain"),
        ({"fp8": True, "loss": "plain"}, r"here kernels\.layer=auto and kernels\.loss=plain; kernels\.fp8=false"),
    ],
)
def test_settings_that_make_no_sense_are_refused_before_anything_runs(settings, message):
    with pytest.raises(InputError, match=message):
        kernel_settings(**settings)


@pytest.mark.parametrize(
    "name, capability, changes, obstacle",
    [
        ("triton", (9, 0), {}, None),
        ("triton", (10, 0), {}, r"is made for Hopper \(compute capability 9\), this is a GPU of 2020"),
        ("triton", (9, 0), {"head_dim": 100}, r"wants 16, 32, 64, 128 or 256 channels a head, here .*head_dim=100"),
        ("torch_flash", (7, 5), {}, r"needs a GPU of compute capability 8\.0 or more, this is a GPU of 2020"),
        ("torch_flash", (9, 0), {"precision": "32-true"}, r"half precision .*, here trainer\.precision=32-true"),
        ("torch_flash", (9, 0), {"head_dim": 264}, r"at most 256, here model\.head_dim=264"),
    ],
)
def test_a_flash_kernel_says_why_it_cannot_run(name, capability, changes, obstacle, pretend_gpu, monkeypatch):
    pretend_gpu(*capability)
    monkeypatch.setattr("eagle3.head.fast.flash_kernels.find_spec", lambda _: object())
    found = flash_obstacle(name, **{"device": GPU, "precision": "bf16-mixed", "head_dim": 64} | changes)
    assert found is None if obstacle is None else re.search(obstacle, found)


def test_float8_takes_the_parts_that_multiply_in_it_also_on_the_cpu():
    plan = choose(fp8=True)
    assert plan.layer.func is FusedLayer
    assert plan.layer.keywords["make_products"] is plan.loss.make_products
    assert plan.loss.make_products.func is Float8Products
    assert plan.loss.make_products.keywords == {"elementwise": plan.loss.elementwise}


@pytest.mark.parametrize(
    "capability, precision, head, obstacle",
    [
        ((8, 6), "bf16-mixed", {}, r"needs a GPU of compute capability 8\.9 or more, this is a GPU of 2020"),
        ((9, 0), "32-true", {}, r"is for trainer\.precision=bf16-mixed, here trainer\.precision=32-true"),
        ((9, 0), "bf16-mixed", {}, r"needs sizes that are multiples of 16, here model\.intermediate_size is 24"),
        ((9, 0), "bf16-mixed", {"intermediate_size": 32}, r"model\.draft_vocab_size is 30"),
        ((8, 9), "bf16-mixed", {"intermediate_size": 32, "draft_vocab_size": 32}, None),
    ],
)
def test_float8_is_refused_where_it_cannot_run(capability, precision, head, obstacle, pretend_gpu):
    pretend_gpu(*capability)
    if obstacle is None:
        assert choose(GPU, precision, head, fp8=True).layer.func is FusedLayer
    else:
        with pytest.raises(InputError, match=rf"kernels\.fp8=true .*{obstacle}; kernels\.fp8=false multiplies"):
            choose(GPU, precision, head, fp8=True, attention="padded")
