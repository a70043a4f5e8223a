"""What a head would accept on its own states and on the target's, along answers that are known."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from bounds import in_a_row, measured
from stores import open_store, random_samples, write_store

from eagle3.features.turns import anchors_of
from eagle3.head.draft_head import DraftHead


def test_anchors_count_in_a_row_up_to_the_end_of_their_turn() -> None:
    right = torch.tensor([1, 1, 0, 1, 1, 1, 1]).bool()
    anchors = torch.tensor([4, 5, 6, 7, 9, 10, 11])
    assert in_a_row(right, anchors).tolist() == [2, 1, 0, 1, 3, 2, 1]
    assert in_a_row(right[:0], anchors[:0]).tolist() == []


def test_a_head_that_always_drafts_one_token_accepts_its_rows(
    make_head: Callable[..., DraftHead], tmp_path: Path
) -> None:
    """Its own states tell it nothing, so that the target's make no difference; rounds are followed one by one."""
    head = make_head()
    head.lm_head.weight.data.zero_()
    drafted = int(head.draft_ids[0])  # of equal logits the first is the largest
    generator = torch.Generator().manual_seed(0)
    samples = []
    for sample in random_samples(20):
        argmax = torch.where(torch.rand(len(sample.teacher_argmax), generator=generator) < 0.7, drafted, drafted + 1)
        samples.append(replace(sample, teacher_argmax=argmax))
    source = open_store(write_store(tmp_path / "store", samples))
    found = measured(head, source)
    for steps in (3, 7):
        accepted = []
        for sample in samples:
            places = sample.has_teacher.cumsum(0) - 1
            for turn in sample.turns.unique():
                anchors = [int(each) for each in anchors_of(sample.turns) if sample.turns[each + 1] == turn]
                place = 0
                while place < len(anchors):
                    right = [int(sample.teacher_argmax[places[each + 1]]) == drafted for each in anchors[place:]]
                    gained = min(([*right, False]).index(False), steps)
                    accepted.append(gained)
                    place += gained + 1
        assert found["drafts"][steps] == pytest.approx(1 + sum(accepted) / len(accepted))
        assert found["oracle"][steps] == pytest.approx(found["drafts"][steps])
    outside = torch.cat([~torch.isin(sample.teacher_argmax, head.draft_ids) for sample in samples])
    assert found["outside"] == pytest.approx(float(outside.double().mean()))
