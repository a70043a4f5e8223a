"""Nested settings by the keys of the command line."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

PATH_KEYS = re.compile(r"(path|dir|uri|url|urls|logger)$|^logger\.|^callbacks\..*\.(dirpath|filename)$")
PATH = re.compile(r"^(/|~|\.{1,2}/|[a-z0-9]+://)")


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


def searchable(values: Mapping[str, Any], inside: str = "") -> dict[str, Any]:
    """Return settings by the keys of the command line. Paths and URLs are shortened to their last part: `DIR/features`
    is `features` on every machine, and does not reveal whose disk it is."""
    return {key: _shortened(key, value) for key, value in flattened(values, inside)}


def _shortened(key: str, value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_shortened(key, each) for each in value]
    if isinstance(value, Mapping):
        return searchable(value)
    if isinstance(value, str) and (PATH_KEYS.search(key) or PATH.match(value)):
        return value.rstrip("/").rpartition("/")[2]
    return value
