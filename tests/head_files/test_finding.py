"""What checks know of a target is what its files say."""

import torch

from eagle3.head_files.finding import TargetFacts, target_facts
from eagle3.target.model import Target


def test_facts_of_a_target_are_those_of_its_files(target: Target, facts: TargetFacts) -> None:
    assert target.embedding.dtype == torch.float32  # loaded so; stored and served in bfloat16
    assert target_facts(target, "m").config == facts.config
    assert target_facts(target, "m").dtype == "bfloat16"
