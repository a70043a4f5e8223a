"""Runs all checks of an exported head: of its files, then by decoding where the files cannot tell."""

from collections.abc import Sequence

from eagle3.errors import InputError
from eagle3.head_files.check_config import (
    check_context,
    check_dtype,
    check_layout,
    check_model,
    check_options,
    check_rope,
    check_servers,
)
from eagle3.head_files.check_tensors import check_d2t, check_draft_vocab_size, check_embedding, check_t2d, check_tensors
from eagle3.head_files.files import HeadFiles
from eagle3.head_files.finding import Check, Finding, Problem, TargetFacts, facts_of_target, has_errors
from eagle3.serving.check.accept_length import CHECK, Measurer
from eagle3.serving.check.layer_notation import check_notation
from eagle3.serving.check.origin import check_layer_ids, check_target

# Checks of config.json alone, without the weights.
CONFIG_CHECKS: tuple[Check, ...] = (
    check_layout,
    check_model,
    check_options,
    check_draft_vocab_size,
    check_layer_ids,
    check_rope,
    check_context,
    check_dtype,
)
CHECKS: tuple[Check, ...] = (
    *CONFIG_CHECKS,
    check_tensors,
    check_embedding,
    check_d2t,
    check_t2d,
    check_target,
    check_servers,
)
# For a head in the speculators' layout, which SGLang does not read: the other checks concern SGLang alone.
VLLM_CHECKS = tuple(check for check in CHECKS if check not in (check_layout, check_options))
# With errors of these our decoder still computes what SGLang would: the accept length tells how much they cost.
DECODED_ALL_THE_SAME = ("layout", "options", "layer_ids", "context", "dtype", "embedding", "t2d")


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
        for problem in check(files, facts):
            problems.append(problem)
    except InputError as error:  # keep what was found before it
        repeated = str(error) in known
        problems.append(("skipped", "correct the error above first") if repeated else ("error", str(error)))
    summary = (check.__doc__ or "").splitlines()[0].rstrip(".")
    return [Finding(name, level, message) for level, message in problems or [("ok", summary)]]


def check_head(files: HeadFiles, measurer: Measurer) -> list[Finding]:
    """Run every check of a head that was exported some time ago, by this project or another."""
    findings = run_checks(files, facts_of_target(measurer.target, measurer.chat.settings["template_hash"]))
    if not can_decode(files, measurer, findings):
        return [*findings, Finding(CHECK, "skipped", "correct the errors above first")]
    prompts = measurer.prompts(files.record)
    result = measurer.decoded(files.path, prompts)
    findings.append(measurer.finding(measurer.summary(result, prompts), files.record))
    if files.record is None:
        findings.append(check_notation(files, measurer, prompts, [answer.token_ids for answer in result.decoded]))
    return findings


def can_decode(files: HeadFiles, measurer: Measurer, findings: list[Finding]) -> bool:
    """Say whether our decoder computes what SGLang would, with the errors that were found."""
    if has_errors([finding for finding in findings if finding.check not in DECODED_ALL_THE_SAME]):
        return False
    try:
        files.served_layers(len(measurer.target.layers))
    except InputError:
        return False
    return True
