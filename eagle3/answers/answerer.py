"""Interface for answerers, and the task of a worker of the answers stage: prompts become rows."""

from collections.abc import Hashable, Iterator
from typing import Any, Protocol, Self

from eagle3.answers.chat import Chat
from eagle3.answers.dialogue import Dialogue
from eagle3.engine.endpoint import Answer
from eagle3.settings.precomputing import Sampling
from eagle3.workers.meter import Progress
from eagle3.workers.task import Keyed, Take


class Conversation(Protocol):
    """While `waiting`, `prompt_ids` asks for the next tokens, sampled in a way of its own or as the answerer does."""

    waiting: bool
    prompt_ids: list[int]
    sampling: Sampling | None  # None: the answerer's
    stop_ids: frozenset[int] | None  # None: those of the target

    @property
    def key(self) -> Hashable: ...

    @property
    def result(self) -> Any: ...

    @property
    def seed(self) -> int: ...

    def answer(self, answer: Answer) -> None: ...

    def fail(self, reason: str) -> None: ...


class Answerer:
    """Answers every turn of every conversation, ready inside `with`.

    An answer depends only on its prompt, its seed and the sampling. An error of one conversation goes to its `fail`,
    with a reason that holds no text of it, and affects no other; only what makes further work pointless is raised, as
    InputError.
    """

    name: str  # in the manifest of the answers: two answerers do not give the same answers

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def __call__(self, take: Take[Conversation], progress: Progress) -> Iterator[list[Conversation]]:
        """Consume the conversations, keeping the configured number in flight, and yield each as soon as it no longer
        waits: it is on disk before the next is answered. Counts it in `progress`, and tokens as they are made."""
        raise NotImplementedError


class Answering:
    """A `Task` with an answerer that has been entered. Items are prompts by their id, results their rows and errors
    (store.Answered). Other items begin conversations of their own, with results of their own."""

    def __init__(
        self, answerer: Answerer, chat: Chat, *, seed: int, max_prompt_tokens: int | None, on_length: str
    ) -> None:
        self.answerer, self.chat = answerer, chat
        self.settings: dict[str, Any] = {"seed": seed, "max_prompt_tokens": max_prompt_tokens, "on_length": on_length}

    def __call__(self, take: Take[Keyed], progress: Progress) -> Iterator[list[Keyed]]:
        def conversations(count: int, *, wait: bool = True) -> list[Conversation]:
            return [self._begin(item) for _, item in take(count, wait=wait)]

        for finished in self.answerer(conversations, progress):
            yield [(conversation.key, conversation.result) for conversation in finished]

    def _begin(self, item: Any) -> Conversation:
        if isinstance(item, dict):
            return Dialogue(item, self.chat, **self.settings)
        return item.begin(self.chat, **self.settings)
