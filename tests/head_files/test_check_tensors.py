"""Embeddings: rounded copies of the target's are no fault, trained ones are. Draft vocabularies of any sound shape."""

from pathlib import Path

import pytest
import torch
from exported_head import FINGERPRINT, random_head
from stores import TARGET_CONFIG
from torch import Tensor

from eagle3.head.draft_vocab import membership
from eagle3.head_files.check_tensors import CHUNK, check_embedding, holds_absolute_ids
from eagle3.head_files.files import HeadFiles, read_files
from eagle3.head_files.finding import TargetFacts
from eagle3.serving.check.checks import run_checks
from eagle3.serving.head.export import export_head

VOCAB, HIDDEN = CHUNK + 3, 8  # more than one chunk


def found(stored: Tensor, target: Tensor) -> list[str]:
    files = HeadFiles(Path("head"), {}, {}, {"embed_tokens.weight": stored}, None)
    facts = TargetFacts(config=TARGET_CONFIG, dtype="bfloat16", identity=None, embedding=target)
    return [message for _, message in check_embedding(files, facts)]


@pytest.fixture
def embedding() -> Tensor:
    rows = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(0))
    return rows * torch.logspace(-3, 3, VOCAB)[:, None]  # what counts is a difference relative to the row's length


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_is_no_difference(dtype: torch.dtype, embedding: Tensor) -> None:
    embedding = embedding.clamp(-6e4, 6e4)
    embedding[embedding.abs() < 1e-2] = 0  # below that float16 rounds more
    assert found(embedding.to(dtype), embedding) == []


@pytest.mark.parametrize(("share", "differing"), [(0.008, 0), (0.0125, VOCAB)])
def test_a_row_differs_if_it_is_off_by_more_than_a_hundredth_of_its_length(
    share: float, differing: int, embedding: Tensor
) -> None:
    moved = embedding + share * embedding.norm(dim=-1, keepdim=True) * torch.eye(HIDDEN)[0]
    messages = found(moved, embedding)
    assert bool(messages) == bool(differing)
    assert all(f"differs from the target's in {differing} of {VOCAB} rows" in message for message in messages)


@pytest.mark.parametrize("row", [0, CHUNK - 1, CHUNK, VOCAB - 1])
def test_every_row_is_looked_at(row: int, embedding: Tensor) -> None:
    stored = embedding.clone()
    stored[row] = -stored[row]
    assert f"in 1 of {VOCAB} rows" in found(stored, embedding)[0]


GROWING_GAPS = torch.tensor([0, 2, 5, 9, 14])  # whose offsets 0, 1, 3, 6, 10 ascend as ids do


@pytest.mark.parametrize(
    "draft_ids",
    [torch.arange(4096), torch.tensor([0, 1, 7, 4095]), torch.tensor([4095]), torch.tensor([0]), GROWING_GAPS],
    ids=["all of it", "first and last token", "one, the last", "one, the first", "no two neighbours"],
)
def test_a_sound_draft_vocabulary_passes_every_check(draft_ids: Tensor, facts: TargetFacts, tmp_path: Path) -> None:
    export_head(random_head(facts, FINGERPRINT, draft_ids), tmp_path / "head", versions={})
    assert [item for item in run_checks(read_files(tmp_path / "head"), facts) if item.level != "ok"] == []


def test_ascending_offsets_are_told_from_ids_by_what_t2d_marks() -> None:
    offsets = GROWING_GAPS - torch.arange(5)
    marks = membership(GROWING_GAPS, 15)
    assert not holds_absolute_ids(offsets, marks)
    assert holds_absolute_ids(GROWING_GAPS, marks)
    assert holds_absolute_ids(offsets, None)  # without t2d nothing tells
    assert holds_absolute_ids(offsets, marks[:14]) and holds_absolute_ids(offsets, marks[None])
    assert not holds_absolute_ids(torch.tensor([3, 3, 8]), None)
    assert not holds_absolute_ids(torch.tensor([3]), None)
