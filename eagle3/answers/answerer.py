"""Interface for answerers, and the task of a worker of the answers stage: prompts become rows."""

from collections.abc import Iterator
from typing import Any, Self

from eagle3.answers.chat import Chat
from eagle3.answers.dialogue import Dialogue
from eagle3.workers.meter import Progress
from eagle3.workers.task import Keyed, Take


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

    def __call__(self, take: Take[Dialogue], progress: Progress) -> Iterator[list[Dialogue]]:
        """Take all conversations, as many at a time as are answered at once, and yield those that no longer wait: they
        are on disk before the next are taken. Counts each in `progress` as soon as it has ended."""
        raise NotImplementedError


class Answering:
    """A `Task` with an answerer that has been entered. Items are prompts by their id, results their rows and errors
    (store.Answered)."""

    def __init__(
        self, answerer: Answerer, chat: Chat, *, seed: int, max_prompt_tokens: int | None, on_length: str
    ) -> None:
        self.answerer, self.chat = answerer, chat
        self.settings: dict[str, Any] = {"seed": seed, "max_prompt_tokens": max_prompt_tokens, "on_length": on_length}

    def __call__(self, take: Take[Keyed], progress: Progress) -> Iterator[list[Keyed]]:
        def dialogues(count: int, *, wait: bool = True) -> list[Dialogue]:
            return [Dialogue(prompt, self.chat, **self.settings) for _, prompt in take(count, wait=wait)]

        for finished in self.answerer(dialogues, progress):
            yield [(dialogue.prompt["id"], (dialogue.rows, dialogue.errors)) for dialogue in finished]
