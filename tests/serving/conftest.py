"""Heads of the bundled target, and its files."""

from pathlib import Path

import pytest
from exported_head import export_head, random_head, tiny_facts, tiny_target
from fitted_head import LAYERS, PROMPT, fitted_head
from stores import ASSETS

from eagle3.head_files.format import save_head
from eagle3.serving.head.export import TrainedHead
from eagle3.target.files import TargetFiles, read_target_files
from eagle3.target.model import Target


@pytest.fixture(scope="session")
def target_files() -> TargetFiles:
    return read_target_files(path=str(ASSETS / "tiny"))


@pytest.fixture(scope="session")
def trained_on_tiny(target: Target) -> TrainedHead:
    """A head of random weights for the bundled target; tests copy what they change."""
    return random_head(tiny_facts(target), target.identity)


@pytest.fixture(scope="session")
def head_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported") / "head"
    folder.mkdir()
    save_head(folder, fitted_head(tiny_target(), PROMPT), LAYERS, "bfloat16")
    return folder


@pytest.fixture
def exported(tmp_path: Path, trained_on_tiny: TrainedHead) -> Path:
    """A head of random weights in which no check finds anything."""
    export_head(trained_on_tiny, tmp_path / "head", versions={})
    return tmp_path / "head"
