"""Tables in Markdown, for reports and pages."""

from collections.abc import Iterable, Sequence
from typing import Any


def table(columns: Sequence[str], rows: Iterable[Iterable[Any]], *, rule: str = "---") -> str:
    """Return a table; `rule` aligns its columns, "---:" to the right."""
    lines = [columns, [rule] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(map(cell, line))} |" for line in lines)


def cell(value: Any) -> str:
    """Write a value so that it stays in its cell, whatever text it is."""
    return " ".join(str(value).replace("|", "\\|").split())
