"""What can be wrong with an exported head, one function a check: servers load most of these faults without a word.

A check yields its findings; silence means that what its docstring says is so. A new one joins CHECKS.

Shapes: V target vocabulary, D draft vocabulary.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Int
from torch import Tensor

from eagle3.errors import InputError
from eagle3.head.draft_vocab import from_offsets, membership
from eagle3.head.from_target import head_facts
from eagle3.serving.checkpoint import (
    ARCHITECTURE,
    EMBEDDING,
    LAYER_IDS,
    MAKE_HEAD,
    MAPS,
    HeadFiles,
    expected_shapes,
    head_config,
    rope_of,
)
from eagle3.target import COMPARED, Target

Level = Literal["ok", "skipped", "warning", "error"]
EXPORT_AGAIN = f"export it again with: {MAKE_HEAD}"
BIASES_AND_NORMS = (".bias", "q_norm.weight", "k_norm.weight")


@dataclass(frozen=True)
class Finding:
    """`message` says what is wrong and the way out."""

    check: str
    level: Level
    message: str


@dataclass(frozen=True)
class TargetFacts:
    """What the checks need to know of the target; `fingerprint` is None where the target itself was not at hand."""

    config: dict[str, Any]  # head_facts
    dtype: str | None
    fingerprint: dict[str, str | None] | None


Problem = tuple[Level, str]
Check = Callable[[HeadFiles, TargetFacts], Iterator[Problem]]


def target_facts(target: Target, template_hash: str | None) -> TargetFacts:
    """`template_hash` is that of the template in use, which may come from a file."""
    return TargetFacts(
        config=head_facts(target.text_config, len(target.lm_head)),
        dtype=target.checkpoint_dtype,
        fingerprint=target.fingerprint | {"template_hash": template_hash},
    )


def run_checks(files: HeadFiles, facts: TargetFacts) -> list[Finding]:
    return [finding for check in CHECKS for finding in _findings(check, files, facts)]


def _findings(check: Check, files: HeadFiles, facts: TargetFacts) -> list[Finding]:
    name = check.__name__.removeprefix("check_")
    problems: list[Problem] = []
    try:
        for problem in check(files, facts):
            problems.append(problem)
    except InputError as error:  # what was found before it stays
        problems.append(("error", str(error)))
    summary = (check.__doc__ or "").splitlines()[0].rstrip(".")
    return [Finding(name, level, message) for level, message in problems or [("ok", summary)]]


def table(findings: list[Finding]) -> str:
    width = max(len(finding.check) for finding in findings)
    return "\n".join(f"{item.level:<8} {item.check:<{width}}  {item.message}" for item in findings)


def has_errors(findings: list[Finding]) -> bool:
    return any(finding.level == "error" for finding in findings)


def require_no_errors(findings: list[Finding], head: str) -> None:
    errors = [f"{finding.check}: {finding.message}" for finding in findings if finding.level == "error"]
    if errors:
        raise InputError(f"head={head} must not be served: {'; '.join(errors)}")


# --- config.json -----------------------------------------------------------------------------------------------------


def check_model(files: HeadFiles, facts: TargetFacts) -> Iterator[Problem]:
    """Architecture and sizes are those that SGLang builds for this target."""
    expected = {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "hidden_size": facts.config["hidden_size"],
        "vocab_size": facts.config["vocab_size"],
        "tie_word_embeddings": False,
    }
    for key, value in expected.items():
        if files.config.get(key) != value:
            yield "error", f"config.json has {key}={files.config.get(key)}, this target needs {value}; {EXPORT_AGAIN}"
    if files.config.get("hidden_act", "silu") != "silu":
        yield "error", f"config.json has hidden_act={files.config['hidden_act']}, the head's is silu; set it"
    head_config(files)


def check_draft_vocab_size(files: HeadFiles, facts: TargetFacts) -> Iterator[Problem]:
    """draft_vocab_size is stated and fits the tensors."""
    size = files.config.get("draft_vocab_size")
    if size is None:
        rows = len(files.tensors["lm_head.weight"]) if "lm_head.weight" in files.tensors else "the rows of lm_head"
        yield "error", f"config.json lacks draft_vocab_size: SGLang drafts with the target's lm_head; set it to {rows}"
    elif not 0 < size <= facts.config["vocab_size"]:
        yield (
            "error",
            f"draft_vocab_size={size} exceeds the target's {facts.config['vocab_size']} tokens; {EXPORT_AGAIN}",
        )


def check_layer_ids(files: HeadFiles, facts: TargetFacts) -> Iterator[Problem]:
    """Captured layers are named as output-of-layer ids, as the head was trained."""
    ids, num_layers = files.layer_ids, facts.config["num_layers"]
    trained = [layer - 1 for layer in files.training["capture_layers"]] if files.training else None
    way_out = f"set eagle_config.{LAYER_IDS} to {trained}" if trained else EXPORT_AGAIN
    if ids is None:
        where = "only at the top level" if LAYER_IDS in files.config else "not at all"
        yield "error", f"config.json names the captured layers {where}: servers take a default of their own; {way_out}"
    elif ids != sorted(set(ids)):
        yield "error", f"layer ids {ids} do not ascend, as the inputs of fc do; {way_out}"
    elif not all(0 <= layer < num_layers - 1 for layer in ids):
        yield "error", f"layer ids {ids} must lie between 0 and {num_layers - 2} for {num_layers} layers; {way_out}"
    elif trained and ids != trained:
        shifted = ids == [layer + 1 for layer in trained]
        hint = " (those are inputs, servers count the outputs of layers)" if shifted else ""
        yield "error", f"layer ids {ids} are not those of the training, {trained}{hint}; {way_out}"
    elif trained is None:
        yield "warning", f"layer ids {ids} cannot be compared with the training: there is no training.json"


def check_rope(files: HeadFiles, facts: TargetFacts) -> Iterator[Problem]:
    """RoPE is stated and the one that the head was trained with."""
    stated = rope_of(files.config)
    trained = files.training["head_config"] if files.training else facts.config
    expected = rope_of(trained)
    older = rope_of({key: value for key, value in files.config.items() if key != "rope_parameters"})
    if stated is None:
        yield "error", f"config.json lacks rope_theta: servers assume 10000; set rope_parameters to {expected}"
    elif stated != expected:
        yield "error", f"RoPE {stated} is not that of the training, {expected}; set rope_parameters to it"
    elif older not in (None, stated):
        yield "error", f"rope_theta and rope_scaling say {older}, rope_parameters {stated}; make them agree"


def check_context(files: HeadFiles, facts: TargetFacts) -> Iterator[Problem]:
    """max_position_embeddings covers the target's context."""
    length, needed = files.config.get("max_position_embeddings") or 0, facts.config["max_position_embeddings"]
    if length < needed:
        yield (
            "error",
            f"max_position_embeddings={length} is less than the target's {needed}: long requests fail; raise it",
        )


