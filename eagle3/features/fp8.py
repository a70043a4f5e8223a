"""Rows of hidden states in fp8, as stores keep them: eagle3_fp8 has the format.

Shapes: T tokens, A layers, H hidden size, AH = A · H.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from eagle3.engine.hooks.eagle3_fp8 import packed, unpacked


@dataclass(frozen=True)
class ScaledRows:
    """Rows that travel packed, and arrive unpacked where `to` sends them."""

    values: UInt8[Tensor, "T AH"]  # the bits of e4m3
    exponents: UInt8[Tensor, "T A"]

    def __post_init__(self) -> None:
        rows, layers = self.exponents.shape
        if len(self.values) != rows or self.values.shape[1] % max(layers, 1):
            raise ValueError("its exponents do not fit its values")

    def __len__(self) -> int:
        return len(self.values)

    def to(self, device: torch.device, non_blocking: bool = False) -> Float[Tensor, "T AH"]:
        moved = (each.to(device, non_blocking=non_blocking) for each in (self.values, self.exponents))
        return unpacked(*moved)

    def cpu(self) -> "ScaledRows":
        return ScaledRows(self.values.cpu(), self.exponents.cpu())


def scaled(rows: Float[Tensor, "T AH"], layers: int) -> ScaledRows:
    """Pack finite rows of `layers` layers side by side."""
    return ScaledRows(*packed(rows, layers))
