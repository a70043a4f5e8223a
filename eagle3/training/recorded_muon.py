"""Muon whose kernels are launched by one CUDA graph.

For a small head, launching its some 300 kernels takes the host longer than the GPU takes for the whole step
(benchmarks/results/small_heads.json).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Muon


class RecordedMuon(Muon):
    """Muon of one group of parameters, all of which have a gradient in every step.

    Its state, and so its checkpoints, are those of Muon. Where there is no GPU it computes the same without a graph.
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
        if self.updates is None or not self.updates.of(momenta):  # a checkpoint brings its own
            self.updates = _Updates(momenta, group)
        updates = self.updates([each.grad for each in parameters if each.grad is not None])
        torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(parameters, updates, alpha=group["lr"])
        return loss


class _Updates:
    """What Muon adds to the parameters at a learning rate of 1: its own step, without weight decay, on zeros.

    A graph has fixed numbers and memory. So it knows neither the learning rate nor where the gradients are."""

    def __init__(self, momenta: list[Tensor], group: dict[str, Any]) -> None:
        self.momenta = momenta
        self.gradients, self.updates = ([torch.zeros_like(each) for each in momenta] for _ in range(2))
        own = "momentum", "nesterov", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn"
        self.muon = Muon(self.updates, lr=1.0, weight_decay=0.0, **{name: group[name] for name in own})
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

    def of(self, momenta: list[Tensor]) -> bool:
        return all(one is other for one, other in zip(self.momenta, momenta, strict=True))

    def _compute(self) -> None:
        torch._foreach_zero_(self.updates)
        self.muon.step()
