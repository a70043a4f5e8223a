"""Bytes of features in fp8 and in bf16, and the accept length of heads that are trained on each.

    python benchmarks/fp8_features.py --folder DIR --out benchmarks/results/fp8_features.json      # an hour, two cores

The bundled target's answers once, their features in both dtypes, then a training for each dtype and seed: the same
prompts, the same packs. The accept length is that of the validation prompts (simulated, as checkpoints are chosen by);
the difference is that of pairs of the same seed, with a 95 % interval over seeds (Student's t).
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

from result import write_result
from scipy.stats import t as student

from eagle3.features.joined import open_source

ROOT = Path(__file__).parent.parent
ASSETS = ROOT / "tests" / "assets"
DTYPES = ("bfloat16", "fp8")


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=1000)
    parser.add_argument("--val-fraction", type=float, default=0.3)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--folder", type=Path, required=True, help="for everything; what is there is taken as it is")
    parser.add_argument("overrides", nargs="*", help="for train.py, e.g. trainer.max_epochs=1")
    options = parser.parse_args(arguments)
    data = options.folder / "data"
    if not data.exists():
        call(
            "precompute.py", f"target.path={ASSETS}/tiny", f"prompts.path={ASSETS}/prompts/train.jsonl",
            f"out_dir={data}", "prompts/privacy=patterns", f"prompts.limit={options.prompts}", "answers.batch_size=256",
            "responses.max_new_tokens=128", "answers.batch_tokens=65536", "stages=[prompts,responses]",
        )  # fmt: skip
    rows = [run(dtype, options) for dtype in DTYPES]
    pairs = list(zip(*(row["accept_length"] for row in rows), strict=True))
    change = [fp8 / bf16 - 1 for bf16, fp8 in pairs]
    mean = statistics.mean(change)
    half = statistics.stdev(change) / len(change) ** 0.5 * float(student.ppf(0.975, len(change) - 1))
    result = {
        "stores": dict(zip(DTYPES, rows, strict=True)),
        "bytes_of_bf16": rows[1]["bytes"] / rows[0]["bytes"],
        "accept_length_change": mean,
        "interval": [mean - half, mean + half],
    }
    print(json.dumps(write_result(options.out, result), indent=1))


def run(dtype: str, options: argparse.Namespace) -> dict:
    data, store = options.folder / "data", options.folder / dtype
    call(
        "precompute.py", f"target.path={ASSETS}/tiny", f"out_dir={data}", "stages=[features]", f"features.path={store}",
        f"features.dtype={dtype}", "features.max_length=1024",
    )  # fmt: skip
    source, lengths, seconds = open_source(str(store)), [], []
    for seed in range(options.seeds):
        trained, began = options.folder / f"{dtype}-{seed}", time.perf_counter()
        call(
            "train.py", "experiment=quickstart", f"data.path={store}", f"hydra.run.dir={trained}", f"seed={seed}",
            f"data.val_fraction={options.val_fraction}", "callbacks.progress=null", *options.overrides,
        )  # fmt: skip
        seconds.append(time.perf_counter() - began)
        lengths.append(json.loads((trained / "result.json").read_text())["score"])
    facts = source.describe()
    return {
        "bytes": facts["bytes"],
        "bytes_per_token": facts["bytes"] / facts["tokens"],
        "samples": facts["samples"],
        "accept_length": lengths,
        "training_seconds": seconds,
    }


def call(*command: str) -> None:
    print("$ python", *command, flush=True)
    subprocess.run([sys.executable, *command], cwd=ROOT, check=True)


if __name__ == "__main__":
    main(sys.argv[1:])
