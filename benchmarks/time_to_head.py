"""From prompts to an exported head with the real commands, for a target of Llama-3.1-8B's shape: how long.

    python benchmarks/time_to_head.py --work DIR --out benchmarks/results/time_to_head.json \
        --launch '{"python": "/path/to/sglang/venv/bin/python"}'          # 16 minutes, 137 GB in DIR
    python benchmarks/time_to_head.py --work DIR2 --out FILE --conversations 65536 --one FIRST.json \
        --launch …            # on all GPUs, here 8, 8,192 conversations each: 490 GB; FIRST.json: the same on one
    python benchmarks/time_to_head.py --work DIR4 --out FILE --shape 70b --trainer fsdp --conversations 1024 \
        --launch '{"tp_size": 4, …}'                    # 141 GB of weights, on eight GPUs two servers
    python benchmarks/time_to_head.py --work DIR3 --out DIR3/result.json --tiny       # every step on a CPU, 2 minutes

Prompts of random words, 128 tokens each with their template; the weights are random, so an answer ends at its 256th
token. Answers and features take all visible GPUs, one server each, and the training does with DDP, a pack on each.
Steps that DIR/steps.json names are not run again. For 100,000 conversations, what a step does for each token is
scaled by its own rate, and the start of servers and programs is counted once; for that, one GPU must be visible:
CUDA_VISIBLE_DEVICES=0.
"""

import argparse
import csv
import json
import random
import re
from pathlib import Path
from statistics import harmonic_mean
from typing import Any

import torch
from engine_rates import LLAMA_8B, LLAMA_70B, random_target
from result import as_override, call, write_result
from transformers import AutoTokenizer

from eagle3.storage.files import read_json, write_json, write_jsonl

