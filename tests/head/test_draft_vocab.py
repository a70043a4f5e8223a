"""The draft vocabulary and its two maps."""

import pytest
import torch

from eagle3.errors import InputError
from eagle3.head.draft_vocab import from_offsets, membership, most_frequent, to_offsets

COUNTS = torch.tensor([0, 5, 0, 9, 5, 1, 0, 2])


def test_the_most_frequent_tokens_are_kept_sorted_by_id_and_ties_go_to_the_lower_id() -> None:
    assert most_frequent(COUNTS, 2, default=99).tolist() == [1, 3]
    assert most_frequent(COUNTS, 4, default=99).tolist() == [1, 3, 4, 7]


def test_null_takes_all_seen_tokens_and_others_up_to_a_multiple_at_most_the_default() -> None:
    assert most_frequent(COUNTS, None, default=99).tolist() == list(range(8))
    assert most_frequent(COUNTS, None, default=1).tolist() == [3]
    seen = torch.zeros(1000, dtype=torch.long).index_fill_(0, torch.arange(100, 170), 1)
    assert most_frequent(seen, None, default=999).tolist() == [*range(58), *range(100, 170)]
    assert len(most_frequent(seen, None, default=90)) == 90


def test_the_whole_vocabulary_can_be_kept_seen_or_not() -> None:
    assert most_frequent(COUNTS, 8, default=1).tolist() == list(range(8))


@pytest.mark.parametrize("size", [0, 6, 9])
def test_more_tokens_than_were_seen_is_refused_with_the_numbers(size: int) -> None:
    with pytest.raises(InputError, match=rf"model\.draft_vocab_size={size} but the answers hold 5 distinct tokens"):
        most_frequent(COUNTS, size, default=99)


def test_offsets_lead_back_to_the_ids_and_membership_marks_them() -> None:
    ids = most_frequent(COUNTS, 3, default=99)
    offsets = to_offsets(ids)
    assert (torch.arange(3) + offsets).tolist() == from_offsets(offsets).tolist() == ids.tolist()
    assert membership(ids, 8).nonzero().squeeze(1).tolist() == ids.tolist()
