"""Attention of a batch against that of one anchor at a time, forward and backward, on ragged packs.

FlashAttention runs on the CPU too: on `PlainKernel`, which does what the kernels of a GPU promise, and no more.
"""

from bisect import bisect_right

import pytest
import torch
from heads import ragged_samples, ttt_batch
from kernel_cases import MANY_TURNS, PlainKernel, flash, on_gpu
from pairs import all_pairs
from stores import random_sample
from torch import Tensor

from eagle3.head.attention import KeysValues, MakeAttention, PaddedAttention
from eagle3.head.batch import TttBatch
from eagle3.head.fast.flash_kernels import TorchFlash

STEPS, QUERY_HEADS, GROUPS, CHANNELS = 4, 4, 2, 6


class OneByOne:
    """The reference: for one anchor after the other, the softmax over all its keys."""

    def __init__(self, context: KeysValues, batch: TttBatch) -> None:
        bounds = batch.pack.token_bounds
        self.context, self.rows = context, [range(bounds[bisect_right(bounds, t) - 1], t + 1) for t in batch.anchors]

    def __call__(self, query: Tensor, chain: list[KeysValues]) -> Tensor:
        outputs = [query[:0]]
        for anchor, rows in enumerate(self.rows):
            keys, values = (
                torch.cat([part[rows.start : rows.stop], *(own[anchor, None] for own in chained)])
                for part, *chained in zip(self.context, *chain, strict=True)
            )
            heads = query[anchor].unflatten(0, (keys.shape[1], -1))  # (G, P, C)
            weights = (torch.einsum("gpc,ngc->gpn", heads, keys) * heads.shape[-1] ** -0.5).softmax(-1)
            outputs.append(torch.einsum("gpn,ngc->gpc", weights, values.to(weights.dtype)).flatten(0, 1)[None])
        return torch.cat(outputs).to(query.dtype)


def outputs_and_gradients(
    attention: MakeAttention,
    batch: TttBatch,
    step: int,
    *,
    heads: tuple[int, int, int] = (QUERY_HEADS, GROUPS, CHANNELS),
    dtype: torch.dtype = torch.double,
) -> list[Tensor]:
    """Of random queries, keys and values, drawn in bfloat16: the same ones in every type."""
    generator = torch.Generator().manual_seed(0)
    query_heads, groups, channels = heads

    def drawn(*shape: int) -> Tensor:
        x = torch.randn(*shape, channels, generator=generator).bfloat16()
        return x.to(batch.anchors.device, dtype)

    def leaf(*shape: int) -> Tensor:
        return drawn(*shape).requires_grad_()

    tokens, anchors = len(batch.pack.input_ids), len(batch.anchors)
    query, key, value = leaf(anchors, query_heads), leaf(tokens, groups), leaf(tokens, groups)
    chain = [(leaf(anchors, groups), leaf(anchors, groups)) for _ in range(step)]
    output = attention((key, value), batch)(query, chain)
    inputs = [query, key, value, *(part for pair in chain for part in pair)]
    gradients = torch.autograd.grad(output, inputs, drawn(anchors, query_heads), materialize_grads=True)
    return [output.detach(), *gradients]


FAST = {"padded": PaddedAttention, "flash": flash(PlainKernel())}
CLOSE = {"rtol": 1e-12, "atol": 1e-12}
PACKS: dict[str, list[list[int]] | None] = {
    "ragged": None,
    "many turns": MANY_TURNS,
    "no anchors at all": [[0, 0, 0]],
    "between samples without anchors": [[0, 0], [0, 1, 1, 1], [0, 0, 0]],
    "last without anchors, of the same length": [[0, 1, 1, 1], [0, 0, 0, 0]],
}


@all_pairs(fast=[*FAST], step=[0, 1, 3], packed=[*PACKS])
def test_attention_equals_that_of_one_anchor_at_a_time(fast, step, packed):
    samples = ragged_samples() if PACKS[packed] is None else [random_sample(turns) for turns in PACKS[packed] or []]
    batch = ttt_batch(samples, ttt_steps=STEPS)
    expected = outputs_and_gradients(OneByOne, batch, step)
    assert not len(batch.anchors) or expected[0].abs().max() > 0.1
    for one, other in zip(expected, outputs_and_gradients(FAST[fast], batch, step), strict=True):
        torch.testing.assert_close(one, other, **CLOSE)


