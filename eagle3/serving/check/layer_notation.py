"""Checks whether a head of another trainer reads the layers that it was trained on.

Two notations of the same layers are in use, one off from each other, and no file says which one it uses. On the wrong
layers a head still drafts, but worse, and often not so much worse that the accept length of a few prompts shows it:
with its layers one off, a head for a target of 12 layers accepted 4 and 6 % less, within the error of 6 prompts. The
probability that the head gives the target's own tokens shows it: every reading of the ids is scored on the same tokens,
so the differences between tokens cancel out.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch.nn import functional

from eagle3.decoding.batched_trees import BatchedTrees
from eagle3.decoding.paired import left_out_ratios, standard_error
from eagle3.decoding.speculate import Speculator
from eagle3.head.draft_head import DraftHead
from eagle3.head_files.files import HeadFiles, ids_of
from eagle3.head_files.finding import Finding
from eagle3.head_files.format import load_head
from eagle3.serving.check.accept_length import Measurer
from eagle3.serving.check.prompts import PromptSet
from eagle3.target.capture import Capture
from eagle3.target.model import Target

CHECK = "layer_notation"
SURE = 2.5  # standard errors
Layers = tuple[int, ...]  # indices into `hidden_states`


class CrossEntropy(NamedTuple):
    """Cross-entropy of the head's first drafts, in nats, summed over the answer's tokens in the draft vocabulary."""

    nats: float
    tokens: int


def check_notation(files: HeadFiles, measurer: Measurer, prompts: PromptSet, answers: Sequence[list[int]]) -> Finding:
    """Find an error if the head knows the target's answers to these prompts clearly better on other layers."""
    target, num_layers = measurer.target, len(measurer.target.layers)
    head = load_head(files.path, num_layers=num_layers, dtype=target.embedding.dtype).head
    served, *others = readings(files, num_layers)
    texts = [*zip(prompts.prompts, answers, strict=True)]
    losses = {layers: [first_draft_loss(head, target, layers, *text) for text in texts] for layers in (served, *others)}
    means = {layers: mean_loss(of_texts) for layers, of_texts in losses.items()}
    best = min(means, key=means.__getitem__)
    others_losses = "; ".join(f"{means[layers]:.3f} on {_ids(layers)}" for layers in others)
    summary = (
        f"cross-entropy of first drafts {means[served]:.3f} on the layer ids {_ids(served)} of SGLang; {others_losses}"
    )
    saved = [CrossEntropy(s.nats - b.nats, s.tokens) for s, b in zip(losses[served], losses[best], strict=True)]
    if best == served or mean_loss(saved) <= SURE * error_of_mean(saved):
        return Finding(CHECK, "ok", summary)
    accepted = measurer.decoded(files.path, prompts, capture_layers=list(best)).accept_length
    remedy = f"set {ids_of([*best])}, which gives an accept length of {accepted:.3f}"
    return Finding(CHECK, "error", f"{summary}: the head was not trained on these layers; {remedy}")


def readings(files: HeadFiles, num_layers: int) -> list[Layers]:
    """Return the layers that SGLang takes, the same one lower and one higher, and both readings of top-level ids."""
    served, elsewhere = files.served_layers(num_layers), files.top_level_ids or []
    shifted = [
        tuple(sorted(layer + shift for layer in base))
        for base, shift in ((served, 0), (served, -1), (served, 1), (elsewhere, 0), (elsewhere, 1))
    ]
    fitting = [ids for ids in shifted if len(set(ids)) == len(served) and ids[0] >= 1 and ids[-1] < num_layers]
    return list(dict.fromkeys(fitting))


@torch.inference_mode()
def first_draft_loss(
    head: DraftHead, target: Target, layers: Layers, prompt_ids: list[int], answer_ids: list[int]
) -> CrossEntropy:
    """Return the cross-entropy of the drafts that would begin at each token of the answer, reading `layers`."""
    ids, first = [*prompt_ids, *answer_ids], len(prompt_ids)  # prefill gives the answer's first token
    trees = BatchedTrees(Speculator(target, head, layers), Capture(target, layers), ids)
    logits = head.logits(trees.first_outputs(range(first, len(ids) - 1)))
    matches = trees.ids[first + 1 :, None] == head.draft_ids
    known = matches.any(-1)
    nats = functional.cross_entropy(logits[known].float(), matches[known].int().argmax(-1), reduction="sum")
    return CrossEntropy(float(nats), int(known.sum()))


def mean_loss(losses: Sequence[CrossEntropy]) -> float:
    """Return nats per token."""
    return sum(item.nats for item in losses) / max(1, sum(item.tokens for item in losses))


def error_of_mean(losses: Sequence[CrossEntropy]) -> float:
    """Return the standard error of the nats per token; infinite for fewer than two texts with tokens."""
    counted = np.array([loss for loss in losses if loss.tokens], float)
    return standard_error(left_out_ratios(*counted.T)) if len(counted) > 1 else math.inf


def _ids(layers: Sequence[int]) -> list[int]:
    """Return the ids of layers as config.json counts them."""
    return [layer - 1 for layer in layers]
