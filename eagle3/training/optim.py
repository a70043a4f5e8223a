"""AdamW or Muon. The learning rate warms up linearly, may stay constant, and decays along a cosine."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer

from eagle3.errors import InputError
from eagle3.head.head import Head
from eagle3.settings.training import OptimSettings
from eagle3.training.muon import DividedMuon, PortableMuon, RecordedMuon
from eagle3.training.schedule import ShareLR


@dataclass(frozen=True, kw_only=True)
class AdamWCosine(OptimSettings):
    """AdamW for all parameters of the head."""

    def build(
        self, head: Head, total_steps: int, *, by_graph: bool = False, ranks: dist.ProcessGroup | None = None
    ) -> tuple[Optimizer, ShareLR]:
        """Return optimizer and schedule.

        `by_graph`: whether a CUDA graph may launch the optimizer's kernels; `ranks`: ranks that have the same weights
        and gradients, and may divide the optimizer's work.
        """
        optimizer: Any = self.optimizer(head, by_graph, ranks)
        name = type(self).__name__
        if not isinstance(optimizer, Optimizer):
            found = type(optimizer).__name__
            raise InputError(f"optim={name}: its `optimizer` returns {found}; return a torch.optim.Optimizer")
        factor: Any = self.scale(0, total_steps)
        if not (isinstance(factor, (int, float)) and math.isfinite(factor)):
            raise InputError(f"optim={name}: its `scale` returns {factor} at step 0; return a factor of optim.lr")
        return optimizer, ShareLR(optimizer, self.scale, total_steps, warmup_fraction=self.warmup_fraction)

    def optimizer(self, head: Head, by_graph: bool = False, ranks: dist.ProcessGroup | None = None) -> Optimizer:
        return self.adamw(trained(head))

    def adamw(self, parameters: Iterable[nn.Parameter]) -> AdamW:
        betas = float(self.betas[0]), float(self.betas[1])  # PyTorch refuses whole numbers
        return AdamW(parameters, lr=self.lr, betas=betas, weight_decay=self.weight_decay, fused=True)

    def scale(self, step: float, total_steps: float) -> float:
        """Factor on the learning rate at an optimizer step; past `total_steps` it stays at the final one.

        A resumed training may count its steps in fractions (schedule.py)."""
        warmup_steps = math.ceil(self.warmup_fraction * total_steps)
        if step < warmup_steps:
            return min(1.0, (step + 1) / warmup_steps)
        decay_steps = max(1, min(math.ceil(self.decay_fraction * total_steps), total_steps - warmup_steps))
        progress = min(1.0, max(0.0, 1 - (total_steps - step) / decay_steps))
        return self.final_lr_fraction + (1 - self.final_lr_fraction) * 0.5 * (1 + math.cos(math.pi * progress))


@dataclass(frozen=True, kw_only=True)
class MuonCosine(AdamWCosine):
    """Muon for the matrices between the captured states and the last norm, AdamW for norms and a trained `lm_head`.

    Updates are scaled to the size of AdamW's (arXiv:2502.16982, section 2.2), so that both share one learning rate and
    one weight decay. Muon's own matrix products cost 27 TFLOP per step for the head of an 8B target.
    """

    def optimizer(self, head: Head, by_graph: bool = False, ranks: dist.ProcessGroup | None = None) -> Optimizer:
        matrices: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for each in trained(head):
            (matrices if each.ndim == 2 and each is not head.lm_head.weight else others).append(each)
        kind = RecordedMuon if by_graph else partial(DividedMuon, ranks=ranks) if ranks else PortableMuon
        muon = kind(matrices, lr=self.lr, weight_decay=self.weight_decay, adjust_lr_fn="match_rms_adamw")
        return CombinedOptimizer([muon, self.adamw(others)])


def trained(head: Head) -> list[nn.Parameter]:
    """Return the parameters that change: all but those of a fixed `lm_head`."""
    return [each for each in head.parameters() if each.requires_grad]


def by_parameter(state: dict[str, Any], optimizer: Optimizer, parameters: Iterable[nn.Parameter]) -> dict[str, Any]:
    """Number an optimizer's `state_dict` by the order of a module's parameters instead of the order of the groups.

    This is how Lightning saves and loads under trainer=fsdp; one process and DDP take any numbering."""
    number_of = {id(parameter): number for number, parameter in enumerate(parameters)}
    numbers = [number_of[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
    return {
        "state": {numbers[old]: kept for old, kept in state["state"].items()},
        "param_groups": [
            group | {"params": [numbers[old] for old in group["params"]]} for group in state["param_groups"]
        ],
    }


def whole(norm: Float[Tensor, ""]) -> Float[Tensor, ""]:
    """Return a norm over the shards of all ranks."""
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


class CombinedOptimizer(Optimizer):
    """Several optimizers as one: Lightning steps, schedules, saves and loads a single optimizer."""

    def __init__(self, parts: list[Optimizer]) -> None:
        self.parts = parts
        super().__init__([group for part in parts for group in part.param_groups], {})
        self._share()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        with torch.enable_grad():
            loss = closure() if closure else None
        for part in self.parts:
            part.step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._share()

    def _share(self) -> None:
        """Let the parts use this optimizer's groups and state, which are scheduled, saved and loaded."""
        groups = iter(self.param_groups)
        for part in self.parts:
            part.param_groups = [next(groups) for _ in part.param_groups]
            part.state = self.state