def check_dtype(files: HeadFiles, facts: TargetFacts) -> Iterator[Problem]:
    """Tensors and config.json are in the target's dtype."""
    stated = files.config.get("dtype") or files.config.get("torch_dtype")
    stored = {str(tensor.dtype).removeprefix("torch.") for name, tensor in files.tensors.items() if name not in MAPS}
    if facts.dtype is None:
        yield "skipped", "the target's config.json names no dtype"
    elif stated != facts.dtype or stored != {facts.dtype}:
        found = ", ".join(sorted(stored))
        yield "error", f"config.json says {stated}, tensors are {found}, the target is {facts.dtype}; {EXPORT_AGAIN}"


# --- tensors ---------------------------------------------------------------------------------------------------------


def check_tensors(files: HeadFiles, facts: TargetFacts) -> Iterator[Problem]:
    """The file holds every tensor that SGLang loads, in its shape, and no other."""
    expected = expected_shapes(head_config(files))
    for name in sorted(expected.keys() - files.tensors.keys()):
        yield "error", f"{name} is missing: SGLang would leave it uninitialised; {EXPORT_AGAIN}"
    for name in sorted(expected.keys() & files.tensors.keys()):
        shape = tuple(files.tensors[name].shape)
        if shape != expected[name]:
            yield "error", f"{name} has shape {shape}, config.json makes it {expected[name]}; {EXPORT_AGAIN}"
    for name in sorted(files.tensors.keys() - expected.keys() - {*MAPS, EMBEDDING}):
        way_out = "train without it" if name.endswith(BIASES_AND_NORMS) else "rename or remove it"
        yield "error", f"{name} is unknown: SGLang would drop it without a word; {way_out}"
    if EMBEDDING in files.tensors:
        yield "warning", f"{EMBEDDING} is not needed: servers share the target's; remove it to save space"


