"""One conversation that the target writes alone: as a user, and between two user turns as itself."""

from dataclasses import asdict, dataclass
from typing import Any

from eagle3.answers.chat import Chat, Messages, RefusedConversation
from eagle3.answers.dialogue import NO_CONTENT, turn_seed
from eagle3.engine.endpoint import Answer
from eagle3.settings.precomputing import Sampling
from eagle3.target_prompts.answered import Made, asked
from eagle3.target_prompts.store import prompt_id
from eagle3.target_prompts.user_turn import UserTurn, checked, first_user_turn, own_tokens, user_turn

NO_ANSWER = "no answer of the target"
ANSWER_CUT = "the answer before was cut"
NO_ROOM = "no room for another turn in the target's context"


@dataclass(frozen=True, kw_only=True)
class Writing:
    """How prompts are written.

    seed, answer_seed: of user turns, and of answers as the answers stage makes them.
    answer_last: whether the last user turn is answered, too.
    longest_before: tokens that may stand before a user's text.
    """

    sampling: Sampling
    system_prompts: tuple[str, ...]
    keep_system_prompts: bool
    turns: int
    seed: int
    answer_seed: int
    answer_last: bool
    longest_before: int | None


@dataclass(frozen=True)
class Sample:
    """A task for an answerer: the prompt of this number."""

    number: int
    writing: Writing

    def begin(self, chat: Chat, *, max_prompt_tokens: int | None, **_: Any) -> "WrittenPrompt":
        return WrittenPrompt(self, chat, max_prompt_tokens)


class WrittenPrompt:
    """A conversation as answerers see it (answerer.Conversation). Its result is a row for the prompts stage.

    A turn after the first that cannot be used ends the conversation before it: `ended` says why. Without a first turn
    the row is `refused`."""

    def __init__(self, sample: Sample, chat: Chat, longest_prompt: int | None) -> None:
        self.writing, self.number = sample.writing, sample.number
        self.waiting = True
        self.prompt_ids: list[int] = []
        self.sampling: Sampling | None = None
        self.stop_ids: frozenset[int] | None = None
        self._chat, self._longest_prompt = chat, longest_prompt
        self._steps = self._turns = 0
        self._refused: str | None = None
        self._failed: str | None = None
        self._ended: str | None = None
        self._turn: UserTurn | None = None  # while a user's text is written
        self._answers: list[Made] = []
        steering = self.writing.system_prompts
        system = steering[self.number % len(steering)] if steering else None
        self._messages: Messages = [] if system is None else [{"role": "system", "content": system}]
        self._write_user_turn(first_user_turn(chat, system))

    @property
    def key(self) -> int:
        return self.number

    @property
    def seed(self) -> int:
        if self._turn is None:
            return turn_seed(self.writing.answer_seed, prompt_id(self.number), len(self._answers))
        return turn_seed(self.writing.seed, f"prompts.from_target {self.number}", self._steps)

    @property
    def result(self) -> dict[str, Any]:
        texts = {"messages": self._kept, "answers": self._answers}
        return texts | {"refused": self._refused, "ended": self._ended, "failed": self._failed}

    @property
    def _kept(self) -> Messages:
        """The messages of the prompt: those that are answered."""
        return [each for each in self._messages if self.writing.keep_system_prompts or each["role"] != "system"]

    @property
    def _written(self) -> bool:
        """Whether all user turns are there, and only the last answer is missing: the answers stage can make it."""
        return self._turns == self.writing.turns

    def answer(self, answer: Answer) -> None:
        try:
            if self._turn is None:
                self._add_answer(answer)
            else:
                self._add_user_turn(self._turn, answer)
        except RefusedConversation as refusal:  # of a later turn
            self._end(str(refusal))
        self._steps += 1

    def fail(self, reason: str) -> None:
        """End the sample: no server answers. Where only the last answer is missing, it is a prompt all the same."""
        self.waiting = False
        if not self._written:
            self._refused, self._ended, self._failed = NO_ANSWER, None, reason

    def _write_user_turn(self, turn: UserTurn) -> None:
        self._turn, self.prompt_ids = turn, list(turn.header)
        self.sampling = self.writing.sampling
        self.stop_ids = self._chat.stop_ids | own_tokens(self._chat)
        if self.writing.longest_before is not None and len(self.prompt_ids) > self.writing.longest_before:
            self._end(NO_ROOM)

    def _add_user_turn(self, turn: UserTurn, answer: Answer) -> None:
        text, refused = checked(self._chat, turn, self._messages, answer)
        if refused is not None:
            return self._end(refused)
        self._messages.append({"role": "user", "content": text})
        self._turn, self.sampling, self.stop_ids = None, None, None
        self._turns += 1
        if self._written and not self.writing.answer_last:
            self.waiting = False
            return
        self.prompt_ids = self._chat.prompt_ids(self._kept)
        if self._longest_prompt is not None and len(self.prompt_ids) > self._longest_prompt:
            self._end(NO_ROOM)

    def _add_answer(self, answer: Answer) -> None:
        self._answers.append({"asked": asked(self.prompt_ids, self.seed), **asdict(answer)})
        if self._written:
            self.waiting = False
            return
        content = self._chat.answer_text(self.prompt_ids, answer.token_ids)
        if answer.finish_reason == "length" or content is None:
            return self._end(NO_CONTENT if content is None else ANSWER_CUT)
        self._messages.append({"role": "assistant", "content": content})
        self._write_user_turn(user_turn(self._chat, self._messages))

    def _end(self, reason: str) -> None:
        self.waiting = False
        if not self._turns:
            self._refused = reason
        elif not self._written:
            self._ended = reason
