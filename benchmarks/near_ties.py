"""How far the accept length of a few prompts moves when near-ties of the target flip, as they do in bf16.

python benchmarks/near_ties.py --out OUT target.path=TARGET head=HEAD prompts.path=FILE.jsonl limit=24

The target answers greedily, and once for each seed at a temperature so low that it says something else only where two
tokens are about equally likely; every setting is replayed on these answers. The keys behind OUT are those of serve.py.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import hydra
from result import write_result
from sglang_parity import read_prompts

from eagle3 import cli
from eagle3.answers.generate import generate
from eagle3.decoding.replay import record
from eagle3.decoding.speculate import Speculator
from eagle3.serving.head.format import load_head
from eagle3.serving.tune.predict import Setting
from eagle3.target.model import load_target

SETTINGS = [Setting(4, 8, 24), Setting(7, 8, 16), Setting(5, 4, 16), Setting(1, 8, 4)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--temperature", type=float, default=0.04)
    parser.add_argument("--seeds", type=int, default=12)
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    cli.quiet_libraries()
    with hydra.initialize_config_dir(cli.CONF, version_base="1.3"):
        config = hydra.compose("serve", ["action=decode", *options.overrides])
    target = load_target(**cli.plain(config.target))
    loaded = load_head(config.head, num_layers=len(target.layers), dtype=target.embedding.dtype)
    speculator = Speculator(target, loaded.head, loaded.capture_layers)
    prompts = read_prompts(config, target)
    greedy, greedy_lengths = answered(speculator, prompts, config.max_new_tokens, temperature=0.0, seed=0)
    same: list[float] = []
    moved: dict[Setting, list[float]] = {setting: [] for setting in SETTINGS}
    for number in range(1, options.seeds + 1):
        seed = 1000 * number  # a seed for each prompt is counted from there
        answers, lengths = answered(speculator, prompts, config.max_new_tokens, options.temperature, seed)
        same.append(sum(one == other for one, other in zip(answers, greedy, strict=True)) / len(greedy))
        for setting in SETTINGS:
            moved[setting].append(lengths[setting] / greedy_lengths[setting] - 1)
    rows = {"/".join(map(str, one)): summary(greedy_lengths[one], moved[one]) for one in SETTINGS}
    result = {"prompts": len(prompts), "seeds": options.seeds, "same_answers": [min(same), max(same)], "settings": rows}
    print(json.dumps(write_result(options.out, result), indent=1))


def answered(
    speculator: Speculator, prompts: list[list[int]], tokens: int, temperature: float, seed: int
) -> tuple[list[list[int]], dict[Setting, float]]:
    """The answers, and the accept length of every setting on them."""
    same: dict[str, Any] = {"max_new_tokens": tokens, "temperature": temperature}
    seeds, target = [*range(seed, seed + len(prompts))], speculator.target
    said = generate(target.model, prompts, seeds=seeds, top_p=1.0, top_k=0, pad_id=0, stop_ids=target.stop_ids, **same)
    recording = record(
        speculator, prompts, steps=7, topks=[4, 8], seed=seed, batch_size=len(prompts), progress=f"seed {seed}", **same
    )
    lengths = {setting: recording.replay(**setting._asdict()).accept_length for setting in SETTINGS}
    return [answer.token_ids for answer in said], lengths


def summary(greedy: float, moved: list[float]) -> dict[str, float]:
    numbers = {"greedy": greedy, "standard_deviation": statistics.stdev(moved), "least": min(moved), "most": max(moved)}
    return {name: round(number, 4) for name, number in numbers.items()}


if __name__ == "__main__":
    main()
