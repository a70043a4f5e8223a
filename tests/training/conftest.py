"""Trainings on one small store."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from stores import random_samples, write_store
from training_runs import Run, Start


@pytest.fixture(scope="module")
def training_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of all tests here: none writes to it. An epoch has 6 packs."""
    return write_store(tmp_path_factory.mktemp("store") / "features", random_samples(26))


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory, training_store: Path) -> Start:
    """Train with these settings from begin to end, once for all tests here."""

    @cache
    def whole(*overrides: str) -> Run:
        return Run(tmp_path_factory.mktemp("whole"), training_store, *overrides).fit()

    return whole


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, facts: Any) -> Path:
    """Of a random head. No test writes to it."""
    from exported_head import FINGERPRINT, random_head, save_checkpoint  # with transformers, which takes seconds

    return save_checkpoint(tmp_path_factory.mktemp("run") / "last.ckpt", random_head(facts, FINGERPRINT))


@pytest.fixture
def train(tmp_path: Path, training_store: Path) -> Start:
    def start(name: str, *overrides: str, signal_after: int | None = None) -> Run:
        return Run(tmp_path / name, training_store, *overrides, signal_after=signal_after)

    return start
