"""Products in float8: their rounding, the layer that is made of them, and the GPU's against the CPU's."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from heads import EMBEDDING, TEACHER_HEAD, make_head, ragged_samples, ttt_batch
from kernel_cases import HEADS, SEQUENCE, Loss, chunked, errors, exact_and_in_bf16, fused, step
from torch import Tensor
from triton_interpreter import in_triton

from eagle3.head.fast.elementwise import Elementwise
from eagle3.head.fast.products import Float8Products, Products
from eagle3.head.kernels import kernel_backend
from eagle3.head.layer import MakeLayer, PlainLayer

SHAPES = [(1, 16, 16), (5, 32, 48), (300, 208, 64)]  # rows, input, output


def products(weight: Tensor) -> Float8Products:
    return Float8Products(weight, elementwise=kernel_backend(weight.device).elementwise)


def in_float8(device: str = "cpu") -> tuple[MakeLayer, Loss]:
    layer = partial(fused(device), make_products=products)
    return layer, (SEQUENCE, replace(chunked(50, device), make_products=products))


def random(*shape: int, seed: int = 0) -> Tensor:
    """bf16 numbers; the scale differs between rows, as that of gradients does, and far less within one."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.logspace(-8, 3, shape[0])[torch.randperm(shape[0], generator=generator), None]
    return (torch.randn(shape, generator=generator) * torch.randn(shape, generator=generator).exp() * scale).bfloat16()


def error(ours: Tensor, theirs: Tensor) -> float:
    return float((ours.double() - theirs.double()).norm() / theirs.double().norm())


def test_rounding_keeps_the_largest_of_each_row_and_errs_by_a_sixteenth_at_most():
    x = torch.cat([random(9, 200), torch.zeros(1, 200).bfloat16()])
    values, scale = Elementwise().quantise(x)
    assert values.dtype == torch.float8_e4m3fn and scale.dtype == torch.float32
    back = values.float() * scale
    torch.testing.assert_close(back.abs().amax(1), x.float().abs().amax(1))
    normal = values.float().abs() >= 2**-6
    difference = (back - x.float()).abs()
    assert (difference <= x.float().abs() / 15.9)[normal].all()
    assert (difference <= 1.01 * 2**-10 * scale)[~normal].all()  # half of a step, all of which are equal down there


@pytest.mark.parametrize("num_rows, size_in, size_out", SHAPES)
def test_products_are_near_the_exact_ones(num_rows, size_in, size_out):
    x, weight, grad = random(num_rows, size_in), random(size_out, size_in, seed=1), random(num_rows, size_out, seed=2)
    float8, exact = products(weight), Products(weight.double())
    for rows in (slice(None), slice(None, 16), slice(16, None) if size_out > 16 else slice(None)):
        added = random(num_rows, len(weight[rows]), seed=3)
        product = float8.forward(x, rows, added.clone())
        assert product.dtype == torch.bfloat16
        part = grad[:, rows].contiguous()
        for ours, theirs in (
            (float8.forward(x, rows), exact.forward(x.double(), rows)),
            (product, exact.forward(x.double(), rows, added.double())),
            (float8.backward(part, rows), exact.backward(part.double(), rows)),
            (float8.backward(part, rows, x.clone()), exact.backward(part.double(), rows, x.double())),
        ):
            assert ours.shape == theirs.shape and error(ours, theirs) < 0.08


@pytest.mark.parametrize("head", ["EAGLE-3.1", "yarn"])
def test_without_rounding_layer_and_loss_are_the_plain_ones(head, monkeypatch):
    monkeypatch.setattr(Elementwise, "quantise", lambda _, x: (x, x.new_ones(len(x), 1)))
    batch = ttt_batch(ragged_samples(), ttt_steps=4)
    plain, float8 = (
        step(layer, make_head(**HEADS[head]), EMBEDDING, TEACHER_HEAD, [batch], 4, loss_of=loss)
        for layer, loss in ((PlainLayer, (SEQUENCE, chunked(7))), in_float8())
    )
    assert max(errors(float8, plain).values()) < 1e-7


