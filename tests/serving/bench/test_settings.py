"""What a bench run cannot measure is refused by its key."""

from typing import Any

import pytest
from serving_fixtures import bench_settings

from eagle3.errors import InputError


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"concurrency": []}, r"bench\.concurrency=\[\]"),
        ({"concurrency": [0]}, r"bench\.concurrency=\[0\]"),
        ({"repeats": 0}, r"bench\.repeats=0"),
        ({"warmup": -1}, r"bench\.warmup=-1 must be 0 or more"),
        ({"sampling": {"ignore_eos": True}}, "ignore_eos"),
    ],
)
def test_a_plan_that_measures_nothing_or_nonsense_is_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        bench_settings(**wrong)
