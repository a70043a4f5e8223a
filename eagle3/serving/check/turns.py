"""Turns of a conversation that is measured: each prompt has the turns before it, as a server would read them.

Answers of the row are part of later prompts as they are; where it has none, the answer that the target gave is.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from eagle3.answers.chat import Chat, Messages, RefusedConversation
from eagle3.answers.dialogue import CALLS_TOOL, NO_CONTENT, answered_next
from eagle3.settings.serving import Turns


@dataclass(frozen=True, eq=False)
class Turn:
    """A prompt that is answered. `messages` are those in `ids`, `coming` those that the row has after them."""

    ids: list[int]
    chat: Chat
    messages: Messages
    coming: Messages
    max_length: int  # of `ids`, in tokens

    @property
    def given(self) -> Messages:
        """The row's own answer, if it has one: its text, or its calls of tools."""
        return [*takewhile(lambda message: message["role"] == "assistant", self.coming)]

    @property
    def is_last(self) -> bool:
        return len(self.given) == len(self.coming)

    @property
    def needs_answer(self) -> bool:
        """Whether the next prompt has the target's own answer to this one."""
        return not self.is_last and not self.given

    def following(self, answer_ids: Sequence[int]) -> "Turn":
        """Return the next turn after the target's answer to one that is not the last.

        Raises RefusedConversation where no prompt can be made of it."""
        given = [answer | {"content": self.chat.returned(answer["content"])} for answer in self.given]
        history = [*self.messages, *(given or [self._own(answer_ids)])]
        return _next_turn(self.chat, history, self.coming[len(self.given) :], self.max_length)

    def _own(self, answer_ids: Sequence[int]) -> dict[str, Any]:
        content = self.chat.answer_text(self.ids, [*answer_ids])
        if content is None:
            raise RefusedConversation(NO_CONTENT)
        if self.chat.names_tool(content):
            raise RefusedConversation(CALLS_TOOL)
        return {"role": "assistant", "content": content}


def first_turn(chat: Chat, prompt: dict[str, Any], turns: Turns, max_length: int) -> Turn:
    """Return the first turn of a conversation, which with `turns="first"` is the only one.

    Raises RefusedConversation where no prompt can be made of it."""
    messages = prompt["messages"]
    measured = messages[: answered_next(messages)] if turns == "first" else messages
    return _next_turn(chat.for_prompt(prompt), [], measured, max_length)


def _next_turn(chat: Chat, history: Messages, coming: Messages, max_length: int) -> Turn:
    end = answered_next(coming)
    messages = [*history, *coming[:end]]
    return Turn(require_room(chat.prompt_ids(messages), max_length), chat, messages, coming[end:], max_length)


def require_room(ids: list[int], max_length: int) -> list[int]:
    """Return the ids of a prompt; RefusedConversation if they are too many, or none."""
    if not 0 < len(ids) <= max_length:
        raise RefusedConversation(f"empty, or longer than the target's context less the answer: {max_length} tokens")
    return ids
