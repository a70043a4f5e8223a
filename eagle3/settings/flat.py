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


def differences(then: Mapping[Any, Any], now: Mapping[Any, Any]) -> str:
    """Return the keys whose values differ, with both values."""
    before, after = dict(flattened(then)), dict(flattened(now))
    return ", ".join(
        f"{key}={before.get(key, 'unset')} then, {after.get(key, 'unset')} now"
        for key in before | after
        if before.get(key) != after.get(key)
    )
