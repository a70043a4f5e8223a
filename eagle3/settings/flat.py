"""Nested settings by the keys of the command line."""

from collections.abc import Iterator, Mapping
from typing import Any


def flattened(values: Mapping[Any, Any], inside: str = "", *, groups: bool = False) -> Iterator[tuple[str, Any]]:
    """Yield each value with its dotted key, also an empty mapping; with `groups`, other mappings before their keys."""
    for name, value in values.items():
        key = f"{inside}{name}"
        filled = isinstance(value, Mapping) and bool(value)
        if groups or not filled:
            yield key, value
        if filled:
            yield from flattened(value, f"{key}.", groups=groups)
