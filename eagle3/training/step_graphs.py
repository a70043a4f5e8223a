"""Replays the kernels of a training step, which the host then need not launch one by one.

A step of a small head has some 550 kernels. Launching them takes the host 20 to 30 ms, longer than they run
(benchmarks/results/small_heads.json). A CUDA graph is one launch, but its shapes and memory are fixed. So a batch is
copied into a `StaticBatch`, whose sizes are rounded up, and each combination of sizes is recorded once.

What fills a batch up changes nothing: padding anchors stand on padding tokens of their own, which no other anchor
attends to, and are trained at no step.

Shapes: T tokens of the pack, R anchors, J positions with a teacher, K steps.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from eagle3.head.batch import TttBatch
from eagle3.head.segments import Segments

log = logging.getLogger(__name__)

SHARE = 32  # anchors are rounded up to multiples of the pack's tokens / SHARE, tokens to quarters
SEGMENT_BLOCK = 64  # numbers of segments to multiples of this; a segment without rows costs nothing
MOST_GRAPHS = 40  # each takes memory; batches of further sizes run without one

Sums = Float[Tensor, " sums"]
Compute = Callable[[TttBatch], tuple[Float[Tensor, ""], Sums]]  # the loss, and sums of metrics


@dataclass(frozen=True)
class Sizes:
    """Sizes of a static batch."""

    tokens: int
    anchors: int
    teachers: int
    segments: tuple[int, ...]  # for each call of the attention kernel

    @classmethod
    def for_batch(cls, batch: TttBatch) -> "Sizes":
        tokens, anchors = len(batch.pack.input_ids), len(batch.anchors)
        most = 1 << (tokens - 1).bit_length()  # packs of a training are nearly full: most have one size in tokens
        block, quarter = max(1, most // SHARE), max(1, most // 4)
        padded = rounded_up(anchors, block)
        return cls(
            tokens=-(-tokens // quarter) * quarter + block,  # as many more as there are padding anchors at most
            anchors=padded,
            teachers=padded + rounded_up(max(len(batch.pack.last_hidden_state) - anchors, 0), block),
            segments=tuple(rounded_up(len(each.query_bounds), SEGMENT_BLOCK) for each in batch.segments),
        )


def rounded_up(number: int, block: int) -> int:
    """Return the next multiple above `number`: at least one more, for the padding."""
    return (number // block + 1) * block


class StaticBatch:
    """A batch whose tensors stay in place and are overwritten by one batch after another."""

    def __init__(self, batch: TttBatch, sizes: Sizes, ttt_steps: int) -> None:
        device, pack = batch.anchors.device, batch.pack
        self.sizes = sizes
        # Padding anchors stand on the last tokens.
        self.last_tokens = torch.arange(sizes.anchors, device=device) + sizes.tokens - sizes.anchors

        def of(tensor: Tensor, rows: int) -> Tensor:
            return tensor.new_zeros(rows, *tensor.shape[1:])

        # What only the host knows is left out: whatever reads it cannot be recorded.
        of_pack: dict[str, Any] = {
            **{name: of(getattr(pack, name), sizes.tokens) for name in OF_TOKENS},
            **{name: of(getattr(pack, name), sizes.teachers) for name in OF_TEACHERS},
            **{name: torch.ones((), device=device, dtype=torch.float64) for name in IN_STEP},
        }
        self.batch = replace(
            batch,
            anchor_bounds=(),
            turn_bounds=(),
            pack=replace(pack, token_bounds=(), sample_ids=(), **of_pack),
            **{name: of(getattr(batch, name), sizes.anchors) for name in OF_ANCHORS},
            segments=tuple(
                Segments(
                    query_bounds=of(each.query_bounds, length),
                    key_bounds=of(each.key_bounds, length),
                    most_queries=0,
                    most_keys=0,
                    causal=each.causal,
                )
                for each, length in zip(batch.segments, sizes.segments, strict=True)
            ),
            pair_bounds=every_pair(sizes.anchors, ttt_steps),
        )
        self.write(batch)

    def write(self, batch: TttBatch) -> None:
        own, sizes = self.batch, self.sizes
        for name in OF_TOKENS + OF_TEACHERS:
            write_rows(getattr(own.pack, name), getattr(batch.pack, name), 0)
        for name in IN_STEP:
            getattr(own.pack, name).fill_(getattr(batch.pack, name))
        fills: tuple[Tensor | int, ...] = self.last_tokens[len(batch.anchors) :], 0, 1
        for name, fill in zip(OF_ANCHORS, fills, strict=True):
            write_rows(getattr(own, name), getattr(batch, name), fill)
        for static, segments in zip(own.segments, batch.segments, strict=True):
            write_rows(static.query_bounds, segments.query_bounds, sizes.anchors)
            write_rows(static.key_bounds, segments.key_bounds, sizes.tokens)


OF_TOKENS = ("input_ids", "turns", "positions", "aux_hidden_states", "teacher_index")  # of a pack
OF_TEACHERS = ("last_hidden_state", "teacher_argmax")
IN_STEP = ("anchors_in_step", "samples_in_step")  # numbers on the host, tensors in a static batch
OF_ANCHORS = ("anchors", "anchor_steps", "anchors_of_sample")  # of a batch


def write_rows(static: Tensor, rows: Tensor, fill: Tensor | int) -> None:
    static[: len(rows)] = rows
    static[len(rows) :] = fill


def every_pair(anchors: int, ttt_steps: int) -> tuple[int, ...]:
    """Return `pair_bounds` of all K · R pairs: those whose teacher is past the end belong to the last one."""
    before = [0]
    for teacher in range(anchors):
        before.append(before[-1] + min(ttt_steps, teacher + 1))
    return (*before[:-1], ttt_steps * anchors)


class Recorded:
    """The graph of one combination of sizes: loss, sums and gradients of what `static` contains."""

    def __init__(
        self, static: StaticBatch, compute: Compute, parameters: list[nn.Parameter], gradients: list[Tensor], pool: Any
    ) -> None:
        self.static, self.graph, self.gradients = static, torch.cuda.CUDAGraph(), gradients
        self._compute(compute, parameters)  # compiles kernels, and lets libraries allocate
        torch.cuda.synchronize()
        # Reader threads copy batches meanwhile; only what this thread does is recorded.
        with torch.cuda.graph(self.graph, pool=pool, capture_error_mode="thread_local"):
            self.loss, self.sums = self._compute(compute, parameters)

    def replay(self, batch: TttBatch) -> None:
        self.static.write(batch)
        self.graph.replay()

    def _compute(self, compute: Compute, parameters: list[nn.Parameter]) -> tuple[Float[Tensor, ""], Sums]:
        # Without the cache: weights would be cast now and never again.
        half, dtype = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
        with torch.autocast("cuda", dtype, enabled=half, cache_enabled=False):
            loss, sums = compute(self.static.batch)
        with torch.autocast("cuda", enabled=False):
            torch._foreach_copy_(self.gradients, torch.autograd.grad(loss, parameters))
        return loss.detach(), sums


class StepGraphs:
    """Computes the loss of a batch, and with it the gradients, by the graph of its sizes."""

    def __init__(self, compute: Compute, parameters: list[nn.Parameter], ttt_steps: int) -> None:
        self.compute, self.parameters, self.ttt_steps = compute, parameters, ttt_steps
        self.gradients: list[Tensor] = []  # of the latest batch
        self.graphs: dict[Sizes, Recorded] = {}
        self.pool = torch.cuda.graph_pool_handle()  # of all graphs: they never run at the same time

    def __call__(self, batch: TttBatch) -> tuple[Float[Tensor, ""], Sums]:
        if not self.gradients:  # the head has come to its device only now
            self.gradients = [torch.zeros_like(parameter) for parameter in self.parameters]
        sizes = Sizes.for_batch(batch)
        if sizes not in self.graphs:
            if len(self.graphs) == MOST_GRAPHS:
                return self.compute(batch)
            static = StaticBatch(batch, sizes, self.ttt_steps)
            self.graphs[sizes] = Recorded(static, self.compute, self.parameters, self.gradients, self.pool)
            if len(self.graphs) == MOST_GRAPHS:
                log.info("%d CUDA graphs: packs of other sizes run without one", MOST_GRAPHS)
        recorded = self.graphs[sizes]
        recorded.replay(batch)
        return _Replayed.apply(recorded.loss, self.gradients, *self.parameters), recorded.sums.clone()


class _Replayed(torch.autograd.Function):
    """The loss that a graph has computed, whose gradients are known already."""

    @staticmethod
    def forward(ctx: Any, loss: Float[Tensor, ""], gradients: list[Tensor], *parameters: Tensor) -> Float[Tensor, ""]:
        ctx.gradients = gradients
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Float[Tensor, ""]) -> tuple[Tensor | None, ...]:
        return None, None, *torch._foreach_mul(ctx.gradients, scale)
