"""Embeddings: rounded copies of the target's are no fault, trained ones are. Draft vocabularies of any sound shape."""

from pathlib import Path

import pytest
import torch
from exported_head import FINGERPRINT, export_head, random_head
from stores import TARGET_CONFIG
from torch import Tensor

from eagle3.head_files.check_tensors import CHUNK, check_embedding
from eagle3.head_files.files import HeadFiles, read_files
from eagle3.head_files.finding import TargetFacts
from eagle3.serving.check.checks import run_checks

VOCAB, HIDDEN = CHUNK + 3, 8  # more than one chunk


def found(stored: Tensor, target: Tensor) -> list[str]:
    files = HeadFiles(Path("head"), {}, {}, {"embed_tokens.weight": stored}, None)
    facts = TargetFacts(config=TARGET_CONFIG, dtype="bfloat16", identity=None, embedding=target)
    return [message for _, message in check_embedding(files, facts)]


@pytest.fixture
def embedding() -> Tensor:
    rows = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(0))
    return rows * torch.logspace(-3, 3, VOCAB)[:, None]  # what counts is a difference relative to the row's length


def test_rounding_is_no_difference(embedding):
    assert found(embedding.bfloat16(), embedding) == []


@pytest.mark.parametrize(("share", "differing"), [(0.008, 0), (0.0125, VOCAB)])
def test_a_row_differs_if_it_is_off_by_more_than_a_hundredth_of_its_length(share, differing, embedding):
    moved = embedding + share * embedding.norm(dim=-1, keepdim=True) * torch.eye(HIDDEN)[0]
    messages = found(moved, embedding)
    assert bool(messages) == bool(differing)
    assert all(f"differs from the target's in {differing} of {VOCAB} rows" in message for message in messages)


@pytest.mark.parametrize(
    "draft_ids",
    [torch.arange(4096), torch.tensor([0, 1, 7, 4095]), torch.tensor([4095])],
    ids=["all of it", "first and last token", "one, the last"],
)
def test_a_sound_draft_vocabulary_passes_every_check(draft_ids, facts, tmp_path):
    export_head(random_head(facts, FINGERPRINT, draft_ids), tmp_path / "head", versions={})
    assert [item for item in run_checks(read_files(tmp_path / "head"), facts) if item.level != "ok"] == []
