"""A fitted head of the bundled target, and serve.py in a process of its own."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from exported_head import tiny_target
from fitted_head import LAYERS, PROMPT, fitted_head
from serving_fixtures import Command

from eagle3.head.draft_head import DraftHead, HeadConfig
from eagle3.head_files.format import save_head
from eagle3.target.facts import target_config
from eagle3.target.files import read_target_files


@pytest.fixture(scope="session")
def head_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported") / "head"
    folder.mkdir()
    save_head(folder, fitted_head(tiny_target(), PROMPT), LAYERS, "bfloat16")
    return folder


@pytest.fixture
def exported(tmp_path: Path, tiny_path: Path) -> Path:
    """A head of random weights in which no check finds anything."""
    target = read_target_files(path=str(tiny_path), revision=None, trust_remote_code=False)
    facts = target_config(target.text_config, target.text_config.vocab_size, target.checkpoint_dtype)
    config = HeadConfig.for_target(facts, num_captured_layers=3, draft_vocab_size=32, fc_norm=False, norm_output=False)
    folder = tmp_path / "head"
    folder.mkdir()
    save_head(folder, DraftHead(config, torch.arange(32)), [2, 4, 5], "bfloat16")
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
