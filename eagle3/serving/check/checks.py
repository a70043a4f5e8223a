"""Runs all checks of an exported head: of its files, then by decoding where the files cannot tell.

A fresh export is also compared with the trained head, and takes its place only once no check has found an error.
Shapes: D draft vocabulary, K drafts.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from eagle3.decoding.speculate import require_topk
from eagle3.engine.command import Draft
from eagle3.errors import InputError
from eagle3.head.draft_head import WithoutValues
from eagle3.head.eagle3 import EAGLE3
from eagle3.head.head import Head
from eagle3.head.registry import kind_named, new_head
from eagle3.head_files.check_config import (
    check_context,
    check_dtype,
    check_layout,
    check_model,
    check_norm_output,
    check_options,
    check_residual,
    check_rope,
    check_servers,
)
from eagle3.head_files.check_tensors import check_d2t, check_draft_vocab_size, check_embedding, check_t2d, check_tensors
from eagle3.head_files.files import HeadFiles
from eagle3.head_files.finding import Check, Finding, Problem, TargetFacts, has_errors, target_facts
from eagle3.head_files.format import draft_head, read_kind
from eagle3.head_files.record import write_record
from eagle3.provenance import provenance
from eagle3.serving.check.accept_length import CHECK, Measurer
from eagle3.serving.check.as_trained import check_as_trained
from eagle3.serving.check.origin import check_layer_ids, check_target
from eagle3.serving.head.card import write_card
from eagle3.serving.head.export import TrainedHead, write_head
from eagle3.storage.replace import replacing
from eagle3.target.files import DTYPES

log = logging.getLogger(__name__)

# Checks of config.json alone, without the weights.
CONFIG_CHECKS: tuple[Check, ...] = (
    check_layout,
    check_model,
    check_options,
    check_residual,
    check_norm_output,
    check_draft_vocab_size,
    check_layer_ids,
    check_rope,
    check_context,
    check_dtype,
    check_servers,
)
CHECKS: tuple[Check, ...] = (
    *CONFIG_CHECKS,
    check_tensors,
    check_embedding,
    check_d2t,
    check_t2d,
    check_target,
)
# The others are about what a server does with EAGLE-3's config.json; heads of another kind are decoded as it is.
OF_EVERY_KIND = (check_model, check_servers, check_tensors, check_d2t, check_t2d, check_target)
# With errors of these our decoder still computes what SGLang would, or with `residual` what vLLM would: the accept
# length tells how much they cost.
DECODED_ALL_THE_SAME = ("layout", "options", "residual", "layer_ids", "context", "dtype", "embedding", "t2d")


def run_checks(files: HeadFiles, facts: TargetFacts, checks: Sequence[Check] = CHECKS) -> list[Finding]:
    """Run checks of the files. A fault that several checks find is reported once."""
    findings: list[Finding] = []
    for check in checks:
        known = {finding.message for finding in findings}
        findings += _findings(check, files, facts, known)
    return findings


def _findings(check: Check, files: HeadFiles, facts: TargetFacts, known: set[str]) -> list[Finding]:
    name = check.__name__.removeprefix("check_")
    problems: list[Problem] = []
    try:
        kind = read_kind(files)
        if kind is not EAGLE3 and check not in OF_EVERY_KIND:
            return [Finding(name, "skipped", f"it is about heads of EAGLE-3, this one is of kind {kind.name}")]
        for problem in check(files, facts):
            problems.append(problem)
    except InputError as error:  # keep what was found before it
        repeated = str(error) in known
        problems.append(("skipped", "correct the error above first") if repeated else ("error", str(error)))
    summary = (check.__doc__ or "").splitlines()[0].rstrip(".")
    return [Finding(name, level, message) for level, message in problems or [("ok", summary)]]


def check_head(files: HeadFiles, measurer: Measurer) -> list[Finding]:
    """Run every check of a head that was exported some time ago, by this project or another."""
    findings = run_checks(files, target_facts(measurer.target, measurer.chat.settings["template_hash"]))
    if not can_decode(files, measurer, findings):
        return [*findings, Finding(CHECK, "skipped", "correct the errors above first")]
    result = measurer.measured(files, measurer.prompts(files.record))
    return [*findings, check_as_trained(files, measurer), measurer.finding(result, files.record)]


def can_decode(files: HeadFiles, measurer: Measurer, findings: list[Finding]) -> bool:
    """Say whether our decoder computes what SGLang would, with the errors that were found."""
    if has_errors([finding for finding in findings if finding.check not in DECODED_ALL_THE_SAME]):
        return False
    try:
        files.served_layers(len(measurer.target.layers))
    except InputError:
        return False
    return True


# --- a fresh export --------------------------------------------------------------------------------------------------


def write_checked(
    trained: TrainedHead,
    head: Path,
    draft: Draft,
    *,
    measurer: Callable[[], Measurer | str],
    conclude: Callable[[list[Finding]], None],
) -> None:
    """Export a head to a folder, with its model card. `measurer` may be why nothing is measured; `conclude` is told
    what the checks found, and raises InputError for an error."""
    with replacing(head) as new:  # what is there stays until this head is checked
        decodes = measurer()
        files = write_head(trained, new, versions=provenance())
        findings, files = check_export(trained, files, decodes)
        write_card(files, trained.settings, replace(draft, algorithm=read_kind(files).sglang_algorithm))
        if has_errors(findings):
            log.warning("head=%s is not written, and what was there is left alone", head)
        conclude(findings)


def check_export(trained: TrainedHead, files: HeadFiles, measurer: Measurer | str) -> tuple[list[Finding], HeadFiles]:
    """Run all checks of a fresh export; `measurer` is the reason where there is no target to measure with.

    The accept length goes into training.json and the returned record, for later checks to compare with."""
    record = files.record
    assert record is not None  # an export writes one
    if isinstance(measurer, str):
        facts = TargetFacts(config=trained.target_config, dtype=trained.dtype, identity=None, embedding=None)
    else:
        facts = target_facts(measurer.target, record.origin.target.template_hash)
    findings = [check_reload(trained, files), *run_checks(files, facts)]
    if isinstance(measurer, str):
        return [*findings, Finding(CHECK, "skipped", measurer)], files
    if has_errors(findings):
        return [*findings, Finding(CHECK, "skipped", "correct the errors above first")], files
    require_topk(measurer.decoding.topk, trained.head.config.draft_vocab_size)
    prompts = measurer.prompts(record)
    try:
        result = measurer.measured(files, prompts)
    except InputError as reason:  # of the kind of target, or its answers are one token long: no fault of the export
        return [*findings, Finding(CHECK, "skipped", str(reason))], files
    measured = replace(record, accept_length=result)
    write_record(files.path, measured)
    rounded = in_dtype(trained.head, DTYPES[trained.dtype])
    findings.append(check_as_trained(files, measurer, in_dtype(rounded, measurer.target.embedding.dtype)))
    findings.append(excused(measurer.finding(result, record), trained, measurer.min_accept_length))
    return findings, replace(files, record=measured)


def excused(finding: Finding, trained: TrainedHead, min_accept_length: float) -> Finding:
    """Make an error a warning if validation simulated too short an accept length, too: then the export is sound."""
    simulated = trained.record.simulated_accept_length.values()
    if finding.level == "error" and min(simulated, default=min_accept_length) < min_accept_length:
        return replace(finding, level="warning")
    return finding


def check_reload(trained: TrainedHead, files: HeadFiles) -> Finding:
    """Say whether the files give, on random input, bit for bit the logits of the trained head in the same dtype."""
    try:
        exported = draft_head(files, None)
    except InputError as error:  # the other checks still run
        return Finding("reload", "error", str(error))
    expected = probe_logits(in_dtype(trained.head, DTYPES[trained.dtype]))
    if torch.equal(probe_logits(exported), expected) and torch.equal(exported.draft_ids, trained.head.draft_ids):
        return Finding("reload", "ok", "The files give the same logits as the training checkpoint")
    return Finding("reload", "error", f"{files.path} gives other logits than {trained.record.checkpoint}: export again")


def in_dtype(head: Head, dtype: torch.dtype) -> Head:
    """Copy the head with weights in `dtype`; RoPE's frequencies stay in float32, as servers keep them."""
    with WithoutValues():
        copy = new_head(kind_named(head.kind), head.config, head.draft_ids)
    weights = {name: weight.to(dtype) for name, weight in head.named_parameters()}
    copy.load_state_dict(weights | {"draft_ids": head.draft_ids}, assign=True)
    return copy


@torch.no_grad()
def probe_logits(head: Head) -> Float[Tensor, "K D"]:
    """Return the logits of the drafts after fixed random rows, which depend on every tensor and option: two, or all
    that the kind drafts."""
    generator, rows = torch.Generator().manual_seed(0), 8
    kind, config = kind_named(head.kind), head.config
    embedding = torch.randn(rows, config.hidden_size, generator=generator).to(head.lm_head.weight.dtype)
    cached = kind.drafting(head, embedding, rows)
    aux_hidden_states = torch.randn(rows, config.num_captured_layers * config.hidden_size, generator=generator)
    states, path = [cached.confirm(aux_hidden_states, [*range(rows)])], cached.root()
    for _ in range(1, kind.most_steps(config) or 2):
        state, path = cached.step(states[-1], torch.tensor([0]), path)
        states.append(state)
    return head.logits(torch.cat(states))
