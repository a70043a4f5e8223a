"""Faster attention against the plain one, forward and backward, on ragged packs."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from eagle3.features.pack import Pack, pack_samples
from eagle3.features.sample import Sample
from eagle3.head.attention import Attention, DenseAttention, PaddedAttention

STEPS, QUERY_HEADS, GROUPS, CHANNELS = 4, 4, 2, 6


def outputs_and_gradients(attention: type[Attention], pack: Pack, step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)

    def leaf(*shape: int) -> Tensor:
        return torch.randn(*shape, CHANNELS, generator=generator, dtype=torch.double, requires_grad=True)

    tokens, rows = len(pack.input_ids), len(pack.rows)
    query, key, value = leaf(rows, QUERY_HEADS), leaf(tokens, GROUPS), leaf(tokens, GROUPS)
    own = [(leaf(rows, GROUPS), leaf(rows, GROUPS)) for _ in range(step)]
    output = attention((key, value), pack)(query, own)
    inputs = [query, key, value, *(part for pair in own for part in pair)]
    direction = torch.randn(output.shape, generator=generator, dtype=torch.double)
    return [output, *torch.autograd.grad(output, inputs, direction)]


@pytest.mark.parametrize("step", [0, 1, 3])
def test_padded_attention_equals_the_dense_one(ragged_samples: list[Sample], step: int) -> None:
    pack = pack_samples(ragged_samples, num_steps=STEPS)
    dense = outputs_and_gradients(DenseAttention, pack, step)
    padded = outputs_and_gradients(PaddedAttention, pack, step)
    assert dense[0].abs().max() > 0.1
    for one, other in zip(dense, padded, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)  # softmax in float32


@pytest.mark.parametrize(
    "turns",
    [[[0, 0, 0]], [[0, 0], [0, 1, 1, 1], [0, 0, 0]], [[0, 1, 1, 1], [0, 0]]],
    ids=["no rows at all", "between samples without rows", "last sample without rows"],
)
def test_samples_without_trained_rows_change_nothing(make_sample: Callable[..., Sample], turns: list) -> None:
    pack = pack_samples([make_sample(one) for one in turns], num_steps=STEPS)
    for one, other in zip(
        outputs_and_gradients(DenseAttention, pack, 1), outputs_and_gradients(PaddedAttention, pack, 1), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)  # softmax in float32
