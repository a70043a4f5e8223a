"""A clean prompt: a conversation with its id, source and licence, and the tools that the model may call."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from eagle3.prompts.reading.tools import Tools, tools_text


class Prompt(NamedTuple):  # no dataclass: one is made for every row, in half the time
    id: str
    source: str
    license: str | None
    messages: list[dict[str, Any]]
    known_as: tuple[str, ...] = ()  # what the row says it is from, and the models that it names: for the licence check
    tools: Tools | None = None

    def record(self) -> dict[str, Any]:
        """Return what is written."""
        record = {"id": self.id, "source": self.source, "license": self.license, "messages": self.messages}
        return {**record, "tools": self.tools} if self.tools else record

    def texts(self) -> list[str]:
        """Return all that somebody wrote: the messages, then the tools as one text."""
        contents = [message["content"] for message in self.messages]
        return [*contents, tools_text(self.tools)] if self.tools else contents

    def asked(self) -> list[str]:
        """Return the texts without imported answers, so that a prompt weighs the same with and without them."""
        answers = [message["role"] == "assistant" for message in self.messages]
        return [text for number, text in enumerate(self.texts()) if number >= len(answers) or not answers[number]]


def texts_of(record: Mapping[str, Any]) -> list[str]:
    """Return the texts of a prompt as it is written."""
    return Prompt("", "", None, record["messages"], (), record.get("tools")).texts()