PROMPT_TOKENS, ANSWER_TOKENS, WANTED = 128, 256, 100_000
TINY = {
    "vocab_size": 4096, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 8, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 1024,
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {"8b": {"sizes": LLAMA_8B}, "70b": {"sizes": LLAMA_70B, "device": "cpu"}}
GPU_STEPS = ("answers", "features", "training")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--conversations", type=int, default=20_000)
    parser.add_argument("--dtype", default="fp8", help="of the features")
    parser.add_argument("--requests", type=int, default=512, help="that the server of answers decodes at a time")
    parser.add_argument("--shape", choices=SHAPES, default="8b", help="of the target, Llama's")
    parser.add_argument("--trainer", choices=["gpu", "ddp", "fsdp"], help="gpu on one GPU, ddp on several")
    parser.add_argument("--launch", type=json.loads, default={}, help="keys of conf/launch, as JSON")
    parser.add_argument("--tiny", action="store_true", help="32 conversations of a tiny target, by Hugging Face")
    parser.add_argument("--one", type=Path, help="result on one GPU: rates are also given as shares of n times those")
    parser.add_argument("--until", choices=["prompts", *GPU_STEPS, "export"], default="export")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    made = {"sizes": TINY, "device": "cpu"} if options.tiny else SHAPES[options.shape]
    options.conversations = 32 if options.tiny else options.conversations
    target = random_target(options.work / "target", **made)
    write_prompts(options.work / "prompts.jsonl", target, options.conversations)
    steps = {}
    for name, command in commands(options, target).items():
        steps[name] = timed_once(options.work, name, command)
        result = write_result(options.out, results(options, steps))  # of all steps so far
        if name == options.until:
            break
    print(json.dumps(result, indent=1))


def commands(options: argparse.Namespace, target: Path) -> dict[str, list[str]]:
    work, engine = options.work.resolve(), "sglang"
    trainer = options.trainer or ("ddp" if torch.cuda.device_count() > 1 else "gpu")
    launch = [f"launch.{key}={as_override(value)}" for key, value in options.launch.items()]
    packs = ["data.pack_tokens=16384", "data.val_fraction=0.002"]
    if options.tiny:
        engine, trainer = "huggingface", "cpu"
        packs = ["data.pack_tokens=512", "data.val_fraction=0.1", "trainer.log_every_n_steps=2"]
    random_weights = "target.check_health=false"  # the check refuses weights that nobody trained
    data = [f"target.path={target.resolve()}", random_weights, f"out_dir={work}/data"]
    given = [f"prompts.path={work}/prompts.jsonl", "prompts.license=MIT", "prompts/privacy=off"]
    answer = [f"answers={engine}", f"sampling.max_new_tokens={ANSWER_TOKENS}", "sampling.temperature=0.7"]
    at_a_time = [f"answers.in_flight={options.requests * 5 // 4}", f"launch.max_running_requests={options.requests}"]
    answer += ["answers.window=8"] if options.tiny else at_a_time
    return {
        "prompts": ["precompute.py", f"out_dir={work}/data", *given, "stages=[prompts]"],
        "answers": ["precompute.py", *data, *answer, *launch, "stages=[answers]"],
        "features": ["precompute.py", *data, f"features={engine}", f"features.dtype={options.dtype}", *launch,
                     "stages=[features]"],
        "training": ["train.py", f"data.path={work}/data/features", f"hydra.run.dir={work}/run", f"trainer={trainer}",
                     "trainer.max_epochs=1", *packs],
        "export": ["serve.py", "action=export", f"run={work}/run", f"head={work}/head", random_weights,
                   "check.min_accept_length=1.0", "check.max_difference=9", "limit=2", "max_new_tokens=16"],
    }  # fmt: skip


def write_prompts(path: Path, target: Path, count: int) -> None:
    """Write prompts of random words that have PROMPT_TOKENS tokens as the target is asked."""
    if path.exists():
        return
    tokenizer, drawn = AutoTokenizer.from_pretrained(target), random.Random(0)
    words = [word for word in map(tokenizer.decode, range(300, 4000)) if re.fullmatch(r" [a-z]{3,}", word)]

    def row(number: int) -> dict[str, Any]:
        text = f"Question {number}:" + "".join(drawn.choice(words) for _ in range(PROMPT_TOKENS))
        message = {"role": "user", "content": text}
        ids = tokenizer.apply_chat_template([message], add_generation_prompt=True, return_dict=False)
        extra = len(ids) - PROMPT_TOKENS
        return {"messages": [{"role": "user", "content": text.rsplit(" ", extra)[0] if extra > 0 else text}]}

    write_jsonl(path, (row(number) for number in range(count)))


def timed_once(work: Path, name: str, command: list[str]) -> dict[str, Any]:
    """Run a step unless it has been run, and return its seconds and the rate that it told of itself."""
    path = work / "steps.json"
    steps = read_json(path, made_by="") if path.exists() else {}
    if name not in steps:
        log = work / f"{name}.log"
        seconds = call(*command, log=log)
        steps[name] = {"seconds": seconds, "tokens_per_s": rate(work, name, log.read_text())}
        if name == "features":
            steps[name]["bytes"] = sum(path.stat().st_size for path in (work / "data/features").iterdir())
        write_json(path, steps)
        print(name, json.dumps(steps[name]), flush=True)
    return steps[name]


def rate(work: Path, name: str, log: str) -> float | None:
    if name == "training":
        with (work / "run/metrics.csv").open() as file:
            told = [float(row["train/tokens_per_s"]) for row in csv.DictReader(file) if row["train/tokens_per_s"]]
        return harmonic_mean(told[1:])  # the first holds the start
    found = re.search(rf"{name}: (\d+) [a-z ]*tokens/s, counted from the first result", log)
    return float(found[1]) if found else None


def results(options: argparse.Namespace, steps: dict[str, dict[str, Any]]) -> dict[str, Any]:
    tokens = {
        "answers": options.conversations * ANSWER_TOKENS,
        "features": options.conversations * (PROMPT_TOKENS + ANSWER_TOKENS),
        "training": options.conversations * (PROMPT_TOKENS + ANSWER_TOKENS),
    }
    gpus = 0 if options.tiny else torch.cuda.device_count()
    found: dict[str, Any] = {
        "shape": options.shape, "conversations": options.conversations, "gpus": gpus, "steps": steps,
    }  # fmt: skip
    if "features" in steps:
        stored = steps["features"]["bytes"]
        found |= {"features_dtype": options.dtype, "features_bytes": stored}
        found["bytes_per_token"] = stored / tokens["features"]
    if set(GPU_STEPS) <= set(steps) and gpus == 1:
        hours, found["starts"] = {}, {}
        for name in GPU_STEPS:
            at_work = tokens[name] / steps[name]["tokens_per_s"]
            found["starts"][name] = steps[name]["seconds"] - at_work  # and ends
            hours[name] = (steps[name]["seconds"] + (WANTED / options.conversations - 1) * at_work) / 3600
        found["gpu_seconds"] = sum(steps[name]["seconds"] for name in GPU_STEPS)
        found["for_100000"] = {"gpu_hours": sum(hours.values()), **{f"{name}_hours": hours[name] for name in hours}}
    if options.one:
        one = read_json(options.one, made_by="benchmarks/time_to_head.py")["steps"]
        found["share_of_n_times_one"] = {
            name: steps[name]["tokens_per_s"] / one[name]["tokens_per_s"] / max(gpus, 1)
            for name in GPU_STEPS
            if name in steps and one[name]["tokens_per_s"]  # None: the step was over before it had a rate
        }
    return found


if __name__ == "__main__":
    main()
