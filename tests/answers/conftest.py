"""Small models are run by one thread."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # matrices this small only wait for a second one
    yield
    torch.set_num_threads(threads)
