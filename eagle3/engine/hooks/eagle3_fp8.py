"""Hidden states in half the bytes: e4m3, with one scale for each token and layer. Needs PyTorch alone, as the hooks do.

The scale is a power of two, stored as its exponent: a value loses mantissa bits and nothing else, and bf16 holds what
is unpacked exactly. Shapes: T tokens, A layers, H hidden size, AH = A · H.
"""

import torch

LARGEST = 448.0  # of e4m3
BIAS = 127  # exponents are stored as in float32


def packed(rows, layers: int):
    """Return the bits of e4m3 (T, AH) and the exponents (T, A), in uint8, of finite rows of `layers` side by side."""
    by_layer = rows.float().unflatten(1, (layers, -1))
    _, exponents = torch.frexp(by_layer.abs().amax(-1) / LARGEST)  # the largest value lands in [224, 448]
    exponents = exponents.clamp(1 - BIAS, BIAS)
    # In two halves, for 2^127 and 2^-127 are no factors that a float32 can be multiplied by without a loss.
    half = exponents // 2
    small = torch.ldexp(torch.ldexp(by_layer, -half.unsqueeze(-1)), (half - exponents).unsqueeze(-1))
    values = small.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).view(torch.uint8)
    return values.flatten(1), (exponents + BIAS).to(torch.uint8)


def unpacked(values, exponents):
    """Return rows (T, AH) in bf16."""
    scales = (exponents.int() << 23).view(torch.float32).bfloat16()  # a float32 with that exponent and no mantissa
    rows = values.view(torch.float8_e4m3fn).bfloat16().unflatten(1, (exponents.shape[1], -1))
    return (rows * scales.unsqueeze(-1)).flatten(1)
