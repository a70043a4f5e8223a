"""Answers and features of SGLang beside those of Hugging Face, for one target on one GPU, by the real commands.

    python benchmarks/engine_parity.py TARGET PROMPTS.jsonl --prompts 200 --work DIR --out RESULT.json \
        --overrides launch.mem_fraction_static=0.2 'launch.extra_flags={attention-backend: triton}'

Both answer the same prompts greedily. Where two answers differ, Hugging Face's logits at the first token that differs
tell whether it was a near-tie. Both then capture the features of Hugging Face's answers.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

import torch
from result import write_result

from eagle3.features.store import FeatureStore
from eagle3.storage.files import read_jsonl
from eagle3.storage.folder import LocalFolder
from eagle3.target.model import Target, load_target

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("prompts_file", type=Path)
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--overrides", nargs="*", default=[])
    given = parser.parse_args()
    plain, served = given.work / "huggingface", given.work / "sglang"
    write_prompts(given.prompts_file, given.prompts, [plain, served])
    greedy = [
        "responses.temperature=0",
        f"responses.max_new_tokens={given.max_new_tokens}",
        f"target.path={given.target}",
    ]
    run("responses", plain, *greedy)
    run("responses", served, *greedy, "answers=sglang", *given.overrides)
    (given.work / "captured").mkdir(exist_ok=True)
    (given.work / "captured/responses").symlink_to((plain / "responses").resolve())
    run("features", plain, *greedy)
    run("features", given.work / "captured", *greedy, "features=sglang", *given.overrides)
    target = load_target(
        path=given.target, revision=None, dtype="float32", device="auto", attention=None, trust_remote_code=False,
        check_health=True,
    )  # fmt: skip
    results = {"answers": compare_answers(target, plain, served)}
    results["features"] = compare_features(plain / "features", given.work / "captured/features")
    print(json.dumps(write_result(given.out, results), indent=1))


def write_prompts(source: Path, count: int, folders: list[Path]) -> None:
    """The first user turns, as a prompts stage would leave them."""
    rows = [json.loads(line) for line, _ in zip(source.open(), range(count), strict=False)]
    for folder in folders:
        (folder / "prompts").mkdir(parents=True, exist_ok=True)
        with (folder / "prompts/prompts.jsonl").open("w") as file:
            for number, row in enumerate(rows):
                first = next(message for message in row["messages"] if message["role"] == "user")
                prompt = {"id": f"p{number}", "source": "s", "license": "x", "messages": [first]}
                file.write(json.dumps(prompt) + "\n")


def run(stage: str, folder: Path, *overrides: str) -> None:
    command = [sys.executable, str(ROOT / "precompute.py"), f"stages=[{stage}]", f"out_dir={folder}", *overrides]
    subprocess.run(command, check=True, cwd=ROOT)


def compare_answers(target: Target, plain: Path, served: Path) -> dict[str, Any]:
    """How many answers are equal, and at each first difference by how much the logits of the two tokens differ."""
    rows = [{row["id"]: row for row in read_jsonl(each / "responses/responses.jsonl")} for each in (plain, served)]
    gaps, equal = [], 0
    for name, ours in rows[0].items():
        theirs = rows[1][name]
        if ours["input_ids"] == theirs["input_ids"]:
            equal += 1
            continue
        [(start, _)] = ours["turns"]
        pairs = zip(ours["input_ids"][start:], theirs["input_ids"][start:], strict=False)
        at = start + next(place for place, (one, other) in enumerate(pairs) if one != other)
        ids = torch.tensor([ours["input_ids"][:at]], device=target.device)
        with torch.inference_mode():
            logits = target.model(input_ids=ids).logits[0, -1].float()
        best = logits.max()
        gaps.append(float(best - min(logits[ours["input_ids"][at]], logits[theirs["input_ids"][at]])))
    tokens = [sum(end - start for row in each.values() for start, end in row["turns"]) for each in rows]
    return {
        "answers": len(rows[0]), "equal": equal, "answer_tokens": tokens, "first_differences": len(gaps),
        "largest_gap_of_logits": max(gaps, default=0.0), "median_gap_of_logits": median(gaps or [0.0]),
        "missing": len(rows[0].keys() ^ rows[1].keys()),
    }  # fmt: skip


def compare_features(plain: Path, captured: Path) -> dict[str, Any]:
    stores = [FeatureStore(LocalFolder(path)) for path in (plain, captured)]
    refs = [{ref.entry.id: ref for ref in store.samples} for store in stores]
    aux, last, same, tokens = [], [], 0, 0
    for name, ref in refs[0].items():
        one, other = stores[0].read(ref), stores[1].read(refs[1][name])
        aux.append(relative(one.aux_hidden_states, other.aux_hidden_states))
        last.append(relative(one.last_hidden_state, other.last_hidden_state))
        same += int((one.teacher_argmax == other.teacher_argmax).sum())
        tokens += len(one.teacher_argmax)
    return {
        "samples": len(refs[0]), "missing": len(refs[0].keys() ^ refs[1].keys()), "teachers": tokens,
        "same_teacher": same / tokens, "aux_median_difference": float(torch.cat(aux).median()),
        "aux_worst_difference": float(torch.cat(aux).max()), "last_median_difference": float(torch.cat(last).median()),
        "last_worst_difference": float(torch.cat(last).max()), "bytes": [store.manifest.bytes for store in stores],
    }  # fmt: skip


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    """The distance of each row, as a share of its length."""
    return (ours.float() - theirs.float()).norm(dim=-1) / ours.float().norm(dim=-1)


if __name__ == "__main__":
    main()
