"""The tiny target, and a measurer of heads for it."""

from collections.abc import Callable

import pytest
from exported_head import random_head, tiny_facts, tiny_target

from eagle3.answers.chat import Chat
from eagle3.head_files.finding import TargetFacts
from eagle3.serving.check.accept_length import Measurer
from eagle3.serving.head.export import TrainedHead
from eagle3.settings.serving import Decoding
from eagle3.target.model import Target


@pytest.fixture(scope="package")
def target() -> Target:
    return tiny_target()


@pytest.fixture(scope="package")
def facts(target: Target) -> TargetFacts:
    return tiny_facts(target)


@pytest.fixture(scope="package")
def make_measurer(target: Target) -> Callable[..., Measurer]:
    def make(*, max_new_tokens: int = 6, **changes: object) -> Measurer:
        settings = {
            "source": None,
            "limit": 2,
            "questions": ["What is a list?", "What is a tuple?"],
            "min_accept_length": 1.0,
            "max_difference": 0.05,
        }
        chat = Chat(
            target.tokenizer,
            template=None,
            template_kwargs={},
            date="2026-01-01",
            reasoning_parser="auto",
            stop_ids=target.stop_ids,
        )
        decoding = Decoding(steps=2, topk=1, draft_tokens=None, max_new_tokens=max_new_tokens, temperature=0.0, seed=0)
        return Measurer(target=target, chat=chat, decoding=decoding, **settings | changes)

    return make


@pytest.fixture
def trained_on_tiny(target: Target) -> TrainedHead:
    return random_head(tiny_facts(target), target.identity)
