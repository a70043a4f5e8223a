"""What bounds a head: heads with more parameters, and what each would accept if it were shown what it cannot know.

    python benchmarks/bounds.py --folder DIR --out benchmarks/results/bounds.json --store STORE --answered ANSWERED \\
        --ways '{"as it is": [], "MLP four times as wide": ["model.intermediate_size=4064"],
                 "all tokens drafted": ["model.draft_vocab_size=12288"]}'

STORE is trained on as in training_ways.py; ANSWERED holds features of the target's greedy answers to held-out prompts.
On these the rounds of decoding are followed (eagle3/head/rounds.py) with chains of 3 and 7: `drafts` as a server would,
each step on the head's own state, and `oracle`, where each step gets the target's states of all text before, which no
head has. Between the two lies what the unroll loses; above the oracle, what captured layers and parameters do not tell.
"""

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Int
from result import write_result
from torch import Tensor
from training_ways import CHAINS, add_arguments, head_folder, trained_and_compared

from eagle3.features.joined import open_source
from eagle3.features.sample import Sample
from eagle3.features.source import FeatureSource
from eagle3.head.batch import TttBatch, ttt_batch
from eagle3.head.draft_head import DraftHead
from eagle3.head.loss import UnrollLoss, plain_loss
from eagle3.head.rounds import rounds
from eagle3.head.unroll import unroll
from eagle3.serving.head.format import load_head

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOGETHER = 8  # samples in a pack


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--answered", type=Path, required=True)
    parser.add_argument("--ways", type=json.loads, required=True, help="names and overrides of train.py, as JSON")
    parser.add_argument("--experiment", default="quickstart")
    parser.add_argument("overrides", nargs="*", help="of train.py for every way")
    add_arguments(parser)
    options = parser.parse_args(arguments)
    folder, seeds = options.folder.resolve(), range(options.seeds)
    general = [f"experiment={options.experiment}", f"data.path={options.store.resolve()}", *options.overrides]
    runs = {(name, seed): [*general, *own, f"seed={seed}"] for seed in seeds for name, own in options.ways.items()}
    result = {"experiment": options.experiment, "ways": options.ways, "target": Path(options.target).name}
    result |= trained_and_compared(folder, runs, options)
    source = open_source(str(options.answered))
    result["bounds"] = {
        way: [measured(load_head(head_folder(folder, way, seed)).head, source) for seed in seeds]
        for way in options.ways
    }
    print(json.dumps(write_result(options.out, result, arguments)["bounds"], indent=1))


def measured(head: DraftHead, source: FeatureSource) -> dict[str, Any]:
    """Return the accept lengths of chains, by who gives the states, and the share of tokens that have no draft."""
    embedding, lm_head = (weight.to(DEVICE, torch.float32) for weight in source.target_weights())
    head = head.to(DEVICE, torch.float32)
    counts = {(kind, steps): torch.zeros(steps + 1) for kind in ("drafts", "oracle") for steps in CHAINS}
    tokens = Counter[bool]()
    samples = [source.read(ref) for ref in source.samples]
    for begin in range(0, len(samples), TOGETHER):
        together = samples[begin : begin + TOGETHER]
        gained = {
            kind: gained_of(kind, head, embedding, lm_head[head.draft_ids], together, source)
            for kind in ("drafts", "oracle")
        }
        for (kind, steps), count in counts.items():
            count += rounds(*gained[kind], steps=steps)
        for sample in together:
            tokens.update(torch.isin(sample.teacher_argmax, head.draft_ids.cpu()).tolist())
    found: dict[str, Any] = {"drafts": {}, "oracle": {}, "outside": tokens[False] / tokens.total()}
    for (kind, steps), count in counts.items():
        found[kind][steps] = 1 + float((count * torch.arange(steps + 1)).sum() / count.sum())
    return found


@torch.no_grad()
def gained_of(
    kind: str, head: DraftHead, embedding: Tensor, teacher_head: Tensor, samples: list[Sample], source: FeatureSource
) -> tuple[Int[Tensor, " R"], Int[Tensor, " R"]]:
    """Return how many drafts in a row are right if a chain begins at an anchor, and the anchors."""
    most = max(CHAINS) if kind == "drafts" else 1
    batch: TttBatch = ttt_batch(samples, ttt_steps=most).to(DEVICE)
    hidden = unroll(head, embedding, batch, most)
    loss = UnrollLoss(decay=1, normalize="token")
    _, metrics = plain_loss(loss, head, hidden, teacher_head, batch, source.target_config.logit_transform)
    gained, anchors = metrics.gained.cpu(), batch.anchors.cpu()
    return (gained if kind == "drafts" else in_a_row(gained.bool(), anchors)), anchors


def in_a_row(right: Bool[Tensor, " R"], anchors: Int[Tensor, " R"]) -> Int[Tensor, " R"]:
    """Return how many anchors from each on are right, up to the end of its turn: anchor i + k asks with the target's
    states what anchor i asks at step k."""
    counts = [0] * (len(right) + 1)
    next_to = [*(anchors.diff() == 1).tolist(), False]
    for place in reversed(range(len(right))):
        counts[place] = (1 + counts[place + 1] * next_to[place]) if right[place] else 0
    return torch.tensor(counts[:-1])


if __name__ == "__main__":
    main(sys.argv[1:])
