"""The task of a worker of the responses stage: prompts become rows."""

from collections.abc import Iterator
from typing import Any

from eagle3.answers.answerer import Answerer
from eagle3.answers.chat import Chat
from eagle3.answers.dialogue import Dialogue
from eagle3.workers.meter import Progress
from eagle3.workers.task import Keyed, Take


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
