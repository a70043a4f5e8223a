"""The main job on the bundled target, in about ten minutes on two cores: make quickstart

prompts → answers → features → training → export → check → accept length on held-out prompts, through the commands that
users run. Writes outputs/quickstart/summary.json.
"""

import argparse
import json
import shutil
import time
from pathlib import Path

import torch
from result import ROOT, call, write_result

from eagle3.decoding.speculate import Measurement, measure, plain_greedy
from eagle3.head_files.format import load_head
from eagle3.notebook import open_target, read_prompts
from eagle3.progress import show_bars

ASSETS = ROOT / "tests" / "assets"
TARGET, TRAIN, HELD_OUT = ASSETS / "tiny", ASSETS / "prompts" / "train.jsonl", ASSETS / "prompts" / "heldout.jsonl"
CHAIN_STEPS = (3, 5, 7)
MAX_NEW_TOKENS = 96
IN_FLOAT32 = ("target.dtype=float32", "target.device=cpu")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "quickstart")
    parser.add_argument("--prompts", type=int, default=2000, help="training prompts")
    parser.add_argument("--from-target", action="store_true", help="the target writes the training prompts itself")
    parser.add_argument("--held-out", type=int, default=60, help="prompts to decode at the end")
    parser.add_argument("overrides", nargs="*", help="for train.py, e.g. trainer.max_epochs=1")
    options = parser.parse_args()
    out: Path = options.out
    shutil.rmtree(out, ignore_errors=True)
    data, trained, head = out / "data", out / "run", out / "head"
    prompts = "prompts=from_target" if options.from_target else f"prompts.path={TRAIN}"
    seconds = {}
    seconds["precompute"] = call(
        "precompute.py", f"target.path={TARGET}", prompts, f"out_dir={data}",
        "prompts/privacy=patterns", f"prompts.limit={options.prompts}", "sampling.max_new_tokens=128",
        "answers=huggingface", "answers.batch_size=256", "answers.batch_tokens=65536", "answers.window=4096",
        "features=huggingface", "features.max_length=1024",
    )  # fmt: skip
    seconds["train"] = call(
        "train.py", "experiment=quickstart", f"data.path={data}/features", f"hydra.run.dir={trained}",
        *options.overrides,
    )  # fmt: skip
    seconds["export and check"] = call("serve.py", "action=export", f"run={trained}", f"head={head}")
    started = time.perf_counter()
    print("\n$ decode held-out prompts, greedily, with chains of", *CHAIN_STEPS, flush=True)
    measured = decode_held_out(head, options.held_out)
    seconds["decode"] = time.perf_counter() - started
    summary = summarise(data, head, measured, seconds)
    write_result(out / "summary.json", summary)
    print(f"\n{table(summary)}\nhead: {head}\ncurves: {trained / 'curves.png'}")


def decode_held_out(head: Path, limit: int) -> dict[int, Measurement]:
    """The target's own greedy answers once, then the head's at each number of steps."""
    show_bars(True)
    torch.set_num_threads(1)  # at this size a second thread costs more than it gives
    target = open_target(str(TARGET), *IN_FLOAT32)
    found = read_prompts(target, HELD_OUT, "prompts.turns=first", limit=limit, max_new_tokens=MAX_NEW_TOKENS)
    ids = found.prompts
    plain = [plain_greedy(target, prompt, MAX_NEW_TOKENS) for prompt in ids]
    loaded = load_head(head, dtype=torch.float32, num_layers=len(target.layers))
    measured = {}
    for steps in CHAIN_STEPS:
        measured[steps] = measure(
            target, loaded.head, loaded.capture_layers, ids, steps=steps, topk=1, draft_tokens=None, plain=plain,
            max_new_tokens=MAX_NEW_TOKENS, temperature=0.0, seed=0, progress=f"chain of {steps}",
        )  # fmt: skip
    return measured


def summarise(data: Path, head: Path, measured: dict[int, Measurement], seconds: dict[str, float]) -> dict:
    manifest = json.loads((data / "features" / "manifest.json").read_text())
    training = json.loads((head / "training.json").read_text())
    simulated = training["simulated_accept_length"]
    return {
        "accept_length": {str(steps): round(result.accept_length, 4) for steps, result in measured.items()},
        "simulated_accept_length": round(simulated[str(max(CHAIN_STEPS))], 4),
        "simulated_accept_length_by_steps": {steps: round(value, 4) for steps, value in simulated.items()},
        "lossless": min(result.lossless for result in measured.values()),
        "held_out_prompts": len(measured[CHAIN_STEPS[0]].decoded),
        "answer_tokens": manifest["answer_tokens"],
        "train_seconds": round(seconds["train"], 1),
        "seconds": {stage: round(value, 1) for stage, value in seconds.items()},
        "total_seconds": round(sum(seconds.values()), 1),
    }


def table(summary: dict) -> str:
    lines = ["chain steps   accept length (decoded)   validation, sampled answers"]
    for steps, value in summary["accept_length"].items():
        lines.append(f"{steps:>11}   {value:>23.3f}   {summary['simulated_accept_length_by_steps'][steps]:>27.3f}")
    share = summary["lossless"]
    lines += [
        f"lossless: {share:.0%} of {summary['held_out_prompts']} held-out prompts decode to the target's own tokens",
        f"{summary['answer_tokens']} answer tokens, {summary['train_seconds']:.0f} s of training, "
        f"{summary['total_seconds']:.0f} s in all",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
