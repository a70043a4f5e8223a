"""The chunked loss against the plain one: numbers, gradients, precision, memory; its kernel against plain PyTorch."""

import weakref
from typing import Any

import pytest
import torch
from divergences import BY_NAME
from heads import EMBEDDING, TEACHER_HEAD, make_head, ragged_samples, ttt_batch
from kernel_cases import TOKEN, chunked, random_turns
from pairs import all_pairs
from stores import random_sample, with_last_in_float32
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton_interpreter import in_triton

from eagle3.head.anchors import pairs_before
from eagle3.head.batch import TttBatch
from eagle3.head.divergence import SOFT_CROSS_ENTROPY
from eagle3.head.draft_head import DraftHead
from eagle3.head.fast.chunked_loss import even_chunks, plain_loss_and_gradient
from eagle3.head.loss import ComputeLoss, UnrollLoss, UnrollMetrics, plain_loss
from eagle3.head.unroll import unroll
from eagle3.target.facts import PLAIN, LogitTransform

STEPS = 3
GRADIENTS = ["norm.weight", "lm_head.weight", *(f"step {k}" for k in range(STEPS))]


@pytest.fixture(params=range(2))
def batch(request: pytest.FixtureRequest) -> TttBatch:
    """Teachers inside and outside the draft vocabulary, as everywhere in these tests: D is 30 of 50."""
    if request.param == 0:
        return ttt_batch(ragged_samples(), ttt_steps=STEPS)
    samples = [random_sample(random_turns(10 * request.param + number), seed=number) for number in range(5)]
    return ttt_batch(samples, ttt_steps=STEPS, anchors_in_step=41.5, samples_in_step=3.5)


def run(
    compute: ComputeLoss,
    head: DraftHead,
    states: list[Tensor],
    teacher_head: Tensor,
    batch: TttBatch,
    objective: UnrollLoss = TOKEN,
    transform: LogitTransform = PLAIN,
) -> tuple[Tensor, UnrollMetrics, list[Tensor]]:
    """Loss, metrics and the gradients of the norm, of lm_head and of every step's states; scaled like an average."""
    head.zero_grad()
    states = [state.detach().clone().requires_grad_() for state in states]
    loss, metrics = objective(head, states, teacher_head, batch, compute, transform)
    (loss * 0.5).backward()
    gradients = [head.norm.weight.grad, head.lm_head.weight.grad, *(state.grad for state in states)]
    return loss.detach(), metrics, [gradient.clone() for gradient in gradients]


class HeavyFirst(UnrollLoss):
    """As docs/how-to/own-loss.md: weights of one's own."""

    def anchor_weights(self, batch: TttBatch, dtype: torch.dtype) -> Tensor:
        weights = super().anchor_weights(batch, dtype)
        return torch.where(torch.arange(len(weights)) == 0, 3 * weights, weights)


@all_pairs(
    divergence=BY_NAME, normalize=["token", "sequence"], chunk=[1, 4, 7, 10_000], kind=[UnrollLoss, HeavyFirst],
    transform=[PLAIN, LogitTransform(scale=2.0, soft_cap=0.7)],
)  # fmt: skip
def test_loss_metrics_and_every_gradient_are_those_of_the_plain_loss(
    batch, divergence, normalize, chunk, kind, transform
):
    head = make_head()
    # Of three teachers two are followed, so that some anchors are right at several steps and others at some.
    head.lm_head.weight.data.copy_(TEACHER_HEAD)
    favourite = head.draft_ids[(batch.pack.last_hidden_state * head.norm.weight @ TEACHER_HEAD.T).argmax(-1)]
    batch.pack.teacher_argmax.copy_(
        torch.where(torch.arange(len(favourite)) % 3 > 0, favourite, batch.pack.teacher_argmax)
    )
    asked = [
        batch.pack.teacher_index[(batch.anchors + 1 + step).clamp(max=len(batch.pack.teacher_index) - 1)]
        for step in range(STEPS)
    ]
    states = [batch.pack.last_hidden_state[teacher] for teacher in asked]
    objective = kind(decay=0.8, normalize=normalize, divergence=divergence)
    plain, fast = (
        run(compute, head, states, TEACHER_HEAD, batch, objective, transform)
        for compute in (plain_loss, chunked(chunk))
    )
    weight_of_first, of_second = objective.weights(batch, STEPS, torch.double)[0, :2]  # anchors of one sample
    assert weight_of_first == (3 * of_second if kind is HeavyFirst else of_second)
    torch.testing.assert_close(fast[0], plain[0])
    torch.testing.assert_close(vars(fast[1]), vars(plain[1]))
    assert 0 < plain[1].alive[1] < plain[1].correct[1] < plain[1].trained[1]
    for name, ours, theirs in zip(GRADIENTS, fast[2], plain[2], strict=True):
        torch.testing.assert_close(ours, theirs, msg=lambda text, name=name: f"{name}: {text}")


