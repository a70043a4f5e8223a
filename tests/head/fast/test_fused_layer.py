"""The fused layer against the plain one: numbers, every gradient, precision, work.

On the CPU it runs on the references of its kernels (test_elementwise.py), all else is what a GPU runs.
"""

import math
from collections import defaultdict
from functools import partial
from statistics import fmean
from typing import Any

import pytest
import torch
from heads import EMBEDDING, LLAMA3, TEACHER_HEAD, make_head, ragged_samples, ttt_batch
from pairs import all_pairs
from stores import HIDDEN, VOCAB, random_sample, with_last_in_float32
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from eagle3.head.attention import KeysValues, MakeAttention, PaddedAttention
from eagle3.head.batch import TttBatch
from eagle3.head.draft_head import DraftHead
from eagle3.head.fast.fused_layer import FusedLayer
from eagle3.head.fast.fused_weights import Matrix
from eagle3.head.fast.products import Products
from eagle3.head.fast.varlen_kernel import VarlenKernel
from eagle3.head.kernels import kernel_backend
from eagle3.head.layer import MakeLayer, PlainLayer
from eagle3.head.loss import ComputeLoss, UnrollLoss, plain_loss
from eagle3.head.unroll import unroll
from tests.head.fast.test_chunked_loss import TOKEN, chunked, random_turns
from tests.head.test_attention import MANY_TURNS, PlainKernel, flash, on_gpu

YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 32}
HEADS = {
    "EAGLE-3": {},
    "EAGLE-3.1": {"fc_norm": True, "norm_output": True},
    "one norm before fc": {"norm_before_fc": True, "norm_output": True},
    "llama3": {"rope_parameters": LLAMA3},
    "yarn": {"rope_parameters": YARN, "num_kv_heads": 4, "head_dim": 6},
}
ATTENTIONS = {"padded": PaddedAttention, "flash": flash(PlainKernel())}
Loss = tuple[UnrollLoss, ComputeLoss]
SEQUENCE = UnrollLoss(decay=0.8, normalize="sequence")
LOSSES: dict[str, Loss] = {"plain": (TOKEN, plain_loss), "chunked": (SEQUENCE, chunked(7))}


def fused(device: str = "cpu") -> MakeLayer:
    """On the references of its kernels, or on a GPU's."""
    elementwise = kernel_backend(torch.device(device)).elementwise
    return partial(FusedLayer, elementwise=elementwise, make_products=Products)


def make_pack(ttt_steps: int, seed: int = 0) -> TttBatch:
    """Prompts and answers of 0 … 8 tokens in any order."""
    samples = [random_sample(random_turns(10 * seed + number), seed=number) for number in range(5)]
    return ttt_batch([*samples, *ragged_samples()], ttt_steps=ttt_steps, anchors_in_step=41.5, samples_in_step=3.5)


def step(
    layer: MakeLayer,
    head: DraftHead,
    embedding: Tensor,
    teacher_head: Tensor,
    packs: list[TttBatch],
    ttt_steps: int,
    attention: MakeAttention = PaddedAttention,
    loss_of: Loss = LOSSES["chunked"],
) -> dict[str, Tensor]:
    """Loss and every parameter's gradient, summed over packs."""
    head.zero_grad()
    objective, compute = loss_of
    loss = torch.zeros((), device=embedding.device)
    for batch in packs:
        with torch.autocast(embedding.device.type, torch.bfloat16, enabled=embedding.dtype == torch.bfloat16):
            hidden = unroll(head, embedding, batch, ttt_steps, attention, layer)
            part, _ = objective(head, hidden, teacher_head, batch, compute)
        part.backward()
        loss = loss + part.detach()
    return {"loss": loss, **{name: parameter.grad.clone() for name, parameter in head.named_parameters()}}


