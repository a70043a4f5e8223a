"""What all tests share: the environment of commands, the order of the files, the bundled target, small stores."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ["OMP_NUM_THREADS"] = "1"  # of commands too: pytest-xdist runs a process a core, whose threads would wait

import gc
import shutil
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra.core.hydra_config import HydraConfig
from jaxtyping import config as shapes
from parsed_configs import parse_configs_once
from stores import ASSETS, random_samples, write_store

from eagle3.progress import LIBRARIES, Bar

torch.set_num_threads(1)
gc.disable()  # until the tests are collected: their imports leave no garbage that is worth a search


# The files that take minutes, the longest first: one that began last would leave the other processes without work.
LONG = (
    "test_pages.py", "workers/test_cluster.py", "test_cli.py", "features/test_live.py", "training/test_sweep.py",
    "training/test_ddp.py", "test_kills.py", "test_notebook.py", "target_prompts/test_stage.py",
    "training/test_training.py", "answers/test_served.py", "features/test_served.py",
    "prompts/overlap/test_duplicates.py", "head/test_own_kind.py", "benchmarks/test_public_target.py",
    "prompts/test_scan.py", "test_commands.py", "data/test_ranks.py", "test_settings.py",
    "prompts/privacy/test_recognisers.py", "training/test_loggers.py", "test_install.py", "test_numbers.py",
)  # fmt: skip
# Whole commands, trainings and many answers: they repeat what the packages' own tests call with shapes checked.
WHOLE_RUNS = (
    "training", "storage", "benchmarks", "serving/compare", "serving/bench", "serving/server", "serving/tune",
    "test_cli.py", "test_estimate.py", "decoding/test_replay.py",
    "decoding/test_speculate.py", "head/test_registry.py",
)  # fmt: skip


def pytest_configure() -> None:
    if gone := [name for name in (*LONG, *WHOLE_RUNS) if not (ASSETS.parent / name).exists()]:
        raise pytest.UsageError(f"tests/conftest.py names {', '.join(gone)}: no such file; give its new name")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {ASSETS.parent / name: place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: places.get(item.path, len(LONG)))


def pytest_collection_finish() -> None:
    parse_configs_once()
    gc.freeze()  # what they have imported stays: each full collection would read all of it
    gc.enable()


def pytest_runtest_setup(item: pytest.Item) -> None:
    # A shell's background and nohup ignore these, and Lightning ignores Ctrl-C after an interrupted training.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    HydraConfig.instance().cfg = None  # of a command that a test before this one has called
    if chat := sys.modules.get("eagle3.answers.chat"):
        chat._log_once.cache_clear()
    whole = any(ASSETS.parent / name in (item.path, item.path.parent) for name in WHOLE_RUNS)
    shapes.update("jaxtyping_disable", whole and not item.get_closest_marker("shapes"))


@pytest.fixture(autouse=True)
def bars_as_tqdm_draws_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that a test runs in this process chooses the style of bars for the whole process."""
    monkeypatch.setattr(Bar, "shown", None)
    for variable in LIBRARIES:
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def error_line(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Call what must end with exit status 1 and, as its last words, one line `error: …`; returns the line."""

    def call(command: Callable[..., Any], *arguments: Any, **settings: Any) -> str:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            command(*arguments, **settings)
        lines = capsys.readouterr().err.splitlines()
        assert ended.value.code == 1 and lines[-1].startswith("error: "), lines
        assert not any("Traceback" in line for line in lines), lines
        return lines[-1]

    return call


@pytest.fixture(scope="session")
def tiny_path() -> Path:
    """The bundled, trained target."""
    return ASSETS / "tiny"


@pytest.fixture(scope="session")
def target() -> Any:
    """The same, loaded."""
    from exported_head import tiny_target  # with transformers, which takes seconds

    return tiny_target()


@pytest.fixture(scope="session")
def chat() -> Any:
    """Its chat format."""
    from exported_head import tiny_chat

    return tiny_chat()


@pytest.fixture(scope="session")
def facts(target: Any) -> Any:
    """What checks of a head must know of it."""
    from exported_head import tiny_facts

    return tiny_facts(target)


@pytest.fixture(scope="session")
def stored(tiny_path: Path) -> Any:
    """The target without its model."""
    from eagle3.target.stored import stored_target

    return stored_target(path=str(tiny_path), revision=None, trust_remote_code=False)


@pytest.fixture
def without_weights(tiny_path: Path, tmp_path: Path) -> Path:
    """A copy of its other files."""
    return Path(shutil.copytree(tiny_path, tmp_path / "target", ignore=shutil.ignore_patterns("*.safetensors")))


@pytest.fixture
def store_path(tmp_path: Path) -> Path:
    return write_store(tmp_path / "features", random_samples(60))


@pytest.fixture
def two_stores(tmp_path: Path) -> list[str]:
    """30 prompts answered twice, one store each: the same ids, other tokens."""
    first = random_samples(30)
    second = [
        replace(sample, input_ids=sample.input_ids.flip(0), aux_hidden_states=-sample.aux_hidden_states)
        for sample in first
    ]
    return [str(write_store(tmp_path / name, samples)) for name, samples in (("a", first), ("b", second))]