def test_a_fixed_lm_head_has_no_gradient_and_changes_no_other(batch, monkeypatch):
    head = make_head()
    states = unroll(head, EMBEDDING, batch, STEPS)
    expected = run(plain_loss, head, states, TEACHER_HEAD, batch)
    head.lm_head.requires_grad_(False)
    monkeypatch.setattr("eagle3.head.fast.chunked_loss.add_product", None)  # that gradient is not even computed
    states = [state.detach().requires_grad_() for state in states]
    loss, metrics = TOKEN(head, states, TEACHER_HEAD, batch, chunked(4), PLAIN)
    head.zero_grad()
    (loss * 0.5).backward()
    assert head.lm_head.weight.grad is None
    torch.testing.assert_close(loss.detach(), expected[0])
    torch.testing.assert_close(vars(metrics), vars(expected[1]))
    gradients = [head.norm.weight.grad, *(state.grad for state in states)]
    torch.testing.assert_close(gradients, [expected[2][0], *expected[2][2:]])


def test_a_teacher_outside_the_draft_vocabulary_counts_as_wrong_even_where_the_head_picks_its_neighbour():
    head, batch = make_head(), ttt_batch([random_sample([0, 1, 1, 1, 1])], ttt_steps=1)
    neighbour = int((head.draft_ids.diff() > 1).nonzero()[0]) + 1
    batch.pack.teacher_argmax[:] = head.draft_ids[neighbour] - 1
    head.norm.weight.data.fill_(1)
    head.lm_head.weight.data.zero_()[neighbour] = 1
    states = [torch.ones(len(batch.anchors), head.config.hidden_size, dtype=torch.double)]
    loss, metrics, gradients = run(chunked(4), head, states, TEACHER_HEAD, batch)
    assert (float(loss), metrics.trained.tolist(), metrics.correct.tolist()) == (0, [3], [0])
    assert all(float(gradient.abs().sum()) == 0 for gradient in gradients)


def test_a_pack_without_anchors_has_no_loss_and_no_gradient():
    head = make_head()
    batch = ttt_batch([random_sample([0, 0, 1, 0])], ttt_steps=STEPS, anchors_in_step=1.0)
    states = [torch.zeros(0, head.config.hidden_size, dtype=torch.double)] * STEPS
    loss, metrics, gradients = run(chunked(4), head, states, TEACHER_HEAD, batch)
    assert float(loss) == 0
    assert metrics.as_tensor().sum() == 0
    assert all(float(gradient.abs().sum()) == 0 for gradient in gradients)


def test_without_gradients_the_loss_and_the_metrics_are_the_same(batch):
    head = make_head()
    expected = run(chunked(5), head, unroll(head, EMBEDDING, batch, STEPS), TEACHER_HEAD, batch)
    with torch.inference_mode():
        loss, metrics = TOKEN(head, unroll(head, EMBEDDING, batch, STEPS), TEACHER_HEAD, batch, chunked(5))
    torch.testing.assert_close(loss, expected[0])
    torch.testing.assert_close(vars(metrics), vars(expected[1]))


