"""The bundled target and its chat format."""

from collections.abc import Iterator

import pytest
import torch

from eagle3.answers.chat import Chat
from eagle3.target.model import Target


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # matrices this small only wait for a second one
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def chat(target: Target) -> Chat:
    settings = {"template": None, "template_kwargs": {}, "date": "2026-01-01", "reasoning_parser": "auto"}
    return Chat(target.tokenizer, stop_ids=target.stop_ids, **settings)  # type: ignore[arg-type]
