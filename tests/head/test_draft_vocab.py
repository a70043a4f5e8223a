"""The draft vocabulary and its two maps."""

import pytest
import torch

from eagle3.errors import InputError
from eagle3.head.draft_vocab import extended, from_offsets, membership, most_frequent, to_offsets

COUNTS = torch.tensor([0, 5, 0, 9, 5, 1, 0, 2])


def test_the_most_frequent_tokens_are_kept_sorted_by_id_and_ties_go_to_the_lower_id():
    assert most_frequent(COUNTS, 2).tolist() == [1, 3]
    assert most_frequent(COUNTS, 4).tolist() == [1, 3, 4, 7]
    assert most_frequent(COUNTS, 8).tolist() == list(range(8))  # all of them, seen or not


def test_the_most_frequent_tokens_join_until_there_are_as_many_as_the_limit():
    counts = torch.tensor([6, 0, 9, 0, 1, 3, 0, 8])
    for limit, expected in ((2, [2, 5, 7]), (4, [0, 2, 5, 7]), (5, [0, 2, 4, 5, 7])):
        assert extended(torch.tensor([7, 2, 5]), counts, limit).tolist() == expected


def test_others_join_up_to_a_multiple_of_64():
    seen = torch.zeros(1000, dtype=torch.long).index_fill_(0, torch.arange(100, 170), 1)
    assert extended(torch.tensor([999, 0, 150]), seen, limit=999).tolist() == [*range(57), *range(100, 170), 999]
    assert extended(torch.tensor([], dtype=torch.long), seen, limit=999).tolist() == [*range(58), *range(100, 170)]


def test_more_tokens_than_were_seen_is_refused_with_the_numbers():
    with pytest.raises(InputError, match=r"model\.draft_vocab_size=6 but the answers hold 5 distinct tokens"):
        most_frequent(COUNTS, 6)


def test_offsets_lead_back_to_the_ids_and_membership_marks_them():
    ids = most_frequent(COUNTS, 3)
    offsets = to_offsets(ids)
    assert (torch.arange(3) + offsets).tolist() == from_offsets(offsets).tolist() == ids.tolist()
    assert membership(ids, 8).nonzero().squeeze(1).tolist() == ids.tolist()
