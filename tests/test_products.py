"""Products in float8: their rounding, the layer that is made of them, and the GPU's against the CPU's."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from test_fused_layer import HEADS, errors, step
from torch import Tensor

from eagle3.features.pack import pack_samples
from eagle3.features.sample import Sample
from eagle3.head import elementwise
from eagle3.head.draft_head import DraftHead
from eagle3.head.fused_layer import FusedLayer
from eagle3.head.layer import PlainLayer
from eagle3.head.products import Float8Products

Float8Layer = partial(FusedLayer, make_products=Float8Products)


def random(*shape: int, seed: int = 0) -> Tensor:
    """bf16 numbers of rows that differ in scale, as gradients do."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.logspace(-8, 3, shape[0])[:, None]
    return (torch.randn(shape, generator=generator) * scale).bfloat16()


def test_rounding_keeps_each_rows_largest_and_errs_by_a_sixteenth_at_most() -> None:
    x = torch.cat([random(9, 200), torch.zeros(1, 200).bfloat16()])
    values, scale = elementwise.quantise(x)
    assert values.dtype == torch.float8_e4m3fn and scale.dtype == torch.float32
    back = values.float() * scale
    torch.testing.assert_close(back.abs().amax(1), x.float().abs().amax(1))
    normal = values.float().abs() >= 2**-6  # below, the steps are equal: an error of half a step
    error = (back - x.float()).abs()
    assert (error <= x.float().abs() / 16)[normal].all()
    assert (error <= 2**-10 * scale + 1e-30)[~normal].all()


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("num_steps", [1, 4])
def test_without_rounding_the_layer_is_the_plain_one(
    head: str,
    num_steps: int,
    make_head: Callable[..., DraftHead],
    ragged_samples: list[Sample],
    embedding: Tensor,
    teacher_head: Tensor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(elementwise, "quantise", lambda x: (x, x.new_ones(len(x), 1)))
    pack = pack_samples(ragged_samples, num_steps=num_steps)
    plain, float8 = (
        step(layer, make_head(**HEADS[head]), embedding, teacher_head, [pack], num_steps)
        for layer in (PlainLayer, Float8Layer)
    )
    assert max(errors(float8, plain).values()) < 1e-7
