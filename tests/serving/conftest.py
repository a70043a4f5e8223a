"""A fitted head of the bundled target, and serve.py in a process of its own."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from exported_head import tiny_target
from fitted_head import LAYERS, PROMPT, fitted_head
from serving_fixtures import Command

from eagle3.serving.head.format import save_head


@pytest.fixture(scope="session")
def head_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported") / "head"
    folder.mkdir()
    save_head(folder, fitted_head(tiny_target(), PROMPT), LAYERS, "bfloat16")
    return folder


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Any]:
    """Starts commands, and ends them with the test."""
    commands = []

    def start(*arguments: str) -> Command:
        commands.append(Command(tmp_path, *arguments))
        return commands[-1]

    yield start
    for command in commands:
        command.process.kill()
        command.process.wait()
        command.stdout.close()
