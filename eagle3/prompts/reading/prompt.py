"""A clean prompt: a conversation with its id, source, licence, tools and template variables; why a row is none; the
interface of checks.
"""

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from eagle3.prompts.reading.shapes import from_json

Tools = list[dict[str, Any]]
TemplateKwargs = dict[str, str | int | float | bool]


class Refused(Exception):
    """The reason why a row is not a prompt. It is one of a few fixed phrases and never quotes the row."""

    def __init__(self, reason: str, id: str | None = None):
        super().__init__(reason)
        self.reason, self.id = reason, id


class Prompt(NamedTuple):  # not a dataclass: one is made for every row, in half the time
    id: str
    source: str
    license: str | None
    messages: list[dict[str, Any]]
    known_as: tuple[str, ...] = ()  # origins and models that the row names, for the licence check
    tools: Tools | None = None
    chat_template_kwargs: TemplateKwargs | None = None  # the row's own variables for the template

    def record(self) -> dict[str, Any]:
        """Return the prompt as it is written to prompts.jsonl."""
        record = {"id": self.id, "source": self.source, "license": self.license, "messages": self.messages}
        others = {"tools": self.tools, "chat_template_kwargs": self.chat_template_kwargs}
        return record | {name: value for name, value in others.items() if value}

    def texts(self) -> list[str]:
        """Return all texts that somebody wrote: the messages, the tools as one text, texts among template variables."""
        contents = [message["content"] for message in self.messages]
        tools = [tools_text(self.tools)] if self.tools else []
        kwargs = (self.chat_template_kwargs or {}).values()
        return [*contents, *tools, *(value for value in kwargs if isinstance(value, str))]

    def with_texts(self, texts: list[str]) -> "Prompt | None":
        """Return the prompt with these instead of `texts()`; None if the tools' text is not JSON any more."""
        remaining = iter(texts)
        messages = [{**message, "content": next(remaining)} for message in self.messages]
        tools = from_json(next(remaining)) if self.tools else None
        kwargs = (self.chat_template_kwargs or {}).items()
        changed = {name: next(remaining) if isinstance(value, str) else value for name, value in kwargs}
        if self.tools and not tools:
            return None
        return self._replace(messages=messages, tools=tools, chat_template_kwargs=changed or None)

    def asked(self) -> list[str]:
        """Return the texts without imported answers, so that a prompt has the same length with and without them."""
        return self._replace(messages=[each for each in self.messages if each["role"] != "assistant"]).texts()


class Verdict(NamedTuple):
    """The result of a check for one prompt."""

    reason: str | None = None  # why the prompt is refused, without its text; None: it passes
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
