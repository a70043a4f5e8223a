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

log = logging.getLogger(__name__)

SHARE = 32  # anchors are rounded up to multiples of the pack's tokens / SHARE, tokens to quarters
SEGMENT_BLOCK = 64  # numbers of segments to multiples of this; a segment without rows costs nothing
MOST_GRAPHS = 40  # each takes memory; batches of further sizes run without one

Sums = Float[Tensor, " sums"]
Compute = Callable[[TttBatch], tuple[Float[Tensor, ""], Sums]]  # the loss, and sums of metrics


@dataclass(frozen=True)
class Sizes:
    """Sizes of a static batch: 15,000 tokens with 3,000 anchors take 16,384 + 512 tokens and 3,072 anchors."""

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
        device = batch.anchors.device
        self.sizes, self.last_tokens = sizes, torch.arange(sizes.tokens - sizes.anchors, sizes.tokens, device=device)
        self.in_step = torch.ones(2, device=device, dtype=torch.float64)  # what the loss is divided by
        self.batch = enlarged(batch, sizes, ttt_steps, self.in_step)
        self.write(batch)

    def write(self, batch: TttBatch) -> None:
        """Write every tensor of a batch, and below its rows zeros: padding anchors are trained at no step."""
        static, anchors, sizes = self.batch, len(batch.anchors), self.sizes
        for static_rows, rows in zip((each for each in static.tensors() if each.ndim), batch.tensors(), strict=True):
            static_rows[: len(rows)] = rows
            static_rows[len(rows) :] = 0
        static.anchors[anchors:] = self.last_tokens[anchors:]
        static.anchors_of_sample[anchors:] = 1  # the loss is divided by it
        for bounds, of_batch in zip(static.segments, batch.segments, strict=True):
            bounds.query_bounds[len(of_batch.query_bounds) :] = sizes.anchors
            bounds.key_bounds[len(of_batch.key_bounds) :] = sizes.tokens
        self.in_step[0].fill_(batch.pack.anchors_in_step)
        self.in_step[1].fill_(batch.pack.samples_in_step)


def enlarged(batch: TttBatch, sizes: Sizes, ttt_steps: int, in_step: Any) -> TttBatch:
    """Return a batch of zeros. What only the host knows is left out: whatever reads it cannot be recorded."""

    def zeros(part: Any, rows: int, *names: str) -> dict[str, Any]:
        tensors = {name: getattr(part, name) for name in names}
        return {name: tensor.new_zeros(rows, *tensor.shape[1:]) for name, tensor in tensors.items()}

    of_token = ("input_ids", "turns", "positions", "aux_hidden_states", "teacher_index")
    pack = zeros(batch.pack, sizes.tokens, *of_token)
    pack |= zeros(batch.pack, sizes.teachers, "last_hidden_state", "teacher_argmax")
    segments = [
        replace(each, **zeros(each, length, "query_bounds", "key_bounds"), most_queries=0, most_keys=0)
        for each, length in zip(batch.segments, sizes.segments, strict=True)
    ]
    in_steps = {"anchors_in_step": in_step[0], "samples_in_step": in_step[1]}
    return replace(
        batch,
        pack=replace(batch.pack, **pack, **in_steps, token_bounds=(), sample_ids=()),
        **zeros(batch, sizes.anchors, "anchors", "anchor_steps", "anchors_of_sample"),
        anchor_bounds=(),
        turn_bounds=(),
        pair_bounds=every_pair(sizes.anchors, ttt_steps),
        segments=tuple(segments),
    )


def every_pair(anchors: int, ttt_steps: int) -> tuple[int, ...]:
    """Return `pair_bounds` of all K · R pairs: those whose teacher is past the end belong to the last one.

    With 3 anchors and 2 steps (0, 1, 3, 6): teacher 0 is asked once, teacher 1 twice, teacher 2 three times."""
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