def check_attention(files: HeadFiles, facts: TargetFacts) -> Iterator[Problem]:
    """Attention has no biases, which SGLang's draft layer would not add."""
    for key in ("attention_bias", "mlp_bias", "bias"):
        if files.config.get(key):
            yield "error", f"config.json has {key}=true, which the head cannot have in SGLang; train without it"


def check_d2t(files: HeadFiles, facts: TargetFacts) -> Iterator[Problem]:
    """d2t holds int64 offsets; d2t + arange ascends inside the target's vocabulary."""
    size, vocab_size = head_config(files).draft_vocab_size, facts.config["vocab_size"]
    d2t = files.tensors.get("d2t")
    if d2t is None:
        if size != vocab_size:
            yield "error", f"d2t is missing: the {size} draft ids would be taken for target ids; {EXPORT_AGAIN}"
        return
    ids = from_offsets(d2t.long())
    if d2t.dtype != torch.int64 or d2t.shape != (size,):
        yield "error", f"d2t is {d2t.dtype} {tuple(d2t.shape)} instead of int64 ({size},); {EXPORT_AGAIN}"
    elif holds_absolute_ids(d2t, files.tensors.get("t2d")):
        yield "error", "d2t holds target ids: servers add the draft id to it; store d2t - arange(len(d2t))"
    elif not bool((ids.diff() > 0).all()):
        yield "error", f"d2t + arange does not ascend: draft ids are out of order or double; {EXPORT_AGAIN}"
    elif not 0 <= int(ids[0]) <= int(ids[-1]) < vocab_size:
        yield (
            "error",
            f"d2t + arange goes from {int(ids[0])} to {int(ids[-1])}, outside 0 to {vocab_size - 1}; {EXPORT_AGAIN}",
        )


def holds_absolute_ids(d2t: Int[Tensor, " D"], t2d: Tensor | None) -> bool:
    """Offsets stay equal wherever two neighbours of the target vocabulary both are draft tokens; ids never do."""
    ids = from_offsets(d2t)
    confirmed = t2d is not None and 0 <= int(ids.min()) <= int(ids.max()) < len(t2d) and bool(t2d[ids].all())
    return len(d2t) > 1 and bool((d2t.diff() > 0).all()) and not confirmed


def check_t2d(files: HeadFiles, facts: TargetFacts) -> Iterator[Problem]:
    """t2d, which some servers read, marks the tokens of d2t."""
    d2t, t2d = files.tensors.get("d2t"), files.tensors.get("t2d")
    if t2d is None or d2t is None:
        yield "skipped", "SGLang does not read t2d, and the file lacks it or d2t"
        return
    ids = from_offsets(d2t.long())
    if not 0 <= int(ids.min()) <= int(ids.max()) < len(t2d):
        yield "skipped", "d2t leads outside t2d"
    elif t2d.dtype != torch.bool or not torch.equal(t2d, membership(ids, facts.config["vocab_size"])):
        yield (
            "error",
            f"t2d ({t2d.dtype}, {int(t2d.sum())} marked) does not mark the {len(ids)} tokens of d2t; {EXPORT_AGAIN}",
        )


# --- where it comes from ---------------------------------------------------------------------------------------------


def check_target(files: HeadFiles, facts: TargetFacts) -> Iterator[Problem]:
    """The target is the one that the head was trained on."""
    if files.training is None:
        yield "skipped", "no training.json says which target the head was trained on"
        return
    if facts.fingerprint is None:
        yield "skipped", "the target was not at hand"
        return
    trained = files.training["target"]
    differing = [part for part in COMPARED if trained.get(part) != facts.fingerprint.get(part)]
    for part in differing:
        what = part.removesuffix("_hash")
        if part == "template_hash":
            yield (
                "warning",
                "the chat template is not that of the training; set chat.template to the one that is served",
            )
        else:
            yield (
                "error",
                f"{what}: the head was trained on {trained['name']}, not on {facts.fingerprint['name']}; use that",
            )


CHECKS: tuple[Check, ...] = (
    check_model,
    check_draft_vocab_size,
    check_layer_ids,
    check_rope,
    check_context,
    check_dtype,
    check_tensors,
    check_attention,
    check_d2t,
    check_t2d,
    check_target,
)