def errors(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> dict[str, float]:
    return {name: float((ours[name].cpu() - theirs[name]).norm() / theirs[name].norm()) for name in theirs}


@all_pairs(options=HEADS, attention=[*ATTENTIONS], ttt_steps=[1, 4], loss=[*LOSSES])
def test_loss_and_every_gradient_are_those_of_the_plain_layer(
    options: dict, ttt_steps: int, attention: str, loss: str
) -> None:
    packs = [make_pack(ttt_steps, seed=seed) for seed in range(ttt_steps, 6, 3)]  # one or two, whose gradients add up
    settings = (ttt_steps, ATTENTIONS[attention], LOSSES[loss])
    plain, fast = (
        step(layer, make_head(**options), EMBEDDING, TEACHER_HEAD, packs, *settings) for layer in (PlainLayer, fused())
    )
    assert all(gradient.abs().max() > 0 for gradient in plain.values())
    assert max(errors(fast, plain).values()) < 1e-12


@pytest.mark.parametrize("turns", [[[0, 0, 0]], [[0, 0], [0, 1, 0]]], ids=["prompts alone", "one-token answer"])
def test_a_pack_without_anchors_has_gradients_of_zero(turns: list) -> None:
    batch = ttt_batch([random_sample(one) for one in turns], ttt_steps=3, anchors_in_step=1.0)
    for value in step(fused(), make_head(), EMBEDDING, TEACHER_HEAD, [batch], 3).values():
        assert float(value.abs().sum()) == 0


def test_without_gradients_the_outputs_are_those_of_the_plain_layer() -> None:
    head, batch = make_head(**HEADS["EAGLE-3.1"]), make_pack(3)
    expected = unroll(head, EMBEDDING, batch, 3)
    with torch.inference_mode():
        outputs = unroll(head, EMBEDDING, batch, 3, make_layer=fused())
    assert not any(output.requires_grad for output in outputs)
    for step, (output, plain) in enumerate(zip(outputs, expected, strict=True)):
        trained = batch.anchor_steps > step
        assert 0 < trained.sum() < len(trained) or step == 0
        torch.testing.assert_close(output[trained], plain[trained].detach())


def test_a_gradient_is_handed_out_once_and_as_soon_as_its_last_product_has_added_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    head, events = make_head(), []
    names = {id(parameter): name for name, parameter in head.named_parameters()}
    add = Matrix.add

    def recorded(matrix: Matrix, *args: Any, **settings: Any) -> None:
        events.extend(f"sum of {names[id(parameter)]}" for parameter in matrix.parameters)
        add(matrix, *args, **settings)

    monkeypatch.setattr(Matrix, "add", recorded)
    for name, parameter in head.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: events.append(name))
    outputs = unroll(head, EMBEDDING, make_pack(3), 3, make_layer=fused())
    loss, _ = TOKEN(head, outputs, TEACHER_HEAD, make_pack(3), chunked(7))
    loss.backward()
    handed_out = [event for event in events if not event.startswith("sum")]
    assert sorted(handed_out) == sorted(names.values())
    last = {event: place for place, event in enumerate(events)}
    for name in names.values():
        assert last[name] > last.get(f"sum of {name}", -1)
    # Ranks that train together add up these while the rest is computed.
    output, attention = last["midlayer.mlp.down_proj.weight"], last["midlayer.self_attn.q_proj.weight"]
    assert output < last["sum of midlayer.self_attn.q_proj.weight"] < attention < last["sum of fc.weight"]
    # What autograd keeps are the sums themselves: a copy would cost their memory once more.
    attention, mlp = head.midlayer.self_attn, head.midlayer.mlp
    for group in ([attention.q_proj, attention.k_proj, attention.v_proj], [mlp.gate_proj, mlp.up_proj]):
        assert len({linear.weight.grad.untyped_storage().data_ptr() for linear in group}) == 1


def test_a_second_backward_pass_is_refused_and_not_wrong() -> None:
    outputs = unroll(make_head(), EMBEDDING, make_pack(2), 2, make_layer=fused())
    outputs[-1].sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        outputs[-1].sum().backward()


