"""Checks of the tensors: SGLang's loader takes what it knows by name and says nothing of the rest.

Shapes: V target vocabulary, H hidden size.
"""

from collections.abc import Iterator

import torch
from jaxtyping import Float, Int
from torch import Tensor

from eagle3.head_files.files import HeadFiles
from eagle3.head_files.finding import MAKE_AGAIN, Problem, TargetFacts
from eagle3.head_files.format import EMBEDDING, VOCABULARY_MAPS, expected_shapes, head_config, lost_values

BIASES_AND_NORMS = (".bias", "q_norm.weight", "k_norm.weight")
RECOMPUTED = "rotary_emb.inv_freq"  # old heads store RoPE's frequencies
SAME_ROW = 0.01  # of a row's length: rounding to bfloat16 moves it by 0.4 % at most
CHUNK = 8192


def check_tensors(files: HeadFiles, facts: TargetFacts) -> Iterator[Problem]:
    """The file holds every tensor that a server loads, in its shape and finite, and no other."""
    expected = expected_shapes(files, head_config(files))
    missing = sorted(expected.keys() - files.tensors.keys())
    for name in missing:
        left = "ones" if "norm" in name else "random numbers"
        yield "error", f"{name} is missing: SGLang would use {left} instead; {MAKE_AGAIN}"
    for name in sorted(expected.keys() & files.tensors.keys()):
        shape = tuple(files.tensors[name].shape)
        if shape != expected[name]:
            made = f"config.json makes it {expected[name]}"
            yield "error", f"{name} has shape {shape}, {made}: SGLang stops loading; correct config.json"
    for name in sorted(expected.keys() & files.tensors.keys()):
        if number := lost_values(files.tensors[name]):
            yield "error", f"{name} holds {number} values that are no finite numbers, all drafts are lost; {MAKE_AGAIN}"
    for name in sorted(files.tensors.keys() - expected.keys() - {*VOCABULARY_MAPS, EMBEDDING}):
        if not name.endswith(RECOMPUTED):
            yield "error", f"{name} is unknown: SGLang silently drops it; {_fix(name, missing)}"


def _fix(name: str, missing: list[str]) -> str:
    if name.endswith(BIASES_AND_NORMS):
        return "train without it"
    if name.startswith("fc_norm."):
        return "set fc_norm=true in config.json"
    if name == "input_norm.weight":
        return "set norm_before_fc=true in config.json"
    meant = [known for known in missing if name.endswith(known)]
    return f"rename it to {max(meant, key=len)}" if meant else "rename it to a name that SGLang loads, or remove it"


def check_embedding(files: HeadFiles, facts: TargetFacts) -> Iterator[Problem]:
    """The head has no embeddings or a copy of the target's, which servers use for both."""
    stored = files.tensors.get(EMBEDDING)
    if stored is None:
        return
    if facts.embedding is None:
        yield "skipped", f"the target was not at hand to compare {EMBEDDING} with"
    elif stored.shape != facts.embedding.shape:
        shapes = f"{tuple(stored.shape)}, the target's {tuple(facts.embedding.shape)}"
        yield "error", f"{EMBEDDING} has shape {shapes}: it is a head of another target; give the one it was trained on"
    elif differing := int(_differing_rows(stored, facts.embedding)):
        yield (
            "error",
            f"{EMBEDDING} differs from the target's in {differing} of {len(stored)} rows: SGLang puts the target's in "
            f"its place, and what was trained into them is lost; train with frozen embeddings, or give the target that "
            f"they come from",
        )


def _differing_rows(stored: Float[Tensor, "V H"], target: Float[Tensor, "V H"]) -> Int[Tensor, ""]:
    """Count the rows that are further from the target's than rounding, in chunks: both need not fit in float32."""
    counts = []
    for ours, theirs in zip(stored.split(CHUNK), target.split(CHUNK), strict=True):
        wide = theirs.float().cpu()
        counts.append(((ours.float() - wide).norm(dim=-1) > SAME_ROW * wide.norm(dim=-1)).sum())
    return torch.stack(counts).sum()
