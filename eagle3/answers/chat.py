"""Chat template → token ids: the prompt that a server would build, and the content that it would return."""

import copy
import datetime
import json
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Unpack

from jinja2 import TemplateSyntaxError
from transformers import PreTrainedTokenizerBase

from eagle3.adapters.transformers import control_ids
from eagle3.answers.reasoning import reasoning_of
from eagle3.errors import InputError
from eagle3.settings.precomputing import ChatSettings
from eagle3.target.identity import template_hash

log = logging.getLogger(__name__)

LOSES_TOOLS = "the chat template does not render the tools of the conversation"
LOSES_TEXT = "the chat template does not render the whole text of a system or user turn"
SENTINEL = "Sentinel0451"  # no template changes, cuts or takes it for anything

Messages = list[dict[str, Any]]


class RefusedConversation(Exception):
    """The template refuses this conversation. The message never holds text of the conversation."""


class Chat:
    """The target's chat format, with the clock pinned to `date`."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, *, stop_ids: Iterable[int], **settings: Unpack[ChatSettings]
    ) -> None:
        self.tokenizer = tokenizer
        self.stop_ids = frozenset(stop_ids)
        self.control_ids = control_ids(tokenizer)
        source = _template_source(tokenizer, settings["template"])
        template_kwargs, date, parser = settings["template_kwargs"], settings["date"], settings["reasoning_parser"]
        self.reasoning = reasoning_of(parser, source)
        self.settings: dict[str, Any] = {
            "template_hash": template_hash(source),
            "template_kwargs": dict(template_kwargs),
            "date": date,
            "reasoning_parser": parser,
        }
        self._source = source
        self.reads_clock = "strftime_now" in source
        # A template that joins its BOS to a text fails on a tokenizer that has none; there it means nothing.
        tokens = {"bos_token": tokenizer.bos_token, "eos_token": tokenizer.eos_token}
        self._unset_tokens: dict[str, Any] = {
            name: "" for name, token in tokens.items() if token is None and name not in template_kwargs
        }
        self._template = _pin_clock(source, date) if self.reads_clock else source
        self._offered: dict[str, Any] = {}  # to the template, in addition to the conversation: its tools
        self._in_parts = False  # whether a message's content is a list of parts, which some templates want
        self._check_template()

    def with_tools(self, tools: list[dict[str, Any]] | None) -> "Chat":
        """Return the same format for a conversation that offers these tools."""
        chat = copy.copy(self)
        chat._offered = {"tools": tools} if tools else {}
        return chat

    def prompt_ids(self, messages: Messages) -> list[int]:
        """Token ids up to where generation begins. Raises `RefusedConversation` when the template does."""
        return self.encode(self.prompt(messages))

    def prompt(self, messages: Messages) -> str:
        """Render up to where generation begins. Raises `RefusedConversation`, also when text of a turn is lost."""
        text = self.render(messages, add_generation_prompt=True)
        asked = (message["content"].strip() for message in messages if message["role"] != "assistant")
        if not all(each in text for each in asked):
            raise RefusedConversation(LOSES_TEXT)
        if self._offered and not self._has_tools(text, messages):
            raise RefusedConversation(LOSES_TOOLS)
        return text

    def names_tool(self, answer_ids: list[int]) -> bool:
        """Tell whether an answer may call a tool of the conversation: in every format a call holds the tool's name."""
        text = self.decode(answer_ids)
        return any(tool["function"]["name"] in text for tool in self._offered.get("tools", ()))

    def _has_tools(self, text: str, messages: Messages) -> bool:
        if not all(tool["function"]["name"] in text for tool in self._offered["tools"]):
            return False
        return text != self.with_tools(None).render(messages, add_generation_prompt=True)

    def answer_text(self, prompt_ids: list[int], answer_ids: list[int]) -> str | None:
        """Return the content of the message that a server would return for an answer, None where it has none.

        With `chat.reasoning_parser` the content is what follows the reasoning. Without one it is the whole text, and
        marks of reasoning that are no special tokens stay in it: templates look for them there."""
        if answer_ids and answer_ids[-1] in self.stop_ids:
            answer_ids = answer_ids[:-1]
        whole, visible = self.decode(answer_ids), self.decode(answer_ids, skip_special_tokens=True)
        if self.settings["reasoning_parser"] is None:
            return visible
        if self.reasoning is not None and self.reasoning.end in whole:
            return self._behind_reasoning(answer_ids)
        opened = self.reasoning is not None and (
            self.reasoning.begins(whole) or self.decode(prompt_ids).rstrip().endswith(self.reasoning.start)
        )
        return whole if whole == visible and not opened else None

    def _behind_reasoning(self, answer_ids: list[int]) -> str | None:
        assert self.reasoning is not None
        low, high = 0, len(answer_ids)  # the least number of tokens that hold the end of the reasoning
        while low < high:
            middle = (low + high) // 2
            holds = self.reasoning.end in self.decode(answer_ids[:middle])
            low, high = (low, middle) if holds else (middle + 1, high)
        content = self.reasoning.content(self.decode(answer_ids))
        if self.reasoning.start in content or self.reasoning.end in content:
            return None  # servers differ in what they return of a second span
        of_last_token = self.reasoning.content(self.decode(answer_ids[:low]))
        return (of_last_token + self.decode(answer_ids[low:], skip_special_tokens=True)).strip()

    def render(self, messages: Messages, *, add_generation_prompt: bool) -> str:
        """Render by the template. Raises `RefusedConversation` when it does."""
        if self._in_parts:
            messages = [{**each, "content": [{"type": "text", "text": each["content"]}]} for each in messages]
        try:
            text = self.tokenizer.apply_chat_template(
                messages,
                chat_template=self._template,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                **self._unset_tokens,
                **{**self.settings["template_kwargs"], **self._offered},
            )
        except TemplateSyntaxError:
            raise
        except Exception as error:  # a template is a program that came with the model: it may fail in any way
            raise RefusedConversation(self._refusal(error)) from None
        assert isinstance(text, str)
        return text

    def _refusal(self, error: Exception) -> str:
        # Only words that stand in the template itself: a message put together at run time may quote the conversation.
        reason = str(error) if str(error) in self._source else type(error).__name__
        return f"the chat template refuses: {reason}"

    def encode(self, text: str) -> list[int]:
        # The template writes its own BOS; add_special_tokens would double it.
        return self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def decode(self, ids: list[int], *, skip_special_tokens: bool = False) -> str:
        text = self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    def _check_template(self) -> None:
        try:
            lost = self._lost_roles()
            if lost - {"system"}:  # the template may read a list of parts, and silently lose text that is none
                self._in_parts = True
                lost_in_parts = self._lost_roles()
                self._in_parts = lost_in_parts < lost
                lost = lost_in_parts if self._in_parts else lost
        except TemplateSyntaxError as error:
            raise InputError(
                f"the chat template is not valid Jinja (line {error.lineno}); correct chat.template"
            ) from None
        if lost - {"system"}:
            raise InputError(
                f"the chat template loses the text of {' and '.join(sorted(lost))} turns; give one that renders it "
                f"with chat.template=FILE.jinja"
            )
        if lost:
            log.warning("the chat template loses the text of system turns: conversations that have one are left out")

    def _lost_roles(self) -> set[str]:
        """Return the roles whose text does not survive the template. What it refuses, each conversation shows."""
        lost: set[str] = set()
        for roles in (["user"], ["user", "assistant"], ["user", "assistant", "user"], ["system", "user"]):
            messages = [{"role": role, "content": f"{SENTINEL}{number}"} for number, role in enumerate(roles)]
            try:
                text = self.render(messages, add_generation_prompt=roles[-1] == "user")
            except RefusedConversation:
                if self._in_parts:
                    lost |= set(roles)
                continue
            # Templates may drop earlier answers, or parts of them: the prompt is as served all the same.
            asked = [each for each in messages if each["role"] != "assistant" or each is messages[-1]]
            # A list of parts that is written as Python would write it is lost too.
            lost |= {each["role"] for each in asked if each["content"] not in text or repr(each["content"]) in text}
        return lost


def ids_in_text(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return the ids of `text` inside a longer one: SentencePiece puts a space before a text that stands alone."""
    before, together, alone = (
        tokenizer(each, add_special_tokens=False, verbose=False)["input_ids"] for each in ("\n", f"\n{text}", text)
    )
    return together[len(before) :] if together[: len(before)] == before else alone


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
    # A macro, because transformers hands a template plain data only: a function passed as a variable is blanked.
    written = {f"%{directive}": day.strftime(f"%{directive}") for directive in "aAbBcdfHIjmMpSuUVwWxXyYG"}
    written |= {"%-d": str(day.day), "%-m": str(day.month), "%e": f"{day.day:2}", "%F": f"{day:%Y-%m-%d}"}
    replacements = "".join(f"|replace({json.dumps(old)}, {json.dumps(new)})" for old, new in written.items())
    # The newline after endmacro is eaten by Jinja's trim_blocks, which transformers sets: the rest renders unchanged.
    return "{% macro strftime_now(format) %}{{ format" + replacements + " }}{% endmacro %}\n" + source
