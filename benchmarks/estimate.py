"""What stages=[estimate] says of a run on the bundled target, before it, after a tenth of its answers, and after all.

    python benchmarks/estimate.py --folder DIR --out benchmarks/results/estimate.json      # minutes on two cores

Beside it stands what the run then took: the same prompts through the same commands.
"""

import argparse
import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from result import write_result

from eagle3.answers.store import read_responses
from eagle3.storage.records import sealed_bytes

ROOT = Path(__file__).resolve().parents[1]
ASSETS = ROOT / "tests" / "assets"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=1000)
    options = parser.parse_args()
    shutil.rmtree(options.folder, ignore_errors=True)
    run, killed = options.folder / "run", options.folder / "killed"
    prompts = (
        "prompts/privacy=patterns",
        f"prompts.path={ASSETS}/prompts/train.jsonl",
        f"prompts.limit={options.prompts}",
    )
    found = {"before": estimate(run, *prompts, stages="prompts,estimate")}
    precompute(run, "stages=[responses]")
    shutil.copytree(run, killed)
    keep_answers(killed / "responses", options.prompts // 10)
    found |= {"tenth": estimate(killed), "all": estimate(run)}
    real = {dtype: taken(run, options.folder / dtype, dtype) for dtype in ("bfloat16", "fp8")}
    write_result(options.out, {"real": real, "estimates": {name: beside(each, real) for name, each in found.items()}})


def precompute(out_dir: Path, *overrides: str) -> None:
    command = [
        sys.executable, "precompute.py", f"target.path={ASSETS}/tiny", f"out_dir={out_dir}",
        "responses.max_new_tokens=128", "features.max_length=1024", "features.shard_mb=16", *overrides,
    ]  # fmt: skip
    subprocess.run(command, check=True, cwd=ROOT)


def estimate(out_dir: Path, *overrides: str, stages: str = "estimate") -> dict[str, Any]:
    precompute(out_dir, *overrides, f"stages=[{stages}]")
    return json.loads((out_dir / "estimate.json").read_text())


def keep_answers(responses: Path, count: int) -> None:
    """Leave what a stage has written that is killed after the first `count` rows."""
    manifest = read_responses(responses)
    (responses / "manifest.json").write_bytes(sealed_bytes(replace(manifest, complete=False, counts=None, files=None)))
    lines = (responses / "responses.jsonl").read_bytes().splitlines(keepends=True)
    (responses / "responses.jsonl").write_bytes(b"".join(lines[:count]))


def taken(run: Path, features: Path, dtype: str) -> dict[str, int]:
    precompute(run, "stages=[features]", f"features.dtype={dtype}", f"features.path={features}")
    manifest = json.loads((features / "manifest.json").read_text())
    counts = {key: manifest[key] for key in ("samples", "tokens", "answer_tokens", "bytes")}
    beside = [path for path in features.iterdir() if path.suffix in (".index", ".json", ".safetensors")]
    return {**counts, "shards": len(manifest["shards"]), "beside": sum(path.stat().st_size for path in beside)}


def beside(found: dict[str, Any], real: dict[str, dict[str, int]]) -> dict[str, Any]:
    """Keep what is compared, and how many times what was taken it is."""
    said = {key: found[key] for key in ("answers", "looked_at", "samples", "tokens", "answer_tokens")}
    ratios = {key: found[key] / real["fp8"][key] for key in ("samples", "tokens", "answer_tokens")}
    sizes = {
        dtype: {key: found["features"][dtype][key] / counts[key] for key in ("bytes", "beside", "shards")}
        for dtype, counts in real.items()
    }
    return {**said, "of_what_was_taken": {**ratios, **sizes}}


if __name__ == "__main__":
    main()
