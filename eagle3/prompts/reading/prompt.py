"""A clean prompt: a conversation with its id, source and licence."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Prompt:
    id: str
    source: str
    license: str | None
    messages: list[dict[str, Any]]
    known_as: tuple[str, ...] = ()  # what the row says it is from, and the models that it names: for the licence check

    def record(self) -> dict[str, Any]:
        """Return what is written."""
        return {key: value for key, value in vars(self).items() if key != "known_as"}
