"""Heads, losses and attention for tests of fast kernels."""

from contextlib import suppress
from functools import partial

import pytest
import torch
from heads import LLAMA3, make_head, ttt_batch
from stores import HIDDEN, VOCAB, random_sample, with_last_in_float32
from torch import Tensor

from eagle3.head.attention import MakeAttention, PaddedAttention
from eagle3.head.batch import TttBatch
from eagle3.head.draft_head import DraftHead
from eagle3.head.fast.chunked_loss import ChunkedLoss
from eagle3.head.fast.flash_attention import FlashAttention
from eagle3.head.fast.flash_kernels import FlashAttnPackage, TorchFlash, VarlenKernel
from eagle3.head.fast.fused_layer import FusedLayer
from eagle3.head.fast.products import Products
from eagle3.head.kernels import kernel_backend
from eagle3.head.layer import MakeLayer, PlainLayer
from eagle3.head.loss import ComputeLoss, UnrollLoss, plain_loss
from eagle3.head.segments import Segments
from eagle3.head.unroll import unroll

TOKEN = UnrollLoss(decay=0.8, normalize="token")


def random_turns(seed: int) -> list[int]:
    """Prompts and answers of 0 … 8 tokens in any order; answers may follow one another, begin or end the sample."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 9, (6,), generator=generator).tolist()
    is_answer = torch.randint(0, 2, (6,), generator=generator).tolist()
    return [
        0,
        *(turn * answer for turn, (n, answer) in enumerate(zip(lengths, is_answer, strict=True)) for _ in range(n)),
    ]


def chunked(chunk: int, device: str = "cpu") -> ChunkedLoss:
    kernels = kernel_backend(torch.device(device))
    return ChunkedLoss(chunk=chunk, make_products=Products, elementwise=kernels.elementwise, kernel=kernels.loss)


MANY_TURNS = [[0, 0, *(turn for i in range(1, 8) for turn in [i] * (1 + i) + [0] * (i % 3)), 0], [1, 1, 1], [0, 1] * 5]


class PlainKernel:
    """Attention of each segment with its score matrix, in float32 or wider, returned in the type of the query.

    What no segment covers is nan, as memory may be.
    """

    def __init__(self) -> None:
        self.pairs: list[int] = []  # of query and key, of each forward
        self.tokens: list[int] = []  # whose keys and values it was given

    @torch.autocast("cpu", enabled=False)
    def forward(self, query: Tensor, key: Tensor, value: Tensor, where: Segments) -> tuple[Tensor, Tensor]:
        dtype = query.dtype
        query, key, value = self.wide(query, key, value)
        output, logsumexp = torch.full_like(query, torch.nan), query.new_full(query.shape[1::-1], torch.nan)
        self.pairs.append(0)
        self.tokens.append(len(key))
        for queries, keys in self.segments(where):
            scores = self.scores(query[queries], key[keys], where.causal)
            self.pairs[-1] += int(scores[0].isfinite().sum())
            logsumexp[:, queries] = scores.logsumexp(-1)
            output[queries] = torch.einsum("qrt,tqc->rqc", scores.softmax(-1), self.expanded(value[keys], query))
        return output.to(dtype), logsumexp

    @torch.autocast("cpu", enabled=False)
    def backward(
        self,
        grad_output: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
        logsumexp: Tensor,
        where: Segments,
    ) -> tuple[Tensor, Tensor, Tensor]:
        assert all(x.is_contiguous() for x in (grad_output, output, logsumexp))
        dtype = query.dtype
        grad_output, query, key, value, output = self.wide(grad_output, query, key, value, output)
        grad_query, grad_key, grad_value = (torch.full_like(x, torch.nan) for x in (query, key, value))
        for queries, keys in self.segments(where):
            scores = self.scores(query[queries], key[keys], where.causal)
            weights = (scores - logsumexp[:, queries, None]).exp()  # of the softmax that output and log-sum-exp are of
            grad_weights = torch.einsum("rqc,tqc->qrt", grad_output[queries], self.expanded(value[keys], query))
            mean = (grad_output[queries] * output[queries]).sum(-1).T
            grad_scores = weights * (grad_weights - mean[..., None]) * query.shape[-1] ** -0.5
            grad_query[queries] = torch.einsum("qrt,tqc->rqc", grad_scores, self.expanded(key[keys], query))
            for grad, parts in (
                (grad_key, torch.einsum("qrt,rqc->tqc", grad_scores, query[queries])),
                (grad_value, torch.einsum("qrt,rqc->tqc", weights, grad_output[queries])),
            ):
                grad[keys] = parts.unflatten(1, (key.shape[1], -1)).sum(2)
        return grad_query.to(dtype), grad_key.to(dtype), grad_value.to(dtype)

    @staticmethod
    def wide(*tensors: Tensor) -> list[Tensor]:
        return [x.to(torch.promote_types(x.dtype, torch.float32)) for x in tensors]

    @staticmethod
    def segments(where: Segments) -> list[tuple[slice, slice]]:
        query_bounds, key_bounds = where.query_bounds.tolist(), where.key_bounds.tolist()
        assert where.most_queries == max(torch.tensor(query_bounds).diff())
        assert where.most_keys == max(torch.tensor(key_bounds).diff())
        return [
            (slice(query_bounds[i], query_bounds[i + 1]), slice(key_bounds[i], key_bounds[i + 1]))
            for i in range(len(query_bounds) - 1)
        ]

    @staticmethod
    def expanded(x: Tensor, query: Tensor) -> Tensor:
        return x.repeat_interleave(query.shape[1] // x.shape[1], dim=1)

    def scores(self, query: Tensor, key: Tensor, causal: bool) -> Tensor:
        scores = torch.einsum("rqc,tqc->qrt", query, self.expanded(key, query)) * query.shape[-1] ** -0.5
        if causal and len(query):
            assert len(query) <= len(key)
            seen = torch.ones(len(query), len(key), dtype=torch.bool).tril(len(key) - len(query))
            scores = scores.masked_fill(~seen, -torch.inf)
        return scores


def flash(kernel: VarlenKernel, device: str = "cpu") -> MakeAttention:
    return partial(FlashAttention, kernel=kernel, chain_keys=kernel_backend(torch.device(device)).chain_keys)


def kernels_of_gpu() -> list[VarlenKernel]:
    found: list[VarlenKernel] = [TorchFlash()]
    with suppress(ImportError):
        found.append(FlashAttnPackage())
    with suppress(ImportError):
        from eagle3.head.fast.triton_flash import TritonFlash

        found.append(TritonFlash())
    return found


def on_gpu(*devices: str) -> list:
    return [
        pytest.param(kernel, *devices, marks=pytest.mark.gpu, id=type(kernel).__name__) for kernel in kernels_of_gpu()
    ]


YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 32}
HEADS = {
    "EAGLE-3": {},
    "EAGLE-3.1": {"fc_norm": True, "norm_output": True},
    "one norm before fc": {"norm_before_fc": True, "norm_output": True},
    "llama3": {"rope_parameters": LLAMA3},
    "yarn": {"rope_parameters": YARN, "num_kv_heads": 4, "head_dim": 6},
}
Loss = tuple[UnrollLoss, ComputeLoss]


SEQUENCE = UnrollLoss(decay=0.8, normalize="sequence")
LOSSES: dict[str, Loss] = {"plain": (TOKEN, plain_loss), "chunked": (SEQUENCE, chunked(7))}


def fused(device: str = "cpu") -> MakeLayer:
    """On the references of its kernels, or on a GPU's."""
    elementwise = kernel_backend(torch.device(device)).elementwise
    return partial(FusedLayer, elementwise=elementwise, make_products=Products)


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
