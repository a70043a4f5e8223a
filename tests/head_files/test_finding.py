"""Findings: their table, and the end of a run that has errors."""

import pytest
import torch

from eagle3.errors import InputError
from eagle3.head_files.finding import Finding, TargetFacts, facts_of_target, findings_table, require_no_errors
from eagle3.target.model import Target


def test_heads_with_errors_are_refused_with_the_checks_that_found_them() -> None:
    findings = [Finding("d2t", "error", "wrong"), Finding("rope", "ok", "fine"), Finding("dtype", "error", "other")]
    with pytest.raises(
        InputError, match=r"^head=HEAD must not be served: d2t, dtype: see the errors in the table above$"
    ):
        require_no_errors(findings, "HEAD")
    require_no_errors(findings[1:2], "HEAD")


def test_facts_of_a_target_are_those_of_its_files(target: Target, facts: TargetFacts) -> None:
    assert target.embedding.dtype == torch.float32  # loaded so; stored and served in bfloat16
    assert facts_of_target(target, "m").config == facts.config
    assert facts_of_target(target, "m").dtype == "bfloat16"


def test_the_table_has_a_line_for_each_finding() -> None:
    lines = findings_table([Finding("d2t", "ok", "fine"), Finding("layer_ids", "error", "wrong")]).splitlines()
    assert lines == ["ok       d2t        fine", "error    layer_ids  wrong"]
