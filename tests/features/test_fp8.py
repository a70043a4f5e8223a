"""Hidden states as e4m3 with one scale a token and layer, against a slow reference of the format."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from stores import HIDDEN, in_fp8, random_samples

from eagle3.data.pack import pack_samples
from eagle3.engine.hooks.eagle3_fp8 import LARGEST, unpacked
from eagle3.features.sample import from_bytes, scaled, stored_tensors, to_buffers


def values_of_e4m3() -> list[float]:
    """Every finite value that the format has, from its definition: 4 exponent bits with bias 7, 3 mantissa bits."""
    normal = [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8) if (e, m) != (15, 7)]
    return sorted({0.0, *(m / 8 * 2.0**-6 for m in range(8)), *normal})


def plainly(row: list[float]) -> list[float]:
    """Quantise one token of one layer, value by value."""
    largest = max(map(abs, row))
    exponent = 0
    if largest:
        exponent = max(-126, math.floor(math.log2(largest / LARGEST)) + 1)
    grid = values_of_e4m3()

    def nearest(value: float) -> float:
        distances = [(abs(abs(value) - each), number % 2, each) for number, each in enumerate(grid)]  # ties to even
        return math.copysign(min(distances)[2], value)

    return [nearest(value * 2.0**-exponent) * 2.0**exponent for value in row]


@pytest.mark.parametrize("spread", [1, 1e30, 1e-30])
def test_packed_rows_are_those_of_the_format(spread):
    rows = torch.randn(20, 3 * HIDDEN, generator=torch.Generator().manual_seed(0)) * spread
    rows[0] = 0
    rows[1, 5] *= 5000  # a channel that dwarfs the others
    packed = scaled(rows, 3)
    assert packed.values.shape == rows.shape and packed.exponents.shape == (20, 3)
    expected = [plainly(layer) for row in rows.unflatten(1, (3, -1)).tolist() for layer in row]
    found = unpacked(packed.values, packed.exponents).float().unflatten(1, (3, -1)).flatten(0, 1)
    assert torch.equal(found, torch.tensor(expected))


def test_a_pack_travels_packed_and_arrives_unpacked():
    packed: list[Any] = [in_fp8(sample) for sample in random_samples(40)]
    pack = pack_samples(packed, anchors_in_step=1, samples_in_step=1)
    assert pack.aux_hidden_states.dtype == torch.uint8
    arrived = pack.to(torch.device("cpu"))
    each = [sample.aux_hidden_states.to(torch.device("cpu")) for sample in packed]
    assert arrived.aux_hidden_states.dtype == torch.bfloat16
    assert torch.equal(arrived.aux_hidden_states, torch.cat(each))


@pytest.mark.parametrize(("largest", "width"), [(200, 1), (60_000, 2), (2**31 - 1, 4)])
def test_ids_are_as_wide_as_the_largest_and_come_back(largest, width):
    [sample] = random_samples(1)
    ids = torch.randint(largest, (len(sample.input_ids),))
    ids[3] = largest
    sample = replace(sample, input_ids=ids)
    assert stored_tensors(sample)["input_ids"].shape[1] == width
    read = from_bytes(memoryview(bytearray(b"".join(to_buffers(sample)))), sample_id="p", teachers="answers")
    assert torch.equal(read.input_ids.long(), ids)
