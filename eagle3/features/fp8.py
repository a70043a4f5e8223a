"""Hidden states in half the bytes: e4m3, with one scale for each token and layer.

The scale is a power of two, stored as its exponent: a value loses mantissa bits and nothing else, and bf16 holds what
is unpacked exactly. Shapes: T tokens, A layers, H hidden size, AH = A · H.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

LARGEST = 448.0  # of e4m3
BIAS = 127  # exponents are stored as in float32


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
    by_layer = rows.float().unflatten(1, (layers, -1))
    _, exponents = torch.frexp(by_layer.abs().amax(-1) / LARGEST)  # the largest value lands in [224, 448]
    exponents = exponents.clamp(1 - BIAS, BIAS)
    # In two halves, for 2^127 and 2^-127 are no factors that a float32 can be multiplied by without a loss.
    half = exponents // 2
    small = torch.ldexp(torch.ldexp(by_layer, -half.unsqueeze(-1)), (half - exponents).unsqueeze(-1))
    values = small.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).view(torch.uint8)
    return ScaledRows(values.flatten(1), (exponents + BIAS).to(torch.uint8))


def unpacked(values: UInt8[Tensor, "T AH"], exponents: UInt8[Tensor, "T A"]) -> Float[Tensor, "T AH"]:
    """Return rows in bf16."""
    scales = (exponents.int() << 23).view(torch.float32).bfloat16()  # a float32 with that exponent and no mantissa
    rows = values.view(torch.float8_e4m3fn).bfloat16().unflatten(1, (exponents.shape[1], -1))
    return (rows * scales.unsqueeze(-1)).flatten(1)