def exact_and_in_bf16(
    options: dict, seed: int, device: str, layer: MakeLayer | None = None, loss: ComputeLoss | None = None
) -> tuple[dict[str, float], dict[str, float]]:
    """Errors of the plain layer, and of `layer` and `loss`, under autocast on the device against float64 on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    batch = ttt_batch([random_sample([0] * 9 + [1] * 60, seed=10 * seed + i) for i in range(4)], ttt_steps=3)
    head = make_head(seed=seed, **options)
    embedding, teacher_head = (
        torch.randn(size, HIDDEN, generator=generator).bfloat16() for size in (VOCAB, len(head.draft_ids))
    )
    for parameter in head.parameters():  # the same numbers in every precision
        parameter.data.copy_(parameter.data.bfloat16())
    exact = step(PlainLayer, head, embedding.double(), teacher_head.double(), [batch], 3)
    head = head.float().to(device)
    batch = with_last_in_float32(batch.to(torch.device(device)))  # float64 has no kernels
    embedding, teacher_head = embedding.to(device), teacher_head.float().to(device)
    plain, fast = (
        step(each, head, embedding, teacher_head, [batch], 3, loss_of=(SEQUENCE, compute))
        for each, compute in ((PlainLayer, chunked(7, device)), (layer or fused(device), loss or chunked(7, device)))
    )
    return errors(plain, exact), errors(fast, exact)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("head", ["EAGLE-3.1", "one norm before fc"])
def test_bf16_is_no_further_from_float64_than_the_plain_layer_is(head: str, device: str) -> None:
    """In the mean over some heads and over all norms: the gradient of one has few numbers, whose errors are luck."""
    pairs: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for seed in range(6):
        plain, fast = exact_and_in_bf16(HEADS[head], seed, device)
        for name in plain:
            pairs["norms" if "norm" in name else name].append((plain[name], fast[name]))
    for name, of_name in pairs.items():
        mean_plain, mean_fast = map(fmean, zip(*of_name, strict=True))
        assert mean_fast < 1.1 * mean_plain + 1e-3, name
        assert mean_fast < 0.02, name


def test_the_first_product_of_a_sum_is_not_rounded_to_half_precision() -> None:
    head = make_head().float()
    with torch.autocast("cpu", torch.bfloat16):
        unroll(head, EMBEDDING, make_pack(1), 1, make_layer=fused())[0].sum().backward()
        gradient = head.midlayer.mlp.down_proj.weight.grad
    assert gradient.dtype == torch.float32 and not torch.equal(gradient, gradient.bfloat16().float())


class NoProducts:
    """An attention whose outputs depend on all it is given."""

    def __init__(self, context: KeysValues, batch: TttBatch) -> None:
        self.context = context

    def __call__(self, query: Tensor, chain: list[KeysValues]) -> Tensor:
        return query + sum(part.mean() for pair in [self.context, *chain] for part in pair)


@pytest.mark.parametrize("options", ["EAGLE-3", "EAGLE-3.1", "one norm before fc"])
def test_prompts_pay_for_fc_keys_and_values_alone_and_embeddings_for_one_step(options: str) -> None:
    head, batch, steps = make_head(**HEADS[options]), make_pack(3), 3
    counts = {
        # The gradients of weights are added in place, which PyTorch does not count by itself.
        torch.ops.aten.addmm_: lambda total, left, right, **_: 2 * math.prod(left) * right[1],
        # transformers up to 5.18 makes the rotary angles with an outer product, which sums nothing.
        torch.ops.aten.bmm: lambda left, right, **_: 2 * math.prod(left) * right[2] if left[2] > 1 else 0,
    }
    with FlopCounterMode(display=False, custom_mapping=counts) as products:
        outputs = unroll(head, EMBEDDING, batch, steps, NoProducts, fused())
        sum(output.sum() for output in outputs).backward()
    attention, mlp = head.midlayer.self_attn, head.midlayer.mlp

    def size(*linears: torch.nn.Linear) -> int:
        return sum(linear.weight.numel() for linear in linears)

    query, key_value = size(attention.q_proj), size(attention.k_proj, attention.v_proj)
    every_step = size(attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj)
    anchors, tokens = len(batch.anchors), len(batch.pack.input_ids)
    assert 0 < anchors < tokens
    of_anchors = steps * every_step + query + (steps - 1) * (query + key_value) // 2  # half is the embedding's
    # A forward, the gradients of input and weight, but what goes into fc and the embeddings' half, with norms, is data.
    no_gradient = anchors * query // 2 + tokens * (key_value // 2 + size(head.fc))
    of_weights = anchors * of_anchors + tokens * (key_value + size(head.fc))
    assert products.get_total_flops() == 6 * of_weights - 2 * no_gradient


@pytest.mark.parametrize("kernel", on_gpu())
def test_a_step_does_not_wait_for_the_gpu(kernel: VarlenKernel) -> None:
    device = torch.device("cuda")
    batch = ttt_batch([random_sample(turns) for turns in MANY_TURNS], ttt_steps=3).to(device)
    head = make_head(**HEADS["EAGLE-3.1"], head_dim=16).float().to(device)
    embedding, kernels = EMBEDDING.to(device, torch.bfloat16), (flash(kernel, "cuda"), fused("cuda"))

    def backward() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            outputs = unroll(head, embedding, batch, 3, *kernels)
        sum(output.sum() for output in outputs).backward()

    backward()  # compiles the kernels
    torch.cuda.set_sync_debug_mode("error")
    try:
        backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
