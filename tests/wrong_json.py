"""Every key of a JSON object with values of wrong types: what people and damaged disks make of a file."""

import copy
from collections.abc import Iterator
from typing import Any

DEEP: Any = 1
for _ in range(100):
    DEEP = [DEEP]
WRONG: list[Any] = [None, True, 0, -1, 10**30, 1.5, "\x1b[31mred", [], [None], {"a": [{}]}, DEEP]
TEXTS = ["", "{", "[1]", "null", '"text"', "{}", "[" * 100_000, '{"a":' * 3000 + "1" + "}" * 3000, "\x80"]


def mutations(value: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the object with one wrong value at a time, and a name for it."""
    for path in _paths(value):
        for wrong in WRONG:
            changed = copy.deepcopy(value)
            place: Any = changed
            for key in path[:-1]:
                place = place[key]
            place[path[-1]] = wrong
            yield f"{'.'.join(map(str, path))}={wrong!r:.40}", changed


def _paths(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in pairs:
        yield (*at, key)
        yield from _paths(inner, (*at, key))


def one_printable_line(error: Exception) -> bool:
    return str(error).isprintable() and len(str(error)) < 1500
