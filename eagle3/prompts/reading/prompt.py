"""A clean prompt: a conversation with its id, source, licence and tools; why a row is none; the interface of checks."""

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

Tools = list[dict[str, Any]]


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

    def record(self) -> dict[str, Any]:
        """Return the prompt as it is written to prompts.jsonl."""
        record = {"id": self.id, "source": self.source, "license": self.license, "messages": self.messages}
        return {**record, "tools": self.tools} if self.tools else record

    def texts(self) -> list[str]:
        """Return all texts that somebody wrote: the messages, then the tools as one text."""
        contents = [message["content"] for message in self.messages]
        return [*contents, tools_text(self.tools)] if self.tools else contents

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