def test_a_second_backward_pass_is_refused_and_not_wrong():
    head, batch = make_head(), ttt_batch(ragged_samples(), ttt_steps=STEPS)
    loss, _ = TOKEN(head, unroll(head, EMBEDDING, batch, STEPS), TEACHER_HEAD, batch, chunked(5))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_states_that_no_step_trains_have_no_gradient_whatever_they_hold():
    head, batch = make_head(), ttt_batch(ragged_samples(), ttt_steps=STEPS)
    states = [state.detach() for state in unroll(head, EMBEDDING, batch, STEPS)]
    trained = [batch.anchor_steps > step for step in range(STEPS)]
    expected = run(chunked(5), head, states, TEACHER_HEAD, batch)[2]
    for state, anchors in zip(states, trained, strict=True):
        state[~anchors] = torch.inf
    gradients = run(chunked(5), head, states, TEACHER_HEAD, batch)[2]
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(gradients, expected, strict=True))
    assert not all(anchors.all() for anchors in trained)
    assert all(not state[~anchors].any() for state, anchors in zip(gradients[2:], trained, strict=True))


def wide_pack() -> TttBatch:
    return ttt_batch([random_sample([0] * 3 + [1] * 60, seed=number) for number in range(4)], ttt_steps=STEPS)


@pytest.mark.parametrize("autocast", [True, False], ids=["autocast", "bf16 weights"])
def test_bf16_is_no_further_from_float64_than_the_plain_loss_is(autocast):
    batch, head = wide_pack(), make_head()
    batch.pack.teacher_argmax[:] = head.draft_ids[0]  # every anchor counts
    for parameter in head.parameters():  # the same numbers in every precision
        parameter.data.copy_(parameter.data.bfloat16())
    states = [state.detach().bfloat16() for state in unroll(head, EMBEDDING, batch, STEPS)]
    exact = run(plain_loss, head, [state.double() for state in states], TEACHER_HEAD, batch)
    head = head.to(torch.float32 if autocast else torch.bfloat16)

    def errors(compute: ComputeLoss) -> list[float]:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss, _, gradients = run(compute, head, states, TEACHER_HEAD.float(), batch)
        pairs = zip([loss, *gradients], [exact[0], *exact[2]], strict=True)
        return [float((ours - theirs).norm() / theirs.norm()) for ours, theirs in pairs]

    plain, fast = errors(plain_loss), errors(chunked(50))
    for name, ours, theirs in zip(["loss", *GRADIENTS], fast, plain, strict=True):
        assert ours < 1.05 * theirs + 1e-6, name
    assert max(fast) < 0.02
    assert max(plain[0], fast[0]) < 1e-5  # of logits in bfloat16 the loss is summed in float32


def test_a_teacher_head_in_bf16_still_gives_logits_in_float32():
    batch, head, teacher_head = wide_pack(), make_head(), TEACHER_HEAD.bfloat16()
    batch.pack.last_hidden_state.copy_(batch.pack.last_hidden_state.bfloat16())
    states, head = [state.float() for state in unroll(head, EMBEDDING, batch, STEPS)], head.float()
    half = run(chunked(50), head, states, teacher_head, batch)
    wide = run(chunked(50), head, states, teacher_head.float(), batch)
    torch.testing.assert_close((half[0], half[2]), (wide[0], wide[2]))


