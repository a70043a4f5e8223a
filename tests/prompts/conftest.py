"""The stage `prompts` on rows of a test."""

from pathlib import Path

import pytest
from prompt_stage import Prepare


@pytest.fixture
def prepare(tmp_path: Path) -> Prepare:
    return Prepare(tmp_path)
