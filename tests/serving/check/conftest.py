"""A measurer of heads for the tiny target."""

from collections.abc import Callable
from typing import Any

import pytest

from eagle3.answers.chat import Chat
from eagle3.serving.check.accept_length import Measurer
from eagle3.settings.serving import Decoding
from eagle3.target.model import Target


@pytest.fixture(scope="package")
def make_measurer(target: Target, chat: Chat) -> Callable[..., Measurer]:
    def make(*, max_new_tokens: int = 6, **changes: Any) -> Measurer:
        settings = {"asked": None, "turns": "all", "limit": 2, "questions": ["What is a list?", "What is a tuple?"]}
        limits = {"min_accept_length": 1.0, "max_difference": 0.05}
        shape: dict[str, Any] = {"steps": 2, "topk": 1, "draft_tokens": None, "draft_window": None}
        decoding = Decoding(**shape, max_new_tokens=max_new_tokens, temperature=0.0, seed=0)
        return Measurer(target=target, chat=chat, decoding=decoding, **settings | limits | changes)

    return make
