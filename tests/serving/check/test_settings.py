"""How answers are made: what no decoder can do is refused by its key, before anything is loaded."""

from typing import Any

import pytest

from eagle3.errors import InputError
from eagle3.serving.check.settings import Decoding

SOUND: dict[str, Any] = {
    "max_new_tokens": 2, "temperature": 0, "seed": 0, "steps": 3, "topk": 1, "draft_tokens": None,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"topk": 4}, "draft_tokens=None: such a tree"),
        ({"topk": 4, "draft_tokens": 500}, "such a tree"),
    ],
)
def test_what_no_decoder_can_do_is_refused_by_its_key(changes: dict[str, Any], message: str) -> None:
    assert Decoding(**SOUND)
    with pytest.raises(InputError, match=message):
        Decoding(**SOUND | changes)


def test_the_longest_prompt_leaves_room_for_its_answer_the_drafts_and_the_token_behind_them() -> None:
    settings = Decoding(**SOUND | {"max_new_tokens": 20})
    assert settings.longest_prompt(100, steps=7) == 100 - 20 - 7 - 1
    with pytest.raises(InputError, match=r"max_new_tokens=20 and 7 drafts leave no room .* context of 28 tokens; set"):
        settings.longest_prompt(28, steps=7)
