"""Reports of bench, tune and compare: numbers as JSON, the same as a Markdown page, and how numbers are written."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eagle3.draft_shape import Shape
from eagle3.storage.files import write_whole
from eagle3.storage.records import write_sealed_json

NONE = "-"


def write_report(json_file: Path, numbers: Mapping[str, Any], page: Path, text: str) -> None:
    write_sealed_json(json_file, dict(numbers))
    write_whole(page, (text + "\n").encode())


def number(value: float | None) -> str:
    return NONE if value is None else f"{value:.3f}"


def share(value: float | None) -> str:
    return NONE if value is None else f"{value:.0%}"


def with_error(value: float, standard_error: float | None) -> str:
    return f"{value:.3f}" + ("" if standard_error is None else f" ± {standard_error:.3f}")


def drafts(row: Mapping[str, Any]) -> str:
    """Write the shape of the drafts of a row of compare.json."""
    return str(Shape(row["steps"], row["topk"], row["draft_tokens"]))
