"""Random heads and samples of tiny sizes, in float64 where arithmetic is compared.

Shapes: H 16, 4 query heads and 2 key/value heads of 8 channels, V 50, D 30.
"""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ["OMP_NUM_THREADS"] = "1"  # of commands too: pytest-xdist runs a process a core, whose threads would wait

import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from stores import ASSETS, DRAFT_VOCAB, HIDDEN, VOCAB, random_sample, random_samples, write_store

from eagle3.features.sample import Sample
from eagle3.head.draft_head import DraftHead, HeadConfig
from eagle3.progress import LIBRARIES, Bar

# What a shell's background and nohup ignore, commands under test would ignore, too.
for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)
torch.set_num_threads(1)


# The files that take minutes, the longest first: one that began last would leave the other processes without work.
LONG = (
    "test_cli.py", "test_pages.py", "training/test_training.py", "workers/test_cluster.py", "training/test_sweep.py",
    "features/test_served.py", "test_kills.py", "test_notebook.py", "training/test_ddp.py", "data/test_ranks.py",
    "training/test_loggers.py", "serving/server/test_launch.py", "serving/test_serve.py", "serving/bench/test_run.py",
    "test_install.py", "serving/compare/test_measure.py", "serving/tune/test_timing.py",
    "test_numbers.py",
)  # fmt: skip


def pytest_configure() -> None:
    if gone := [name for name in LONG if not (ASSETS.parent / name).is_file()]:
        raise pytest.UsageError(f"LONG in tests/conftest.py names {', '.join(gone)}: no such file; give its new name")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {ASSETS.parent / name: place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: places.get(item.path, len(LONG)))


@pytest.fixture(autouse=True)
def bars_as_tqdm_draws_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that a test runs in this process chooses the style of bars for the whole process."""
    monkeypatch.setattr(Bar, "shown", None)
    for variable in LIBRARIES:
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture(scope="session")
def tiny_path() -> Path:
    """The bundled, trained target."""
    return ASSETS / "tiny"


@pytest.fixture
def make_head() -> Callable[..., DraftHead]:
    def make(*, seed: int = 0, **changes: object) -> DraftHead:
        settings = {
            "num_captured_layers": 3,
            "hidden_size": HIDDEN,
            "intermediate_size": 24,
            "num_heads": 4,
            "num_kv_heads": 2,
            "head_dim": 8,
            "vocab_size": VOCAB,
            "draft_vocab_size": DRAFT_VOCAB,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
            "max_position_embeddings": 128,
            "fc_norm": False,
            "norm_output": False,
        }
        torch.manual_seed(seed)
        config = HeadConfig(**settings | changes)
        draft_ids = torch.randperm(VOCAB)[: config.draft_vocab_size].sort().values
        head = DraftHead(config, draft_ids).double()
        for parameter in head.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        return head

    return make


@pytest.fixture
def make_sample() -> Callable[..., Sample]:
    return random_sample


@pytest.fixture
def ragged_samples() -> list[Sample]:
    """One turn; two turns; answers of one and two tokens; one cut off at the end; one that starts the sample."""
    patterns = [
        [0, 0, 0, 1, 1, 1, 1, 1, 0],
        [0, 0, 1, 1, 1, 0, 0, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2],
        [0, 1, 0, 0, 2, 2, 0, 3, 3, 3],
        [0, 0, 0, 0, 1, 1, 1],
        [1, 1, 1, 1, 0],
    ]
    return [random_sample(turns, seed=number, sample_id=f"s{number}") for number, turns in enumerate(patterns)]


@pytest.fixture
def embedding() -> torch.Tensor:
    return torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(7), dtype=torch.double)


@pytest.fixture
def teacher_head() -> torch.Tensor:
    return torch.randn(DRAFT_VOCAB, HIDDEN, generator=torch.Generator().manual_seed(8), dtype=torch.double)


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
