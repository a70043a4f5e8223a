"""Whether what was trained is what is served: accept lengths of real SGLang and of our decoder on the same prompts.

python benchmarks/sglang_parity.py --out OUT target.path=TARGET head=HEAD prompts.path=heldout.jsonl limit=200 \
    [launch.python=PYTHON 'launch.env={PYTHONPATH: SITE}' 'launch.extra_flags={attention-backend: triton}']

For a chain and a tree: SGLang answers the prompts, one request at a time; our decoder answers them in bfloat16 and
float32; and our drafter is replayed on SGLang's own texts, which leaves out what two different texts make. The keys
behind OUT are those of serve.py. Writes OUT/sglang_parity.json.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from result import ROOT, write_result

from eagle3.adapters.quiet import quiet_libraries
from eagle3.answers.build import chat_of
from eagle3.answers.generate import generate
from eagle3.compose import compose_run
from eagle3.decoding.batched_trees import BatchedTrees
from eagle3.decoding.replay import Recording
from eagle3.decoding.speculate import Speculator
from eagle3.engine.command import launch_command, shell_line
from eagle3.engine.draft import Draft
from eagle3.engine.endpoint import server_information
from eagle3.engine.process import Server
from eagle3.head_files.format import load_head
from eagle3.serving.bench.run import prompt_sets
from eagle3.serving.server.launch import prepare
from eagle3.serving.server.load import measure_load
from eagle3.settings.serving import BenchRun
from eagle3.storage.files import read_json, write_json
from eagle3.target.capture import Capture
from eagle3.target.files import TargetFiles, read_target_files
from eagle3.target.model import load_target

SHAPES: dict[str, dict[str, Any]] = {
    "chain of 3": {"steps": 3, "topk": 1, "draft_tokens": 4},
    "tree 5/4/16": {"steps": 5, "topk": 4, "draft_tokens": 16},
    "tree 4/8/24": {"steps": 4, "topk": 8, "draft_tokens": 24},
}
DTYPES = ("bfloat16", "float32")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    quiet_libraries()
    run = compose_run("serve", "action=bench", "run_dir=.", *options.overrides)
    target = read_target_files(**vars(run.target))
    room = target.text_config.max_position_embeddings - run.max_new_tokens - 9
    own = {"prompts": run.prompts.path}
    prompts = prompt_sets(
        chat_of(run.chat, target), own, split=run.prompts.split, limit=run.limit, max_length=room
    )["prompts"]  # fmt: skip
    served = {shape: served_or_kept(run, target, prompts, shape, options.out) for shape in SHAPES}
    decoded = {shape: {dtype: decode(options.overrides, shape, dtype) for dtype in DTYPES} for shape in SHAPES}
    result = {
        "prompts": len(prompts),
        "shapes": {
            shape: {
                "served": served[shape]["accept_length"],
                "decoded": {dtype: found["accept_length"] for dtype, found in decoded[shape].items()},
                "lossless": {dtype: found["lossless"] for dtype, found in decoded[shape].items()},
                **replayed(run, prompts, served[shape]["answers"], shape),
                "server": served[shape]["server"],
                "command": served[shape]["command"],
            }
            for shape in SHAPES
        },
        "simulated_in_training": read_json(Path(run.head) / "training.json", made_by="export")[
            "simulated_accept_length"
        ],
    }
    print(json.dumps(write_result(options.out / "sglang_parity.json", result), indent=1))


def decode(overrides: list[str], shape: str, dtype: str) -> dict[str, Any]:
    """Our decoder's answers in a process of its own, as serve.py reports them."""
    settings = [f"{key}={value}" for key, value in SHAPES[shape].items()]
    given = [override for override in overrides if not override.startswith("launch.")]
    command = ["serve.py", "action=decode", *given, *settings, f"target.dtype={dtype}"]
    print("$ python", *command, flush=True)
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def served_or_kept(
    run: BenchRun, target: TargetFiles, prompts: list[list[int]], shape: str, out: Path
) -> dict[str, Any]:
    kept = out / f"served {shape.replace('/', '-')}.json"
    if not kept.exists():
        write_json(kept, serve(run, target, prompts, shape, log=kept.with_suffix(".log")))
    return read_json(kept, made_by="this script")


def serve(run: BenchRun, target: TargetFiles, prompts: list[list[int]], shape: str, *, log: Path) -> dict[str, Any]:
    """SGLang's answers, and 1 + accepted drafts / verifications over all of them."""
    draft = Draft(head=run.head, **SHAPES[shape])
    prepare(run.launch, target, draft)
    command = launch_command(run.launch, target=target.path, revision=target.revision, draft=draft)
    with Server(run.launch, command, log=log, name=shape) as server:
        sampling = {"temperature": 0, "max_new_tokens": run.max_new_tokens}
        load = measure_load(
            server.url, prompts, concurrency=1, sampling=sampling, warmup=2, timeout_s=600, progress=shape
        )
        information = server_information(server.url)
    if load.failed:
        sys.exit(f"{len(load.failed)} requests failed, the first with: {load.failed[0].error}")
    return {
        "accept_length": 1
        + sum(one.correct_drafts for one in load.answers) / sum(one.verify_ct for one in load.answers),
        "answers": [list(answer.output_ids) for answer in load.answers],
        "server": information,
        "command": shell_line(run.launch, command),
    }


def replayed(run: BenchRun, prompts: list[list[int]], answers: list[list[int]], shape: str) -> dict[str, float]:
    """Our drafter, in bfloat16, on the texts that SGLang gave: in rounds as they are served, and begun at every token,
    which is what val/accept_length averages over."""
    target = load_target(**{**vars(run.target), "dtype": "bfloat16"})
    loaded = load_head(run.head, num_layers=len(target.layers), dtype=target.embedding.dtype)
    speculator = Speculator(target, loaded.head, loaded.capture_layers)
    capture = Capture(target, speculator.capture_layers)
    settings = SHAPES[shape]
    texts = [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]
    places = []
    for prompt, text in zip(prompts, texts, strict=True):
        # A server counts accepted drafts behind the end of an answer too, so the drafter is asked for them.
        [beyond] = generate(
            target.model, [text], seeds=[0], temperature=0.0, top_p=1.0, top_k=0, pad_id=0, stop_ids=frozenset(),
            max_new_tokens=settings["steps"],
        )  # fmt: skip
        trees = BatchedTrees(speculator, capture, text + beyond.token_ids)
        places.append(trees.places(range(len(prompt), len(text) - 1), settings["topk"], settings["steps"]))
    recording = Recording({settings["topk"]: places})
    gains = [gain for each in recording.replay_each(**settings) for gain in each.gained]
    everywhere = [(one[:, settings["steps"] - 1, : settings["steps"]] < settings["draft_tokens"] - 1) for one in places]
    gained = sum(float(one.sum()) for one in everywhere) / sum(len(one) for one in everywhere)
    return {"replayed": 1 + sum(gains) / len(gains), "begun_at_every_token": 1 + gained}


if __name__ == "__main__":
    main()