class LiveRows(TorchDispatchMode):
    """Records the most rows of D columns that one tensor has had, and that were alive behind a matrix product."""

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.columns, self.largest, self.behind_product = columns, 0, 0
        self.alive: dict[int, tuple[weakref.ref, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_new = not any(returned.alias_info for returned in func._schema.returns)  # neither a view nor in place
        for tensor in tree_leaves(result):
            if is_new and isinstance(tensor, Tensor) and tensor.shape[-1:] == (self.columns,):
                storage = tensor.untyped_storage()
                self.alive[storage.data_ptr()] = (weakref.ref(tensor), tensor.numel() // self.columns)
        rows = [rows for tensor, rows in self.alive.values() if tensor() is not None]
        self.largest = max([self.largest, *rows])
        if func is torch.ops.aten.mm.default:
            self.behind_product = max(self.behind_product, sum(rows))
        return result


def test_logits_are_no_larger_than_a_chunk_and_gone_before_the_next():
    def live_rows(compute: ComputeLoss) -> LiveRows:
        with LiveRows(head.config.draft_vocab_size) as live:
            run(compute, head, states, TEACHER_HEAD, batch)
        return live

    batch, head = wide_pack(), make_head()
    states = unroll(head, EMBEDDING, batch, STEPS)
    live = live_rows(chunked(20))
    assert live.largest <= 20 + STEPS - 1
    assert live.behind_product < 2 * 20  # a chunk and its teachers, of which there are STEPS times fewer
    assert live_rows(plain_loss).largest >= len(batch.anchors) > 200


def test_chunks_are_even_so_that_no_small_rest_is_left():
    bounds = pairs_before(torch.tensor([3, 3, 2, 1, 1, 2, 1, 3, 3, 3, 3, 2, 1]))
    for size in (1, 2, 5, 8, 20, 100):
        sizes = [pairs.stop - pairs.start for _, pairs in even_chunks(bounds, size)]
        assert sum(sizes) == bounds[-1] and min(sizes) > 0 and max(sizes) <= size + STEPS - 1
        assert max(sizes) - min(sizes) <= 2 * (STEPS - 1)


def kernel_equals_pytorch(device: str) -> None:
    from eagle3.head.fast import loss_kernel

    generator = torch.Generator().manual_seed(0)
    for draft_vocab_size, block, scale in [(30, 64, 1), (64, 64, 30), (200, 64, 5), (5000, 2048, 100)]:
        loss_kernel.BLOCK = block
        for dtype in (torch.float32, torch.bfloat16):
            logits = (scale * torch.randn(9, draft_vocab_size, generator=generator)).to(dtype)
            logits[0] = -1000.0
            logits[1, 5] = logits[1, 20] = 1000.0
            teacher = scale * torch.randn(4, draft_vocab_size, generator=generator)
            teacher_of = torch.tensor([0, 0, 0, 1, 1, 2, 3, 3, 3])
            weight = torch.rand(9, generator=generator)
            weight[3] = 0
            exact = logits.double()
            losses = plain_loss_and_gradient(SOFT_CROSS_ENTROPY, exact, teacher.double(), teacher_of, weight.double())
            logits, teacher, teacher_of, weight = (x.to(device) for x in (logits, teacher, teacher_of, weight))
            loss, best = loss_kernel.triton_loss_and_gradient(SOFT_CROSS_ENTROPY, logits, teacher, teacher_of, weight)
            torch.testing.assert_close(loss.cpu().double(), losses[0], rtol=1e-4, atol=1e-4)
            assert torch.equal(best.cpu(), losses[1])
            tolerance = 1e-4 if dtype is torch.float32 else 0.01
            torch.testing.assert_close(logits.cpu(), exact.to(dtype), rtol=tolerance, atol=1e-5)


test_the_kernel_equals_plain_pytorch = in_triton(kernel_equals_pytorch)


@pytest.mark.gpu
@pytest.mark.parametrize("autocast", [True, False], ids=["bf16-mixed", "float32"])
def test_on_a_gpu_it_waits_for_nothing_and_equals_the_cpu(autocast):
    batch, head = wide_pack(), make_head()
    states = [state.detach() for state in unroll(head, EMBEDDING, batch, STEPS)]
    exact = run(chunked(100), head, states, TEACHER_HEAD, batch)
    device, dtype = torch.device("cuda"), torch.bfloat16 if autocast else torch.float32
    on_gpu = with_last_in_float32(batch.to(device))  # in float64 no kernel would run
    head, teacher_head = head.float().to(device), TEACHER_HEAD.float().to(device)
    states = [state.to(device, dtype) for state in states]
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        run(chunked(100, "cuda"), head, states, teacher_head, on_gpu)  # compiles the kernel
        torch.cuda.set_sync_debug_mode("error")
        try:
            loss, metrics, gradients = run(chunked(100, "cuda"), head, states, teacher_head, on_gpu)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert metrics.trained.tolist() == exact[1].trained.tolist()
    for ours, theirs in zip([loss, *gradients], [exact[0], *exact[2]], strict=True):
        assert float((ours.cpu().double() - theirs).norm() / theirs.norm()) < (0.02 if autocast else 1e-3)
