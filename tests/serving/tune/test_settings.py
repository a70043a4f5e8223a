"""What cannot be searched is refused by its key."""

from typing import Any

import pytest
from timed_machine import settings

from eagle3.errors import InputError


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"evidence": "luck"}, r"tune\.evidence=luck is unknown; take one of: decoder, server"),
        ({"evidence": "server", "timed": 0}, r"times at least the longest chain; set tune\.timed=1"),
        ({"concurrency": 0}, r"tune\.concurrency=0 must be 1 or more"),
        ({"batch_size": 0}, r"tune\.batch_size=0 must be 1 or more"),
        ({"timed": -1}, r"tune\.timed=-1 must be 0 or more"),
        ({"requests_per_place": -1}, r"tune\.requests_per_place=-1 must be 0 or more"),
        ({"steps": 3}, r"tune\.steps=3 must be a list of numbers from 1 up, e\.g\. tune\.steps=\[4,8\]"),
        ({"steps": [0]}, r"tune\.steps=\[0\] must be a list"),
        ({"draft_tokens": ["x"]}, r"tune\.draft_tokens=\['x'\] must be a list"),
        ({"topk": []}, r"tune\.topk=\[\]: both need a number"),
        ({"assumed": {"step": -0.1}}, r"tune\.assumed\.step=-0\.1 must not be negative"),
    ],
)
def test_bad_settings_of_the_search_name_their_keys(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        settings(**changes)
