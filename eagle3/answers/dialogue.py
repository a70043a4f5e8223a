"""One conversation becomes training rows: answered by the target, turn by turn."""

import hashlib
from collections.abc import Sequence
from typing import Any

from eagle3.answers.chat import Chat, Messages, RefusedConversation
from eagle3.answers.rows import AnsweredRow, AnswerError, error_row, new_row, too_long
from eagle3.engine.endpoint import Answer
from eagle3.settings.precomputing import Sampling

UNFINISHED = "the answer did not end within sampling.max_new_tokens and sampling.on_length=drop"
CALLS_TOOL = "the answer before names a tool of the conversation: what the tool would have said is not known"
NO_CONTENT = "the answer before has no content that a server would put into the next prompt (see chat.reasoning_parser)"


def seed_of(base: int, id: str, turn: int) -> int:
    digest = hashlib.sha256(f"{base}\0{id}\0{turn}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


class Dialogue:
    """Collects the rows and the errors of one prompt. While `waiting`, `prompt_ids` asks for the answer to `turn`.

    A row spans several turns as long as the next prompt begins with exactly the ids of the row. Many templates strip
    reasoning or white space from earlier answers: then the next turn begins a new row."""

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
        self._coming = [message for message in prompt["messages"] if message["role"] != "assistant"]
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
        return seed_of(self._seed, self.prompt["id"], self.turn)

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

    def _next_prompt(self, after: Sequence[int] = ()) -> None:
        roles = [message["role"] for message in self._coming]
        if "user" not in roles:
            if self.turn == 0:
                return self._stop("the conversation has no user turn")
            self.waiting = False
            return
        if self._messages and self._messages[-1]["content"] is None:
            return self._stop(NO_CONTENT)
        if self._chat.names_tool(list(after)):
            return self._stop(CALLS_TOOL)
        end = roles.index("user") + 1
        self._messages += self._coming[:end]
        self._coming = self._coming[end:]
        try:
            self.prompt_ids = self._chat.prompt_ids(self._messages)
        except RefusedConversation as refusal:
            return self._stop(str(refusal))
        reason = too_long(self.prompt_ids, self._max_prompt_tokens)
        if reason:
            self._stop(reason, prompt_tokens=len(self.prompt_ids))

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