def test_all_weights_but_those_of_fc_are_multiplied_in_float8(monkeypatch):
    shapes: dict[str, set[torch.Size]] = {"forward": set(), "backward": set()}

    def recorded(name: str) -> None:
        method = getattr(Float8Products, name)

        def run(products: Float8Products, *args: Any, **settings: Any) -> Tensor:
            shapes[name].add(products.weight.shape)
            return method(products, *args, **settings)

        monkeypatch.setattr(Float8Products, name, run)

    recorded("forward")
    recorded("backward")
    head = make_head()
    layer, loss = in_float8()
    step(layer, head, EMBEDDING, TEACHER_HEAD, [ttt_batch(ragged_samples(), ttt_steps=2)], 2, loss_of=loss)
    attention, mlp = head.midlayer.self_attn, head.midlayer.mlp
    qkv = [attention.q_proj, attention.k_proj, attention.v_proj]
    weights = [*torch.cat([each.weight for each in qkv]).chunk(2, dim=1)]  # of the embedding and the hidden state
    weights += [torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])]
    weights += [attention.o_proj.weight, mlp.down_proj.weight, head.lm_head.weight]
    assert shapes["forward"] == shapes["backward"] == {weight.shape for weight in weights}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_loss_and_gradients_are_bf16s_within_the_noise_of_float8(device):
    """In the mean over some heads; the noise is between 1 and 12 % of each gradient, bf16's is below 1 %."""
    sizes = HEADS["EAGLE-3.1"] | {"intermediate_size": 32, "draft_vocab_size": 32}
    seeds = range(6)
    layer, (_, loss) = in_float8(device)
    runs = [exact_and_in_bf16(sizes, seed, device, layer, loss)[1] for seed in seeds]
    noise = {name: sum(run[name] for run in runs) / len(seeds) for name in runs[0]}
    assert noise.pop("loss") < 1e-3
    assert all(0.01 < value < 0.12 for value in noise.values()), noise


def quantised_equal_pytorch(device: str) -> None:
    """On float8's own numbers, as Triton's interpreter does not round to the nearest; on a GPU on all numbers."""
    from eagle3.head.fast.elementwise_kernels import TritonElementwise

    exact = random(7, 1500).float().clamp(-448, 448).to(torch.float8_e4m3fn).float()
    exact[:, 0], exact[3] = 448, 0
    exact *= 2.0 ** torch.arange(-30, 40, 10)[:, None]
    inputs = [exact, exact.bfloat16(), exact[:, :48]]
    if device == "cuda":
        inputs += [random(9, size) for size in (24, 4096, 14336, 32000)] + [random(9, 4096).float()]
    for x in inputs:
        for ours, theirs in zip(TritonElementwise().quantise(x.to(device)), Elementwise().quantise(x), strict=True):
            assert ours.dtype == theirs.dtype
            assert torch.equal(ours.cpu().float(), theirs.float())


test_the_kernel_rounds_as_plain_pytorch = in_triton(quantised_equal_pytorch)


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [0, 1, 5, 300])
def test_products_on_a_gpu_are_those_of_the_cpu(num_rows):
    """But for the order of sums: fast accumulation keeps fewer bits of them."""
    weight = random(96, 208, seed=1)
    on_cpu, on_gpu = products(weight), products(weight.cuda())
    x, grad = random(num_rows + 1, 208)[1:], random(num_rows + 1, 96, seed=2)[1:]
    for rows in (slice(None), slice(None, 64), slice(64, None)):
        added, part = random(num_rows + 1, len(weight[rows]), seed=3)[1:], grad[:, rows].contiguous()
        for ours, theirs in (
            (on_gpu.forward(x.cuda(), rows), on_cpu.forward(x, rows)),
            (on_gpu.forward(x.cuda(), rows, added.cuda()), on_cpu.forward(x, rows, added)),
            (on_gpu.backward(part.cuda(), rows), on_cpu.backward(part, rows)),
        ):
            assert ours.dtype == theirs.dtype == torch.bfloat16 and ours.shape == theirs.shape
            assert num_rows == 0 or error(ours.cpu(), theirs) < 0.01
