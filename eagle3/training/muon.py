"""PyTorch's Muon, also for CPUs without bfloat16, divided among GPUs, and with kernels that one CUDA graph launches."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Muon
from torch.overrides import TorchFunctionMode


class PortableMuon(Muon):
    """PyTorch's Muon, which on a CPU multiplies in float32. PyTorch always multiplies in bfloat16; a CPU that has no
    instructions for it, as one with AVX2 alone, took 30 times as long for a step of the quickstart's head."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        on_cpu = self.param_groups[0]["params"][0].device.type == "cpu"
        with _KeepFloat32() if on_cpu else nullcontext():
            return super().step(closure)


class _KeepFloat32(TorchFunctionMode):
    """Let `Tensor.bfloat16`, by which Muon converts a gradient, return a copy in the gradient's own dtype."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0].clone() if func is Tensor.bfloat16 else func(*args, **(kwargs or {}))


class DividedMuon(PortableMuon):
    """Muon of one group of matrices that are the same on several ranks, each of which steps some and sends them.

    Muon's own products take as long on every rank as on one. Here `ranks`, which should be joined by fast links, divide
    the matrices by their work. Every rank keeps all momenta: state and checkpoints are those of Muon.
    """

    def __init__(self, params: Any, *, ranks: dist.ProcessGroup, **settings: Any) -> None:
        super().__init__(params, **settings)
        self.ranks = ranks

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        [group] = self.param_groups
        with torch.enable_grad():
            loss = closure() if closure else None
        everything: list[Tensor] = group["params"]
        matrices = [matrix for matrix in everything if matrix.grad is not None]  # the same on all ranks
        rank_of = [*zip(matrices, divided(matrices, self.ranks.size()), strict=True)]
        group["params"] = [matrix for matrix, rank in rank_of if rank == self.ranks.rank()]
        try:
            if group["params"]:
                super().step()
        finally:
            group["params"] = everything
        for matrix, rank in rank_of:
            if rank != self.ranks.rank():
                state = self.state[matrix]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(matrix)
                state["momentum_buffer"].lerp_(matrix.grad, 1 - group["momentum"])
        sent = [dist.broadcast(matrix, group=self.ranks, group_src=rank, async_op=True) for matrix, rank in rank_of]
        for each in sent:
            each.wait()
        return loss


def divided(matrices: list[Tensor], ranks: int) -> list[int]:
    """Return each matrix's rank: from the most work down, each goes to the rank that has the least."""
    rank_of, work = [0] * len(matrices), [0.0] * ranks
    flops = [min(each.shape) ** 2 * (2 * max(each.shape) + min(each.shape)) for each in matrices]
    for number in sorted(range(len(matrices)), key=lambda number: -flops[number]):
        rank_of[number] = rank = work.index(min(work))
        work[rank] += flops[number]
    return rank_of


class RecordedMuon(PortableMuon):
    """Muon of one group of parameters, all of which have a gradient in every step, with one launch for its kernels.

    There are some 300, and for the head of a small target the host launches them more slowly than the GPU runs the
    whole step (benchmarks/results/small_heads.json). State and checkpoints are those of Muon. On a CPU it computes the
    same without a graph.
    """

    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, **settings)
        self.updates: _Updates | None = None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        [group] = self.param_groups
        parameters: list[Tensor] = group["params"]
        if any(each not in self.state for each in parameters):  # the first step allocates the momenta
            return super().step(closure)
        with torch.enable_grad():
            loss = closure() if closure else None
        momenta = [self.state[each]["momentum_buffer"] for each in parameters]
        if self.updates is None or not self.updates.uses_momenta(momenta):  # a checkpoint brings its own
            self.updates = _Updates(momenta, group)
        updates = self.updates([each.grad for each in parameters if each.grad is not None])
        torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(parameters, updates, alpha=group["lr"])
        return loss


class _Updates:
    """Muon's change of the parameters at a learning rate of 1: its own step, without weight decay, on zeros.

    A graph has fixed numbers and memory. So it knows neither the learning rate nor where the gradients are."""

    def __init__(self, momenta: list[Tensor], group: dict[str, Any]) -> None:
        self.momenta = momenta
        self.gradients, self.updates = ([torch.zeros_like(each) for each in momenta] for _ in range(2))
        own = "momentum", "nesterov", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn"
        self.muon = PortableMuon(self.updates, lr=1.0, weight_decay=0.0, **{name: group[name] for name in own})
        for update, gradient, momentum in zip(self.updates, self.gradients, momenta, strict=True):
            update.grad = gradient
            self.muon.state[update]["momentum_buffer"] = momentum
        self.compute: Callable[[], None] = self._compute
        if momenta[0].is_cuda:
            graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            # Reader threads copy batches meanwhile; only what this thread does is recorded.
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self._compute()
            self.compute = graph.replay

    def __call__(self, gradients: list[Tensor]) -> list[Tensor]:
        torch._foreach_copy_(self.gradients, gradients)
        self.compute()
        return self.updates

    def uses_momenta(self, momenta: list[Tensor]) -> bool:
        return all(one is other for one, other in zip(self.momenta, momenta, strict=True))

    def _compute(self) -> None:
        torch._foreach_zero_(self.updates)
        self.muon.step()
