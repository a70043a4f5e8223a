"""Draft vocabularies that are sound whatever their shape, and what tells offsets from ids."""

from pathlib import Path

import pytest
import torch
from exported_head import FINGERPRINT, random_head
from torch import Tensor

from eagle3.head.draft_vocab import membership
from eagle3.head_files.check_vocabulary import holds_absolute_ids
from eagle3.head_files.files import read_files
from eagle3.head_files.finding import TargetFacts
from eagle3.serving.check.checks import run_checks
from eagle3.serving.head.export import export_head

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
