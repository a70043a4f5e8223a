"""Which rows begin a round, walked from one to the next: the judge of what finds them all at once."""

from itertools import pairwise


def rounds_one_by_one(gained: list[int], rows: list[int]) -> list[bool]:
    begins, expected = [], None
    for (before, row), drafts in zip(pairwise([None, *rows]), gained, strict=True):
        begins.append(before is None or row != before + 1 or row == expected)
        if begins[-1]:
            expected = row + drafts + 1
    return begins
