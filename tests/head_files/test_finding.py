"""What checks know of a target is what its files say."""

import pytest
import torch

from eagle3.errors import InputError
from eagle3.head_files.finding import Finding, TargetFacts, facts_of_target, require_no_errors
from eagle3.target.model import Target


def test_facts_of_a_target_are_those_of_its_files(target: Target, facts: TargetFacts) -> None:
    assert target.embedding.dtype == torch.float32  # loaded so; stored and served in bfloat16
    assert facts_of_target(target, "m").config == facts.config
    assert facts_of_target(target, "m").dtype == "bfloat16"


def test_a_check_with_several_errors_is_named_once() -> None:
    with pytest.raises(InputError, match="must not be served: tensors, d2t: see"):
        require_no_errors([Finding(name, "error", "wrong") for name in ("tensors", "tensors", "d2t")], "HEAD")
