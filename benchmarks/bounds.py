"""What bounds a head: what it accepts on its own states, and what it would if each step were given the target's.

    python benchmarks/training_ways.py --folder DIR … --ways '{"as it is": [], "MLP four times as wide":
        ["model.intermediate_size=4064"], "all tokens drafted": ["model.draft_vocab_size=12288"]}'
    python benchmarks/bounds.py --answered STORE --out benchmarks/results/bounds.json --heads DIR/heads/*

STORE holds features of the target's greedy answers to held-out prompts. On these the rounds of decoding are followed
(eagle3/head/rounds.py) with chains of 3 and 7: `drafts` as a server would, each step on the head's own state, and
`oracle`, where each step gets the target's states of all text before, which no head has. Between the two lies what the
head's own states lose; above the oracle, what the captured layers, the parameters and the training do not tell.
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
from training_ways import CHAINS

from eagle3.errors import InputError
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
    parser.add_argument("--answered", type=Path, required=True, help="feature store of greedy answers")
    parser.add_argument("--heads", type=Path, nargs="+", required=True, help="exported heads")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    source = open_source(str(options.answered))
    facts = source.describe()
    result: dict[str, Any] = {key: facts[key] for key in ("samples", "answer_tokens")}
    result["heads"] = {path.name: measured(head_for(path, source), source) for path in options.heads}
    print(json.dumps(write_result(options.out, result, arguments)["heads"], indent=1))


def head_for(path: Path, source: FeatureSource) -> DraftHead:
    """Read a head; InputError unless it takes the layers that the store holds."""
    loaded, stored = load_head(path, num_layers=source.target_config.num_layers), source.made_from.capture_layers
    if [*loaded.capture_layers] != [*stored]:
        raise InputError(f"head={path} takes layers {[*loaded.capture_layers]}, {source.location} holds {[*stored]}")
    return loaded.head


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
