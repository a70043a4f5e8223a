"""Interface for answerers: conversations and seeds in, token ids with their finish reasons out."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, Self, TypeVar

from eagle3.workers.meter import Progress
from eagle3.workers.task import Take


@dataclass(frozen=True)
class Answer:
    """`token_ids` holds the stop token when `finish_reason` is "stop"; otherwise the answer was cut ("length")."""

    token_ids: list[int]
    finish_reason: str


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the target answers: the keys of the same names in conf/responses."""

    temperature: float  # 0: greedy
    top_p: float
    top_k: int  # 0: all
    max_new_tokens: int


class Conversation(Protocol):
    """While `waiting`, a conversation asks for the answer to `prompt_ids` with `seed`."""

    @property
    def waiting(self) -> bool: ...

    @property
    def prompt_ids(self) -> list[int]: ...

    @property
    def seed(self) -> int: ...

    def answer(self, answer: Answer) -> None:
        """Add the answer of this turn; `prompt_ids` is then the next turn's, if there is one."""

    def fail(self, reason: str) -> None:
        """Give up: nothing of this conversation is kept, and the next run tries it again."""


AnyConversation = TypeVar("AnyConversation", bound=Conversation)


class Answerer:
    """Answers every turn of every conversation, ready inside `with`.

    An answer depends only on its prompt, its seed and the sampling. An error of one conversation goes to its `fail`,
    with a reason that holds no text of it, and affects no other; only what makes further work pointless is raised, as
    InputError.
    """

    name: str  # in the manifest of the responses: two answerers do not give the same answers

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def __call__(self, take: Take[AnyConversation], progress: Progress) -> Iterator[list[AnyConversation]]:
        """Take all conversations, as many at a time as are answered at once, and yield those that no longer wait: they
        are on disk before the next are taken. Counts each in `progress` as soon as it has ended."""
        raise NotImplementedError
