"""Checks of the tensors: SGLang's loader takes what it knows by name and says nothing of the rest. It turns draft id i
into target id i + d2t[i], whatever d2t holds.

Shapes: V target vocabulary, D draft vocabulary, H hidden size.
"""

from collections.abc import Iterator

import torch
from jaxtyping import Float, Int
from torch import Tensor

from eagle3.head.draft_vocab import from_offsets
from eagle3.head.eagle3 import EAGLE3
from eagle3.head_files.files import HeadFiles
from eagle3.head_files.finding import MAKE_AGAIN, Problem, TargetFacts
from eagle3.head_files.format import (
    EMBEDDING,
    INTEGERS,
    VOCABULARY_MAPS,
    draft_head,
    expected_shapes,
    head_config,
    lost_values,
    read_kind,
)

BIASES_AND_NORMS = (".bias", "q_norm.weight", "k_norm.weight")
RECOMPUTED = "rotary_emb.inv_freq"  # old heads store RoPE's frequencies
SAME_ROW = 0.01  # of a row's length: rounding to bfloat16 moves it by 0.4 % at most
CHUNK = 8192


def check_tensors(files: HeadFiles, facts: TargetFacts) -> Iterator[Problem]:
    """The file holds every tensor that a server loads, in its shape and finite, and no other."""
    if read_kind(files) is not EAGLE3:  # no server loads it, our decoder does
        known = {name for name, _ in draft_head(files, None).named_parameters()}
        for name in sorted(files.tensors.keys() - known - {*VOCABULARY_MAPS}):
            yield "error", f"{name} is unknown to heads of kind {read_kind(files).name}; {MAKE_AGAIN}"
        return
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
        if number := lost_values(files.tensors[name]):
            yield "error", f"{name} holds {number} non-finite values: every draft would be rejected; {MAKE_AGAIN}"
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
        yield "skipped", f"no target to compare {EMBEDDING} with"
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


def check_draft_vocab_size(files: HeadFiles, facts: TargetFacts) -> Iterator[Problem]:
    """draft_vocab_size is stated."""
    if files.config.get("draft_vocab_size") is None:
        lm_head = files.tensors.get("lm_head.weight")
        rows = "the rows of lm_head" if lm_head is None else len(lm_head)
        is_null = "draft_vocab_size" in files.config
        fault = "=null: SGLang drafts with the target's lm_head" if is_null else " is missing: SGLang stops"
        yield "error", f"draft_vocab_size{fault}; set it to {rows}"


def check_d2t(files: HeadFiles, facts: TargetFacts) -> Iterator[Problem]:
    """d2t holds offsets; d2t + arange are different tokens of the target's vocabulary."""
    size, vocab_size = head_config(files).draft_vocab_size, facts.config.vocab_size
    d2t = files.tensors.get("d2t")
    if d2t is None:
        if size != vocab_size:
            yield "error", f"d2t is missing: SGLang takes the {size} draft ids for target ids; {MAKE_AGAIN}"
        return
    if d2t.dtype not in INTEGERS or d2t.shape != (size,):
        yield "error", f"d2t is {d2t.dtype} {tuple(d2t.shape)} instead of int64 ({size},): SGLang stops; {MAKE_AGAIN}"
        return
    ids = from_offsets(d2t.long())
    # Offsets stay equal where two neighbours are both drafted; where none are, t2d tells.
    if size > 1 and bool((d2t.diff() > 0).all()) and not _marks(files.tensors.get("t2d"), ids):
        yield "error", "d2t holds target ids: SGLang adds the draft id to each; store d2t - arange(len(d2t))"
    elif not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
        found = f"{int(ids.min())} to {int(ids.max())}, outside 0 to {vocab_size - 1}"
        yield "error", f"d2t + arange goes from {found}: SGLang looks up tokens that do not exist; {MAKE_AGAIN}"
    elif doubled := size - len(ids.unique()):  # in any order: some trainers sort by frequency
        found = f"d2t + arange gives {doubled} of {size} draft ids a token that another has"
        yield "error", f"{found}: a row of lm_head drafts what it was not trained for; {MAKE_AGAIN}"


def check_t2d(files: HeadFiles, facts: TargetFacts) -> Iterator[Problem]:
    """t2d, which other servers and trainers read, marks the tokens of d2t."""
    d2t, t2d, size = files.tensors.get("d2t"), files.tensors.get("t2d"), head_config(files).vocab_size
    if t2d is None and d2t is None and head_config(files).draft_vocab_size == size:
        return  # a whole vocabulary needs no map
    if t2d is None or d2t is None:
        yield "skipped", "SGLang does not read t2d, and the file lacks it or d2t"
        return
    if d2t.dtype not in INTEGERS or d2t.ndim != 1:
        yield "skipped", "correct d2t first"
    elif t2d.dtype != torch.bool or t2d.shape != (size,):
        yield "error", f"t2d is {t2d.dtype} {tuple(t2d.shape)} instead of bool ({size},); {MAKE_AGAIN}"
    elif not _marks(t2d, from_offsets(d2t.long())):
        marked = f"t2d ({int(t2d.sum())} marked) does not mark the {len(d2t)} tokens of d2t"
        yield "error", f"{marked}: one of them is wrong; {MAKE_AGAIN}"


def _marks(t2d: Tensor | None, ids: Int[Tensor, " D"]) -> bool:
    """Say whether t2d marks these target ids and no others."""
    return t2d is not None and t2d.ndim == 1 and torch.equal(t2d.nonzero().flatten(), ids.sort().values)
