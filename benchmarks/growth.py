"""How a training step's rate and memory grow with hidden size, document length and answer share, on one GPU.

    step="python benchmarks/train_step.py --no-reference --no-ragged model.train_lm_head=true"
    for head in 135m 1b 3b 8b 14b 70b; do $step --head $head --case 16384,16,0.5 --out DIR/head_$head.json; done
    $step --head 135m --case 16384,16,0.5 --out DIR/no_graphs_135m.json kernels.cuda_graphs=false
    $step --head 1b --case 16384,16,0.5 --out DIR/no_graphs_1b.json kernels.cuda_graphs=false
    $step --case 32768,64,0.5 --case 32768,16,0.5 --case 32768,4,0.5 --case 32768,1,0.5 --out DIR/documents.json
    $step --case 16384,16,0.05 --case 16384,16,0.1 --case 16384,16,0.25 --case 16384,16,1 --out DIR/shares.json
    python benchmarks/growth.py DIR benchmarks/results/growth.json

The last command makes the result from those of the others, which must be of one commit and machine.
"""

import argparse
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from result import FACTS

from eagle3.storage.files import write_json

Row = dict[str, Any]
KEPT = ("hidden_size", "tokens", "document_tokens", "answer_share", "tokens_per_s", "peak_gb", "step_ms", "host_ms",
        "share_of_ceiling", "optimizer_ms", "ms_by_group")  # fmt: skip
CURVES: dict[str, Callable[[Row], bool]] = {  # the rows in which only this varies
    "hidden_size": lambda row: (row["tokens"], row["answer_share"]) == (16384, 0.5),
    "document_tokens": lambda row: (row["tokens"], row["answer_share"]) == (32768, 0.5),
    "answer_share": lambda row: (row["tokens"], row["hidden_size"]) == (16384, 4096),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="with the results of train_step.py")
    parser.add_argument("out", type=Path, help="file of the merged result")
    options = parser.parse_args()
    write_json(options.out, merged([json.loads(path.read_text()) for path in sorted(options.folder.glob("*.json"))]))


def merged(results: list[dict[str, Any]]) -> dict[str, Any]:
    """The facts that the results share, and their rows as ascending curves, without the cases that did not fit."""
    facts = [{fact: each[fact] for fact in FACTS if fact not in ("command", "date")} for each in results]
    assert all(each == facts[0] for each in facts), "results of several commits, machines or versions"
    commands = [re.sub(r"--out[= ]\S+", "--out FILE", each["command"]) for each in results]
    by_graph, one_by_one = [], []
    for command, result in zip(commands, results, strict=True):
        rows = [row | {"document_tokens": row["tokens"] // row["documents"]} for row in result["rows"]]
        measured = [{key: row[key] for key in KEPT} for row in rows if row["tokens_per_s"]]
        (one_by_one if "cuda_graphs=false" in command else by_graph).extend(measured)
    curves = {name: sorted(filter(of, by_graph), key=lambda row: row[name]) for name, of in CURVES.items()}
    commands.append("python benchmarks/growth.py DIR FILE")
    told = {"date": max(each["date"] for each in results), "command": "; ".join(commands)}
    return told | facts[0] | curves | {"without_cuda_graphs": one_by_one}


if __name__ == "__main__":
    main()
