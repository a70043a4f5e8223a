"""A step in static memory: what fills a batch up changes nothing, and a replayed graph gives the step's numbers."""

from functools import partial
from itertools import pairwise

import pytest
import torch
from heads import EMBEDDING, TEACHER_HEAD, make_head, ragged_samples, ttt_batch
from kernel_cases import MANY_TURNS, PlainKernel
from pairs import all_pairs
from stores import random_sample
from torch import Tensor

from eagle3.head.batch import TttBatch
from eagle3.head.fast.chain_keys import ChainKeys
from eagle3.head.fast.chunked_loss import ChunkedLoss, plain_loss_and_gradient
from eagle3.head.fast.elementwise import Elementwise
from eagle3.head.fast.flash_attention import FlashAttention
from eagle3.head.fast.fused_layer import FusedLayer
from eagle3.head.fast.products import Products
from eagle3.head.loss import UnrollLoss
from eagle3.head.segments import Segments
from eagle3.head.unroll import unroll
from eagle3.training.optim import trained
from eagle3.training.step_graphs import Sizes, StaticBatch

STEPS = 3
IN_STEP = {"anchors_in_step": 41.5, "samples_in_step": 3.5}
LENGTHS = [[100] * 5, [100] * 5, [300, 200], [17] * 20, [499]]  # of documents; the first two share a graph


class AnySegments(PlainKernel):
    """A static batch does not know the longest segment, for which only the kernels of a library ask."""

    @staticmethod
    def segments(where: Segments) -> list[tuple[slice, slice]]:
        bounds = where.query_bounds.tolist(), where.key_bounds.tolist()
        queries, keys = ([slice(*pair) for pair in pairwise(each)] for each in bounds)
        return [*zip(queries, keys, strict=True)]


def step(batch: TttBatch, normalize: str) -> list[Tensor]:
    """Loss, sums of metrics and gradients, by the parts that a graph records."""
    head = make_head(fc_norm=True, norm_output=True)
    parts = {"elementwise": Elementwise(), "make_products": Products}
    attention = partial(FlashAttention, kernel=AnySegments(), chain_keys=ChainKeys())
    hidden = unroll(head, EMBEDDING, batch, STEPS, attention, partial(FusedLayer, **parts))
    objective = UnrollLoss(decay=0.8, normalize=normalize)
    compute = ChunkedLoss(chunk=7, kernel=plain_loss_and_gradient, **parts)
    loss, metrics = objective(head, hidden, TEACHER_HEAD, batch, compute)
    return [loss.detach(), metrics.as_tensor(), *torch.autograd.grad(loss, [*head.parameters()])]


PACKS = {
    "ragged": ragged_samples,
    "many turns": lambda: [random_sample(turns, seed=number) for number, turns in enumerate(MANY_TURNS)],
    "one turn": lambda: [random_sample([0, 0, 1, 1, 1, 1])],
}


@all_pairs(pack=[*PACKS], normalize=["token", "sequence"])
def test_what_fills_a_batch_up_changes_nothing(pack, normalize):
    batch = ttt_batch(PACKS[pack](), ttt_steps=STEPS, **IN_STEP)
    sizes = Sizes.for_batch(batch)
    assert sizes.tokens > len(batch.pack.input_ids) and sizes.anchors > len(batch.anchors)
    filled = StaticBatch(batch, sizes, STEPS)
    expected = step(batch, normalize)
    assert expected[0] > 0.01
    for one, other in zip(step(filled.batch, normalize), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_a_smaller_batch_leaves_nothing_of_the_one_before():
    patterns = [[0, 1, 1, 1], [0, 0, 1, 1, 0, 2, 2]]
    large = ttt_batch(ragged_samples()[:2], ttt_steps=STEPS, **IN_STEP)
    small = ttt_batch([random_sample(turns, seed=9) for turns in patterns], ttt_steps=STEPS, **IN_STEP)
    assert len(large.segments) == len(small.segments) == 2
    sizes = Sizes.for_batch(large)
    filled = StaticBatch(large, sizes, STEPS)
    filled.write(small)
    for one, other in zip(step(filled.batch, "token"), step(small, "token"), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
    alone = StaticBatch(small, sizes, STEPS)
    assert all(
        torch.equal(one, other) for one, other in zip(filled.batch.tensors(), alone.batch.tensors(), strict=True)
    )


def test_packs_of_a_training_have_few_sizes():
    def sizes(tokens: int, answer: int) -> Sizes:
        samples = [random_sample([0] * (100 - answer) + [1] * answer) for _ in range(tokens // 100)]
        return Sizes.for_batch(ttt_batch(samples, ttt_steps=STEPS))

    assert len({sizes(tokens, answer) for tokens in (2000, 1900) for answer in range(40, 70)}) <= 12
    assert sizes(2000, 50).tokens == 2048 + 64 and sizes(2000, 50).anchors - 1000 <= 64


class OwnLoss(UnrollLoss):
    pass


def test_own_losses_and_sharded_heads_are_not_recorded():
    from random_head import SMALL
    from train_step import random_step, training_run

    module = random_step(SMALL, training_run(["trainer=cpu"])).module
    assert module._graphs_obstacle() is None
    module.loss = OwnLoss(decay=1.0, normalize="token")
    assert str(module._graphs_obstacle()).startswith("OwnLoss is your own")
    module._device_mesh = object()
    assert "trainer=fsdp" in str(module._graphs_obstacle())


@pytest.mark.gpu
@pytest.mark.parametrize("setting", ["loss.normalize=token", "loss.normalize=sequence", "model.train_lm_head=false"])
def test_a_graph_gives_the_numbers_of_the_step_without_one(setting):
    from random_head import SMALL, RandomSamples
    from train_step import random_step, training_run

    def steps(*overrides: str) -> list[list[Tensor]]:
        run = random_step(SMALL, training_run([setting, *overrides]))
        samples = RandomSamples(SMALL, torch.bfloat16, seed=0)
        batches = [samples.pack(lengths, 0.6, ttt_steps=run.module.ttt_steps) for lengths in LENGTHS]
        results = []
        for batch in batches:
            run(batch.to(torch.device("cuda")))
            results.append([each.grad.clone() for each in trained(run.module.head)])
        return results

    for one, other in zip(steps("kernels.cuda_graphs=true"), steps("kernels.cuda_graphs=false"), strict=True):
        for graph, plain in zip(one, other, strict=True):
            assert (graph - plain).norm() <= 1e-2 * plain.norm()
