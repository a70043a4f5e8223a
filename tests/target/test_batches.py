"""Batches by length."""

from eagle3.target.batches import batches_by_tokens


def test_a_batch_holds_no_more_rows_and_padded_tokens_than_allowed_and_every_row_is_in_one():
    rows = [1, 2, 2, 3, 5, 30, 31]
    found = [*batches_by_tokens(rows, int, most_tokens=24, most_rows=3)]
    assert found == [[1, 2, 2], [3, 5], [30], [31]]  # the last two are too long for any batch, and alone
    assert [*batches_by_tokens(rows[::-1], int, most_tokens=60)] == [[31], [30, 5], [3, 2, 2, 1]]
    assert [*batches_by_tokens([], int, most_tokens=60)] == []
