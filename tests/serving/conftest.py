"""A fitted head of the bundled target, and serve.py in a process of its own."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from exported_head import export_head, random_head, tiny_facts, tiny_target
from fitted_head import LAYERS, PROMPT, fitted_head
from serving_fixtures import Command
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


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Any]:
    """Starts commands, and ends them with the test."""
    commands = []

    def start(*arguments: str, fault: str = "") -> Command:
        commands.append(Command(tmp_path, *arguments, fault=fault))
        return commands[-1]

    yield start
    for command in commands:
        command.process.kill()
        command.process.wait()
        command.stdout.close()
