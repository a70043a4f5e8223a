"""The tiny target and its facts."""

import pytest
from exported_head import tiny_facts

from eagle3.head_files.finding import TargetFacts
from eagle3.target.model import Target


@pytest.fixture(scope="package")
def facts(target: Target) -> TargetFacts:
    return tiny_facts(target)
