"""AdamW with linear warm-up and a cosine to a fraction of the learning rate."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR


@dataclass(frozen=True, kw_only=True)
class AdamWCosine:
    lr: float
    betas: tuple[float, float]
    weight_decay: float
    warmup_fraction: float
    final_lr_fraction: float

    def build(self, parameters: Iterable[nn.Parameter], total_steps: int) -> tuple[AdamW, LambdaLR]:
        optimizer = AdamW(
            parameters, lr=self.lr, betas=(self.betas[0], self.betas[1]), weight_decay=self.weight_decay, fused=True
        )
        return optimizer, LambdaLR(optimizer, partial(self.scale, total_steps=total_steps))

    def scale(self, step: int, total_steps: int) -> float:
        """Factor on the learning rate at an optimizer step; past `total_steps` it stays at the final one."""
        warmup_steps = math.ceil(self.warmup_fraction * total_steps)
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
        return self.final_lr_fraction + (1 - self.final_lr_fraction) * 0.5 * (1 + math.cos(math.pi * progress))
