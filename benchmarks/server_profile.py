"""How long the GPU works in one pass of an SGLang server: the kernels of each CUDA graph, from a trace of the server.

    python serve.py action=bench bench.plain_url=URL …                    # a load; while it runs:
    curl -X POST URL/start_profile -H 'Content-Type: application/json' \\
        -d '{"num_steps": 30, "activities": ["GPU"], "output_dir": "DIR"}'
    python benchmarks/server_profile.py DIR/….trace.json.gz

A graph is known by its number of kernels: the target's passes have the most, drafting and extending the head's cache a
few dozen. Kernels outside of graphs are those of prefills, unless these are graphs, too, and of the steps between.
"""

import argparse
import gzip
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
FEW = 20  # kernels; smaller graphs are pieces of prefills


def summary(events: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return times in milliseconds: `seen` from the first kernel to the end of the last, `busy` with one running."""
    launches, work = set(), []
    for event in events:
        if event.get("cat") in ON_GPU:
            work.append(event)
        elif event.get("name") == "cudaGraphLaunch":
            launches.add(event["args"]["correlation"])
    graphs: dict[int, list[float]] = defaultdict(list)
    outside = 0.0
    for event in work:
        correlation = event["args"].get("correlation")
        if correlation in launches:
            graphs[correlation].append(event["dur"])
        else:
            outside += event["dur"]
    by_size: dict[int, list[float]] = defaultdict(list)
    for durations in graphs.values():
        by_size[len(durations)].append(sum(durations))
    spans = sorted((event["ts"], event["ts"] + event["dur"]) for event in work)
    busy, end = 0.0, spans[0][0]
    for first, last in spans:
        busy, end = busy + max(last - max(first, end), 0.0), max(end, last)
    return {
        "seen_ms": (end - spans[0][0]) / 1e3,
        "busy_ms": busy / 1e3,
        "outside_graphs_ms": outside / 1e3,
        "small_graphs_ms": sum(sum(each) for size, each in by_size.items() if size < FEW) / 1e3,
        "graphs": [
            {"kernels": size, "replays": len(each), "ms_each": sum(each) / len(each) / 1e3}
            for size, each in sorted(by_size.items(), reverse=True)
            if size >= FEW
        ],
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    print(
        json.dumps(
            summary(json.loads(gzip.decompress(parser.parse_args().trace.read_bytes()))["traceEvents"]), indent=2
        )
    )
