"""Stored embeddings: rounded copies of the target's are no fault, trained ones are."""

from pathlib import Path

import pytest
import torch
from stores import TARGET_CONFIG
from torch import Tensor

from eagle3.head_files.check_tensors import CHUNK, check_embedding
from eagle3.head_files.files import HeadFiles
from eagle3.head_files.finding import TargetFacts

VOCAB, HIDDEN = CHUNK + 3, 8  # more than one chunk


def found(stored: Tensor, target: Tensor) -> list[str]:
    files = HeadFiles(Path("head"), {}, {}, {"embed_tokens.weight": stored}, None)
    facts = TargetFacts(config=TARGET_CONFIG, dtype="bfloat16", identity=None, embedding=target)
    return [message for _, message in check_embedding(files, facts)]


@pytest.fixture
def target() -> Tensor:
    rows = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(0))
    return rows * torch.logspace(-3, 3, VOCAB)[:, None]  # what counts is a difference beside the row's own length


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_is_no_difference(dtype: torch.dtype, target: Tensor) -> None:
    target = target.clamp(-6e4, 6e4)
    target[target.abs() < 1e-2] = 0  # below that float16 rounds more
    assert found(target.to(dtype), target) == []


@pytest.mark.parametrize(("share", "differing"), [(0.008, 0), (0.0125, VOCAB)])
def test_a_row_differs_if_it_is_off_by_more_than_a_hundredth_of_its_length(
    share: float, differing: int, target: Tensor
) -> None:
    moved = target + share * target.norm(dim=-1, keepdim=True) * torch.eye(HIDDEN)[0]
    messages = found(moved, target)
    assert bool(messages) == bool(differing)
    assert all(f"differs from the target's in {differing} of {VOCAB} rows" in message for message in messages)


@pytest.mark.parametrize("row", [0, CHUNK - 1, CHUNK, VOCAB - 1])
def test_every_row_is_looked_at(row: int, target: Tensor) -> None:
    stored = target.clone()
    stored[row] = -stored[row]
    assert f"in 1 of {VOCAB} rows" in found(stored, target)[0]
