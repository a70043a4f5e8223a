"""A server's trace is read: kernels by graph, those outside of graphs, and how long the GPU was busy."""

import gzip
import json
from typing import Any

import pytest
from scripts import run_script


def on_gpu(start: float, duration: float, cat: str = "kernel", **args: int) -> dict[str, Any]:
    return {"cat": cat, "name": "k", "ts": start, "dur": duration, "args": args}


def call(name: str, correlation: int) -> dict[str, Any]:
    """A call of the host, which is no work of the GPU."""
    return {"cat": "cuda_runtime", "name": name, "ts": 900, "dur": 20, "args": {"correlation": correlation}}


def graph(start: float, kernels: int, duration: float, correlation: int) -> list[dict[str, Any]]:
    """A launch, and its kernels every 15 µs."""
    replayed = (on_gpu(start + 15 * kernel, duration, correlation=correlation) for kernel in range(kernels))
    return [call("cudaGraphLaunch", correlation), *replayed]


def test_a_trace_is_read_by_graphs_and_its_idle_share(tmp_path):
    file = tmp_path / "made-up.trace.json.gz"
    events = [
        {"ph": "M", "name": "process_name", "args": {"name": "python"}},
        on_gpu(4000, 100, correlation=4),
        *graph(1000, 25, 10, correlation=1),
        *graph(3000, 3, 10, correlation=3),
        on_gpu(3035, 10, "gpu_memcpy"),  # half of it while the last kernel of the small graph runs
        *graph(2000, 25, 12, correlation=2),
        call("cudaLaunchKernel", 4),
    ]
    file.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    read = json.loads(run_script("benchmarks/server_profile", str(file)).stdout)
    assert read["graphs"] == [{"kernels": 25, "replays": 2, "ms_each": pytest.approx((0.25 + 0.3) / 2)}]
    assert read["small_graphs_ms"] == pytest.approx(0.03)
    assert read["outside_graphs_ms"] == pytest.approx(0.11)
    assert read["seen_ms"] == pytest.approx(3.1)  # from 1000 to 4100
    assert read["busy_ms"] == pytest.approx(0.25 + 0.3 + 0.035 + 0.1)  # what overlaps is counted once
    assert 1 - read["busy_ms"] / read["seen_ms"] == pytest.approx(0.779, abs=0.001)