def test_a_long_sample_does_not_make_short_ones_long():
    batch = ttt_batch([random_sample([0, 1, 1] * size) for size in (1, 20, 1, 2)], ttt_steps=STEPS)
    context = (torch.randn(len(batch.pack.input_ids), 1, 2),) * 2
    assert [tuple(group.key.shape[:2]) for group in PaddedAttention(context, batch).groups] == [(2, 3), (1, 60), (1, 6)]


def test_a_gradient_that_is_one_number_for_all_reaches_the_kernels_as_memory():
    batch = ttt_batch(ragged_samples(), ttt_steps=STEPS)
    key, query = torch.randn(len(batch.pack.input_ids), 1, 2), torch.randn(len(batch.anchors), 1, 2, requires_grad=True)
    flash(PlainKernel())((key, key), batch)(query, [(query, query)]).sum().backward()
    assert query.grad.isfinite().all()


def test_flash_attention_computes_each_pair_once_in_as_many_calls_as_turns_can_be_halved():
    turns = [0, 0] + [turn for turn in range(1, 12) for _ in range(4)]
    batch = ttt_batch([random_sample(turns), random_sample([0, 1, 1, 1])], ttt_steps=STEPS)
    kernel = PlainKernel()
    outputs_and_gradients(flash(kernel), batch, 0)
    positions = batch.pack.positions[batch.anchors]
    assert sum(kernel.pairs) == int((positions + 1).sum())
    assert len(kernel.pairs) == 1 + 4  # 11 turns
    assert {*kernel.tokens} == {len(batch.pack.input_ids)}  # turns' keys are not gathered, which would need memory


@pytest.mark.parametrize("step", [0, 2])
def test_the_kernels_of_the_installed_pytorch_take_our_arguments(step):
    """On tensors without data: PyTorch checks arguments and infers shapes, without a GPU."""
    meta = torch.device("meta")
    batch = ttt_batch(ragged_samples(), ttt_steps=STEPS).to(meta)
    output, *gradients = outputs_and_gradients(flash(TorchFlash()), batch, step, dtype=torch.bfloat16)
    assert output.device == meta and output.shape == (len(batch.anchors), QUERY_HEADS, CHANNELS)
    tokens = len(batch.pack.input_ids)
    assert [len(gradient) for gradient in gradients[:3]] == [len(batch.anchors), tokens, tokens]


@pytest.mark.parametrize("kernel, device", [pytest.param(PlainKernel(), "cpu", id="PlainKernel"), *on_gpu("cuda")])
@all_pairs(
    heads=[(4, 4, 64), (8, 2, 128), (6, 1, 256)],
    step=[0, 1, 6],
    packed=["ragged", "many turns", "one anchor a turn", "no anchors", "long"],
)
def test_under_autocast_flash_attention_is_about_as_exact_in_bfloat16_as_the_padded_one(
    kernel, device, heads, step, packed
):
    turns = {
        "many turns": MANY_TURNS,
        "one anchor a turn": [[0, 0, 1, 1, 0, 2, 2], [0, 1, 1]] * 8,
        "no anchors": [[0, 0, 0]],
        "long": [[0] * 350 + [1] * 150 + [0] * 55 + [2] * 180, [0] * 129 + [1] * 257],
    }
    if device == "cpu":
        turns["long"] = [[0] * 40 + [1] * 20 + [0] * 5 + [2] * 20]  # a GPU has blocks of 128
    samples = [random_sample(one) for one in turns[packed]] if packed in turns else ragged_samples()
    batch = ttt_batch(samples, ttt_steps=STEPS).to(torch.device(device))
    exact = outputs_and_gradients(PaddedAttention, batch, step, heads=heads)
    with torch.autocast(device, torch.bfloat16):
        half = {"heads": heads, "dtype": torch.bfloat16}
        padded = outputs_and_gradients(PaddedAttention, batch, step, **half)
        fast = outputs_and_gradients(flash(kernel, device), batch, step, **half)
    for truth, reference, other in zip(exact, padded, fast, strict=True):
        assert other.dtype == torch.bfloat16
        allowed = 4 * (reference.double() - truth).norm() + 1e-3 * truth.norm()
        assert (other.double() - truth).norm() <= allowed
