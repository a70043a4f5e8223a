"""Chat template → token ids: the prompt a server would build, and the exact answer tokens of imported conversations."""

import datetime
import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import TemplateSyntaxError
from transformers import PreTrainedTokenizerBase

from eagle3.errors import InputError

NOT_CONTINUED = "the template does not render the answer as a continuation of its generation prompt"
NO_END_OF_TURN = "no end-of-turn token follows the answer"
END_OF_TURN_INSIDE = "the answer contains an end-of-turn token"
# Behind these a server's parser begins a message's content: gpt-oss's last channel, the end of reasoning.
CONTENT_FOLLOWS = ("<|channel|>final<|message|>", "</think>")

Messages = list[dict[str, Any]]


class RefusedConversation(Exception):
    """The template refuses this conversation. The message never holds text of the conversation."""


@dataclass(frozen=True)
class AnswerRow:
    """One assistant turn: `answer_ids` ends with the end-of-turn token, or `refused` says why it cannot be exact."""

    turn: int
    messages: Messages  # up to and including the answer
    prompt_ids: list[int]
    answer_ids: list[int]
    refused: str | None


class Chat:
    """The target's chat format, with the clock pinned to `date`."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        template: str | None,
        template_kwargs: dict[str, Any],
        date: str,
        stop_ids: Iterable[int],
    ):
        self.tokenizer = tokenizer
        self.stop_ids = frozenset(stop_ids)
        source = _template_source(tokenizer, template)
        self.settings: dict[str, Any] = {
            "template_hash": hashlib.sha256(source.encode()).hexdigest(),
            "template_kwargs": dict(template_kwargs),
            "date": date,
        }
        self._source = source
        # A template that joins its BOS to a text fails on a tokenizer that has none; there it means nothing.
        tokens = {"bos_token": tokenizer.bos_token, "eos_token": tokenizer.eos_token}
        self._unset_tokens: dict[str, Any] = {
            name: "" for name, token in tokens.items() if token is None and name not in template_kwargs
        }
        self._template = _pin_clock(source, date)
        self._check_template()

    def prompt_ids(self, messages: Messages) -> list[int]:
        """Token ids up to where generation begins. Raises `RefusedConversation` when the template does."""
        return self._encode(self._render(messages, add_generation_prompt=True))

    def answer_text(self, answer_ids: list[int]) -> str | None:
        """The content of the message that a server would return for `answer_ids`, None where they do not tell.

        Marks of reasoning that are no special tokens stay in the text: templates look for them there."""
        if answer_ids and answer_ids[-1] in self.stop_ids:
            answer_ids = answer_ids[:-1]
        whole, visible = self._decode(answer_ids), self._decode(answer_ids, skip_special_tokens=True)
        if whole == visible:
            return whole
        for mark in CONTENT_FOLLOWS:
            content = whole.partition(mark)[2].strip()
            if content and visible.rstrip().endswith(content):  # else it holds special tokens of its own
                return content
        return None

    def answer_rows(self, messages: Messages) -> list[AnswerRow]:
        """One row per assistant turn: what the template renders from its generation prompt to the end of the turn."""
        answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        return [self._answer_row(turn, messages[: index + 1]) for turn, index in enumerate(answers)]

    def _answer_row(self, turn: int, messages: Messages) -> AnswerRow:
        try:
            prompt_ids, answer_ids = self._split(messages)
        except RefusedConversation as refusal:
            return AnswerRow(turn, messages, [], [], str(refusal))
        return AnswerRow(turn, messages, prompt_ids, answer_ids, None)

    def _split(self, messages: Messages) -> tuple[list[int], list[int]]:
        if not self.stop_ids.isdisjoint(self._encode(messages[-1]["content"])):
            raise RefusedConversation(END_OF_TURN_INSIDE)
        prompt = self._render(messages[:-1], add_generation_prompt=True)
        whole = self._render(messages, add_generation_prompt=False)
        if not whole.startswith(prompt):
            raise RefusedConversation(NOT_CONTINUED)
        prompt_ids = self._encode(prompt)
        rest_ids = self._encode_rest(prompt_ids, whole, whole[len(prompt) :])
        for position, token in enumerate(rest_ids):
            if token in self.stop_ids:
                return prompt_ids, rest_ids[: position + 1]
        return prompt_ids, [*rest_ids, self._next_turn_token(messages, whole)]

    def _encode_rest(self, prompt_ids: list[int], whole: str, rest: str) -> list[int]:
        # Generation begins after prompt_ids whatever the text merges to, so the rest is a piece of its own. It is
        # read in context where that changes nothing else: SentencePiece puts a space before a text that stands alone.
        in_context = self._encode(whole)
        starts_alike = in_context[: len(prompt_ids)] == prompt_ids
        if starts_alike and self._decode(in_context) == self._decode(prompt_ids) + rest:
            return in_context[len(prompt_ids) :]
        return self._encode(rest)

    def _next_turn_token(self, messages: Messages, whole: str) -> int:
        # Templates such as GLM's write no end of turn: the model ends with the token that opens the next turn.
        longer = self._render([*messages, {"role": "user", "content": "."}], add_generation_prompt=False)
        following = self._encode(longer[len(whole) :])
        if not longer.startswith(whole) or not following or following[0] not in self.stop_ids:
            raise RefusedConversation(NO_END_OF_TURN)
        return following[0]

    def _render(self, messages: Messages, *, add_generation_prompt: bool) -> str:
        try:
            text = self.tokenizer.apply_chat_template(
                messages,
                chat_template=self._template,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                **self._unset_tokens,
                **self.settings["template_kwargs"],
            )
        except TemplateSyntaxError:
            raise
        except Exception as error:  # a template is a program that came with the model: it may fail in any way
            raise RefusedConversation(self._refusal(error)) from None
        assert isinstance(text, str)
        return text

    def _refusal(self, error: Exception) -> str:
        # Only words that stand in the template itself: a message put together at run time may quote the conversation.
        said = str(error) if str(error) in self._source else type(error).__name__
        return f"the chat template refuses: {said}"

    def _encode(self, text: str) -> list[int]:
        # The template writes its own BOS; add_special_tokens would double it.
        return self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def _decode(self, ids: list[int], *, skip_special_tokens: bool = False) -> str:
        text = self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    def _check_template(self) -> None:
        taken = {"chat_template", "add_generation_prompt", "tokenize"} & set(self.settings["template_kwargs"])
        if taken:
            raise InputError(
                f"chat.template_kwargs sets {sorted(taken)}, which are not the template's to choose; remove"
            )
        try:
            self._render([{"role": "user", "content": "."}], add_generation_prompt=True)
        except TemplateSyntaxError as error:
            raise InputError(
                f"the chat template is not valid Jinja (line {error.lineno}); mend chat.template"
            ) from None
        except RefusedConversation:
            pass  # it may want a system message first: that is for each conversation to show


def _template_source(tokenizer: PreTrainedTokenizerBase, path: str | None) -> str:
    if path is None:
        try:
            return tokenizer.get_chat_template()
        except ValueError:
            raise InputError(
                "chat.template=null but the target's tokenizer carries no (default) chat template; "
                "give one with chat.template=FILE.jinja"
            ) from None
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"chat.template={path} cannot be read ({error.strerror}); give a Jinja file or null") from None


def _pin_clock(source: str, date: str) -> str:
    """Shadow the function through which templates read the clock by a macro that knows one day only."""
    day = datetime.datetime.fromisoformat(date)
    if "strftime_now" not in source:
        return source
    # A macro, because transformers hands a template plain data only: a function passed as a variable is blanked.
    written = {f"%{directive}": day.strftime(f"%{directive}") for directive in "aAbBcdfHIjmMpSuUVwWxXyYG"}
    written |= {"%-d": str(day.day), "%-m": str(day.month), "%e": f"{day.day:2}", "%F": f"{day:%Y-%m-%d}"}
    replacements = "".join(f"|replace({json.dumps(old)}, {json.dumps(new)})" for old, new in written.items())
    # The newline after endmacro is eaten by Jinja's trim_blocks, which transformers sets: the rest renders unchanged.
    return "{% macro strftime_now(format) %}{{ format" + replacements + " }}{% endmacro %}\n" + source
