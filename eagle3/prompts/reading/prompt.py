"""A clean prompt: a conversation with its id, source and licence."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Prompt:
    id: str
    source: str
    license: str | None
    messages: list[dict[str, Any]]
