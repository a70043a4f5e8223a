"""A clean prompt: a conversation with its id, source and licence."""

from typing import Any, NamedTuple


class Prompt(NamedTuple):  # no dataclass: one is made for every row, in half the time
    id: str
    source: str
    license: str | None
    messages: list[dict[str, Any]]
    known_as: tuple[str, ...] = ()  # what the row says it is from, and the models that it names: for the licence check

    def record(self) -> dict[str, Any]:
        """Return what is written."""
        return {"id": self.id, "source": self.source, "license": self.license, "messages": self.messages}
