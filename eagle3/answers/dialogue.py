"""One conversation becomes training rows: answered by the target, turn by turn."""

import hashlib
from typing import Any

from eagle3.answers.calls import called
from eagle3.answers.chat import Chat, Messages, RefusedConversation
from eagle3.answers.rows import AnsweredRow, AnswerError, error_row, new_row, too_long
from eagle3.engine.endpoint import Answer
from eagle3.prompts.reading.prompt import CALLS
from eagle3.settings.precomputing import Sampling

UNFINISHED = "the answer did not end within sampling.max_new_tokens and sampling.on_length=drop"
CALLS_TOOL = "the answer before names a tool of the conversation: what the tool would have said is not known"
OTHER_CALL = "the answer before is another call of a tool than the stored one, whose result is not its own"
NO_CALL = "the answer before calls no tool where the stored conversation does"
NO_CONTENT = "the answer before has no content that a server would put into the next prompt (see chat.reasoning_parser)"


def turn_seed(base: int, id: str, turn: int) -> int:
    digest = hashlib.sha256(f"{base}\0{id}\0{turn}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


class Dialogue:
    """Collects the rows and the errors of one prompt. While `waiting`, `prompt_ids` asks for the answer to `turn`.

    A row spans several turns as long as the next prompt begins with exactly the ids of the row. Many templates strip
    reasoning or white space from earlier answers: then the next turn begins a new row.

    Stored results of tools are given turns, as those of the user are. They follow an answer that makes the calls which
    are stored with them; the target never sees these."""

    sampling: Sampling | None = None  # None: the answerer's own
    stop_ids: frozenset[int] | None = None  # None: those of the target

    def __init__(self, prompt: dict[str, Any], chat: Chat, *, seed: int, max_prompt_tokens: int | None, on_length: str):
        self.prompt = prompt
        self.rows: list[AnsweredRow] = []
        self.errors: list[AnswerError] = []
        self.turn = 0
        self.waiting = True
        self.prompt_ids: list[int] = []
        self._chat = chat.for_prompt(prompt)
        self._seed = seed
        self._max_prompt_tokens = max_prompt_tokens
        self._on_length = on_length
        self._messages: Messages = []
        self._coming = [each for each in prompt["messages"] if each["role"] != "assistant" or CALLS in each]
        self._next_prompt()

    @property
    def key(self) -> str:
        return self.prompt["id"]

    @property
    def result(self) -> tuple[list[AnsweredRow], list[AnswerError]]:
        return self.rows, self.errors

    @property
    def seed(self) -> int:
        """The seed of this turn's answer: the same in whatever order and company the turns are answered."""
        return turn_seed(self._seed, self.prompt["id"], self.turn)

    def answer(self, answer: Answer) -> None:
        """Add the answer of this turn; `prompt_ids` is then the next turn's, if there is one."""
        cut = answer.finish_reason == "length"
        if cut and self._on_length == "drop":
            return self._stop(UNFINISHED)
        content = self._chat.answer_text(self.prompt_ids, answer.token_ids)
        self._messages.append({"role": "assistant", "content": content})
        self._add_turn(answer)
        self.turn += 1
        if cut:
            self.waiting = False
        else:
            self._next_prompt(after=answer.token_ids)

    def fail(self, reason: str) -> None:
        """Give up: nothing of this prompt is kept, and the next run tries it again."""
        self.rows = []
        self._stop(reason, retry=True)

    def _next_prompt(self, after: list[int] | None = None) -> None:
        if not any(message["role"] in ("user", "tool") for message in self._coming):
            if self.turn == 0:
                return self._stop("the conversation has no user turn")
            self.waiting = False
            return
        try:
            if after is not None and (reason := self._end_after(after)):
                return self._stop(reason)
            end = answered_next(self._coming)
            self._messages += self._coming[:end]
            self._coming = self._coming[end:]
            self.prompt_ids = self._chat.prompt_ids(self._messages)
        except RefusedConversation as refusal:
            return self._stop(str(refusal))
        reason = too_long(self.prompt_ids, self._max_prompt_tokens)
        if reason:
            self._stop(reason, prompt_tokens=len(self.prompt_ids))

    def _end_after(self, answer_ids: list[int]) -> str | None:
        """Return why no given turn can follow the answer; if it makes the stored calls, let its message have them."""
        content = self._messages[-1]["content"]
        is_plain = content is not None and not self._chat.names_tool(content)
        stored = self._coming.pop(0)[CALLS] if CALLS in self._coming[0] else None
        if stored is not None or self._coming[0]["role"] == "tool":
            message = stored and called(self._chat, self._messages[:-1], answer_ids, stored)
            if not message or CALLS in self._coming[0]:
                return NO_CALL if is_plain else OTHER_CALL
            self._messages[-1] = message
            return None
        if content is None:
            return NO_CONTENT
        return None if is_plain else CALLS_TOOL

    def _add_turn(self, answer: Answer) -> None:
        if not self.rows or self.prompt_ids[: len(self.rows[-1].input_ids)] != self.rows[-1].input_ids:
            self.rows.append(new_row(self.prompt, self.turn))
        self.rows[-1] = self.rows[-1].with_turn(
            self.prompt_ids, answer.token_ids, answer.finish_reason, self.seed, self._messages
        )

    def _stop(self, reason: str, *, retry: bool = False, prompt_tokens: int | None = None) -> None:
        # Earlier turns that were answered are whole rows and stay; with them on disk the prompt counts as done.
        retry = retry or bool(self.rows)
        self.errors.append(error_row(self.prompt, self.turn, reason, retry=retry, prompt_tokens=prompt_tokens))
        self.waiting = False


def answered_next(messages: Messages) -> int:
    """Return how many of the messages come before the next answer: up to a user turn, or the last result in a row."""
    roles = [message["role"] for message in messages]
    first = next(place for place, role in enumerate(roles) if role in ("user", "tool"))
    while roles[first] == "tool" and roles[first + 1 : first + 2] == ["tool"]:
        first += 1
    return first + 1
