"""Attention kernels on packs as training has them: PyTorch's FlashAttention-2, ours in Triton, the flash-attn package.

    python benchmarks/attention.py --out benchmarks/results/attention.json            # on a Hopper GPU
    python benchmarks/attention.py --out /tmp/rows.json --channels 64 --cases 0 2

`ratio` is the speed relative to PyTorch's kernel in the same case of the same run, `difference` the largest relative
distance to its results: more than about 0.01 in bfloat16 is an error.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import accumulate, product
from pathlib import Path
from typing import Any

import torch
from result import write_result
from step_cost import seconds_of
from torch import Tensor

from eagle3.head.fast.flash_kernels import FlashAttnPackage, TorchFlash, VarlenKernel
from eagle3.head.segments import Segments

QUERY_HEADS, GROUPS = 32, 8  # Llama-3.1-8B's
SECONDS_EACH = 0.2


@dataclass(frozen=True)
class Case:
    """The queries and the keys of each segment."""

    name: str
    lengths: list[tuple[int, int]]
    causal: bool = True

    def pairs(self) -> int:
        """Of queries and keys; causally the last query reads all keys, the one before all but one."""
        unseen = sum(rows * (rows - 1) // 2 for rows, _ in self.lengths) if self.causal else 0
        return sum(rows * keys for rows, keys in self.lengths) - unseen

    def segments(self, device: torch.device) -> Segments:
        queries, keys = zip(*self.lengths, strict=True)
        bounds = [torch.tensor([0, *accumulate(each)], dtype=torch.int32, device=device) for each in (queries, keys)]
        return Segments(
            query_bounds=bounds[0], key_bounds=bounds[1], most_queries=max(queries), most_keys=max(keys),
            causal=self.causal,
        )  # fmt: skip


CASES = [
    Case("1 document of 4096", [(4096, 4096)]),
    Case("8 documents of 2048", [(2048, 2048)] * 8),
    Case("8 documents of 2048, half answers", [(1024, 2048)] * 8),
    Case("512 turns of 32, 24 answers", [(24, 32)] * 512),
    Case("256 turns of 32, one of 8192", [(32, 32)] * 128 + [(8192, 8192)] + [(32, 32)] * 128),
    Case("earlier turns: 768 rows read 1024 tokens, 8 times", [(768, 1024), (0, 1024)] * 8, causal=False),
    Case("1 document of 16384", [(16384, 16384)]),
]


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--channels", type=int, default=128)
    parser.add_argument("--cases", type=int, nargs="+", default=range(len(CASES)), help="numbers of cases, from 0")
    options = parser.parse_args(arguments)
    rows = []
    for number in options.cases:
        print(CASES[number].name, flush=True)
        for row in measure(CASES[number], options.channels):
            rows.append(row)
            print(json.dumps(row), flush=True)
    write_result(options.out, {"rows": rows}, arguments)


def measure(case: Case, channels: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each kernel, forward and backward."""
    device = torch.device("cuda")
    where = case.segments(device)
    rows, tokens = int(where.query_bounds[-1]), int(where.key_bounds[-1])
    torch.manual_seed(0)
    # Keys and values are views of one projection, as in the head.
    query, grad_output = (torch.randn(rows, QUERY_HEADS, channels, device=device).bfloat16() for _ in range(2))
    key, value = torch.randn(tokens, 2 * GROUPS, channels, device=device).bfloat16().chunk(2, dim=1)
    output, logsumexp = TorchFlash().forward(query, key, value, where)
    work = {
        "forward": 4 * QUERY_HEADS * channels * case.pairs(),
        "backward": 10 * QUERY_HEADS * channels * case.pairs(),
    }
    truth: dict[str, list[Tensor]] = {}
    reference: dict[str, float] = {}
    for direction, (name, kernel) in product(work, kernels().items()):

        def call(kernel: VarlenKernel = kernel, direction: str = direction) -> list[Tensor]:
            if direction == "forward":
                return list(kernel.forward(query, key, value, where))
            return list(kernel.backward(grad_output, query, key, value, output, logsumexp, where))

        results, seconds = call(), seconds_of(call, SECONDS_EACH, device)
        truth.setdefault(direction, results)
        reference.setdefault(direction, seconds)
        yield {
            "case": case.name,
            "channels": channels,
            "direction": direction,
            "kernel": name,
            "ms": seconds * 1e3,
            "tflops": work[direction] / seconds / 1e12,
            "ratio": reference[direction] / seconds,
            "difference": difference(results, truth[direction]),
        }


def difference(results: list[Tensor], truth: list[Tensor]) -> float:
    distances = [
        (one.float() - other.float()).norm() / other.float().norm() for one, other in zip(results, truth, strict=True)
    ]
    return float(torch.stack(distances).max())  # nan stays nan


def kernels() -> dict[str, VarlenKernel]:
    """Return kernels by name; PyTorch's comes first."""
    from eagle3.head.fast.triton_flash import TritonFlash

    made: dict[str, VarlenKernel] = {"torch_flash": TorchFlash(), "triton": TritonFlash()}
    if find_spec("flash_attn"):
        made["flash_attn"] = FlashAttnPackage()
    return made


if __name__ == "__main__":
    main(sys.argv[1:])
