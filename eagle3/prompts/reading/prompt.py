"""A clean prompt: a conversation with its id, source, licence, tools and template variables; why a row is none; the
interface of checks.
"""

import json
from collections.abc import Mapping
from itertools import pairwise
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from eagle3.prompts.reading.shapes import EACH_ANSWERED, from_json

Tools = list[dict[str, Any]]
CALLS = "tool_calls"  # of an assistant turn: without `answers=imported` only to be compared with the target's own
Note = tuple[str, str | None]  # what was done, and the name of the column or key, which is the row's own word
TemplateKwargs = dict[str, str | int | float | bool]


class Refused(Exception):
    """The reason why a row is not a prompt. It is one of a few fixed phrases and never quotes the row.

    name: the licence, source, role or column of the row that the reason is about.
    """

    def __init__(self, reason: str, id: str | None = None, name: str | None = None):
        super().__init__(reason)
        self.reason, self.id, self.name = reason, id, name


class Prompt(NamedTuple):  # not a dataclass: one is made for every row, in half the time
    id: str
    source: str
    license: str | None
    messages: list[dict[str, Any]]
    known_as: tuple[str, ...] = ()  # origins and models that the row names, for the licence check
    tools: Tools | None = None
    chat_template_kwargs: TemplateKwargs | None = None  # the row's own variables for the template
    notes: tuple[Note, ...] = ()  # how the row was read, to be counted

    @classmethod
    def of_record(cls, record: dict[str, Any]) -> "Prompt":
        """Return the prompt of a line of prompts.jsonl."""
        return cls(**{key: value for key, value in record.items() if key != EACH_ANSWERED})

    def record(self) -> dict[str, Any]:
        """Return the prompt as it is written to prompts.jsonl."""
        record = {"id": self.id, "source": self.source, "license": self.license, "messages": self.messages}
        others = {
            "tools": self.tools,
            "chat_template_kwargs": self.chat_template_kwargs,
            EACH_ANSWERED: self._answers_are_missing(),
        }
        return record | {name: value for name, value in others.items() if value}

    def _answers_are_missing(self) -> bool:
        """Tell whether user turns follow each other: read again, they would be one turn."""
        roles = [message["role"] for message in self.messages if CALLS not in message]
        return "assistant" not in roles and ("user", "user") in pairwise(roles)

    def texts(self) -> list[str]:
        """Return all texts that somebody wrote: the messages, with calls and tools as one text each, texts among
        template variables."""
        contents = [
            text
            for message in self.messages
            for text in (message["content"], *([tools_text(message[CALLS])] if CALLS in message else []))
        ]
        tools = [tools_text(self.tools)] if self.tools else []
        kwargs = (self.chat_template_kwargs or {}).values()
        return [*contents, *tools, *(value for value in kwargs if isinstance(value, str))]

    def with_texts(self, texts: list[str]) -> "Prompt | None":
        """Return the prompt with these instead of `texts()`; None if that of tools or calls is not JSON any more."""
        remaining = iter(texts)
        messages = [
            {**message, "content": next(remaining)} | ({CALLS: from_json(next(remaining))} if CALLS in message else {})
            for message in self.messages
        ]
        tools = from_json(next(remaining)) if self.tools else None
        kwargs = (self.chat_template_kwargs or {}).items()
        changed = {name: next(remaining) if isinstance(value, str) else value for name, value in kwargs}
        if (self.tools and not tools) or not all(message.get(CALLS, True) for message in messages):
            return None
        return self._replace(messages=messages, tools=tools, chat_template_kwargs=changed or None)

    def asked(self) -> list[str]:
        """Return the texts without imported answers, so that a prompt has the same length with and without them."""
        return self._replace(messages=[each for each in self.messages if each["role"] != "assistant"]).texts()


class Verdict(NamedTuple):
    """The result of a check for one prompt."""

    reason: str | None = None  # why the prompt is refused, without its text; None: it passes
    name: str | None = None  # the licence, source or token that the reason is about
    prompt: Prompt | None = None  # the changed prompt, e.g. masked; None: unchanged
    counts: Mapping[str, int] = MappingProxyType({})  # summed per source under the check's name in the ledger


class Check(Protocol):
    """A filter of prompts. Checks are pickled to worker processes: load large data at the first call, not before."""

    name: str  # of its section in the ledger: licenses, length, language, privacy, ...

    def __call__(self, prompt: Prompt) -> Verdict: ...


def tools_text(tools: Tools) -> str:
    return json.dumps(tools, ensure_ascii=False, allow_nan=False)


def is_unicode(text: str) -> bool:
    """Tell whether UTF-8 can encode the text: JSON can contain half a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
