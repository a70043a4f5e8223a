"""The fused layer against the plain one: numbers, every gradient, precision, work.

On the CPU it runs on the references of its kernels (test_elementwise.py), all else is what a GPU runs.
"""

import math
from collections import defaultdict
from statistics import fmean
from typing import Any

import pytest
import torch
from heads import EMBEDDING, TEACHER_HEAD, make_head, ragged_samples, ttt_batch
from kernel_cases import (
    HEADS,
    LOSSES,
    MANY_TURNS,
    TOKEN,
    PlainKernel,
    chunked,
    errors,
    exact_and_in_bf16,
    flash,
    fused,
    on_gpu,
    random_turns,
    step,
)
from pairs import all_pairs
from stores import random_sample
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from eagle3.head.attention import KeysValues, PaddedAttention
from eagle3.head.batch import TttBatch
from eagle3.head.fast.fused_weights import Matrix
from eagle3.head.layer import PlainLayer
from eagle3.head.unroll import unroll

ATTENTIONS = {"padded": PaddedAttention, "flash": flash(PlainKernel())}


def make_pack(ttt_steps: int, seed: int = 0) -> TttBatch:
    """Prompts and answers of 0 … 8 tokens in any order."""
    samples = [random_sample(random_turns(10 * seed + number), seed=number) for number in range(5)]
    return ttt_batch([*samples, *ragged_samples()], ttt_steps=ttt_steps, anchors_in_step=41.5, samples_in_step=3.5)


@all_pairs(options=HEADS, attention=[*ATTENTIONS], ttt_steps=[1, 4], loss=[*LOSSES])
def test_loss_and_every_gradient_are_those_of_the_plain_layer(options, ttt_steps, attention, loss):
    packs = [make_pack(ttt_steps, seed=seed) for seed in range(ttt_steps, 6, 3)]  # one or two, whose gradients add up
    settings = (ttt_steps, ATTENTIONS[attention], LOSSES[loss])
    plain, fast = (
        step(layer, make_head(**options), EMBEDDING, TEACHER_HEAD, packs, *settings) for layer in (PlainLayer, fused())
    )
    assert all(gradient.abs().max() > 0 for gradient in plain.values())
    assert max(errors(fast, plain).values()) < 1e-12


def test_a_pack_without_anchors_has_gradients_of_zero():
    batch = ttt_batch([random_sample(turns) for turns in ([0, 0], [0, 1, 0])], ttt_steps=3, anchors_in_step=1.0)
    for value in step(fused(), make_head(), EMBEDDING, TEACHER_HEAD, [batch], 3).values():
        assert float(value.abs().sum()) == 0


def test_without_gradients_the_outputs_are_those_of_the_plain_layer():
    head, batch = make_head(**HEADS["EAGLE-3.1"]), make_pack(3)
    expected = unroll(head, EMBEDDING, batch, 3)
    with torch.inference_mode():
        outputs = unroll(head, EMBEDDING, batch, 3, make_layer=fused())
    assert not any(output.requires_grad for output in outputs)
    for number, (output, plain) in enumerate(zip(outputs, expected, strict=True)):
        trained = batch.anchor_steps > number
        assert 0 < trained.sum() < len(trained) or number == 0
        torch.testing.assert_close(output[trained], plain[trained].detach())


def test_a_gradient_is_handed_out_once_and_as_soon_as_its_last_product_has_added_its_own(monkeypatch):
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


def test_a_second_backward_pass_is_refused_and_not_wrong():
    outputs = unroll(make_head(), EMBEDDING, make_pack(2), 2, make_layer=fused())
    outputs[-1].sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        outputs[-1].sum().backward()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("head", ["EAGLE-3.1", "one norm before fc"])
def test_bf16_is_no_further_from_float64_than_the_plain_layer_is(head, device):
    """In the mean over some heads and over all norms: the gradient of one has few numbers, whose errors are luck."""
    pairs: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for seed in range(3 if device == "cpu" else 6):
        plain, fast = exact_and_in_bf16(HEADS[head], seed, device)
        for name in plain:
            pairs["norms" if "norm" in name else name].append((plain[name], fast[name]))
    for name, of_name in pairs.items():
        mean_plain, mean_fast = map(fmean, zip(*of_name, strict=True))
        assert mean_fast < 1.1 * mean_plain + 1e-3, name
        assert mean_fast < 0.02, name


def test_the_first_product_of_a_sum_is_not_rounded_to_half_precision():
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
def test_prompts_pay_for_fc_keys_and_values_alone_and_embeddings_for_one_step(options):
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
def test_a_step_does_not_wait_for_the_gpu(kernel):
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
