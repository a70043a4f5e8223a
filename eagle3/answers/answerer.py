"""The door for who answers: conversations and seeds in, token ids with their finish reasons out."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol, Self, TypeVar

from eagle3.workers.meter import Progress


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
    """One conversation on its way: while `waiting`, it asks for the answer to `prompt_ids` with `seed`."""

    @property
    def waiting(self) -> bool: ...

    @property
    def prompt_ids(self) -> list[int]: ...

    @property
    def seed(self) -> int: ...

    def answer(self, answer: Answer) -> None:
        """Take the answer of this turn; the next turn, if there is one, is asked from here on."""

    def fail(self, reason: str) -> None:
        """Give up: nothing of this conversation is kept, the next run tries it again."""


AnyConversation = TypeVar("AnyConversation", bound=Conversation)


class Answerer(Protocol):
    """Answers every turn of every conversation, ready inside `with`.

    An answer depends on its prompt, its seed and the sampling, on nothing else that is asked at the same time. What
    fails for one conversation ends in its `fail`, with a reason that holds no text of it, and costs no other one; only
    what makes going on senseless is raised, as InputError.
    """

    name: str  # in the manifest of the responses: another answerer's answers are other answers

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> None: ...

    def __call__(self, conversations: Iterable[AnyConversation], progress: Progress) -> Iterator[list[AnyConversation]]:
        """Yield conversations that wait no more, some at a time: they are on disk before the next are asked for. Takes
        as many from the iterable as there is room for; called again, for more. `progress` is told of each, as soon as
        it has ended."""
