"""Finds the kind of a head: EAGLE-3 by its short name, others by import path (docs/how-to/own-head-kind.md)."""

import re
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from pydoc import ErrorDuringImport, locate
from typing import Any

from jaxtyping import Int
from torch import Tensor

from eagle3.errors import InputError, first_line
from eagle3.head.eagle3 import EAGLE3
from eagle3.head.head import Head
from eagle3.head.kind import Kind

WHERE = "modules are found in the clone, in PYTHONPATH and next to the folder of --config-dir"


@cache
def kind_named(name: str) -> Kind:
    """Return the kind of a name: eagle3, or the import path of a class or instance."""
    if name == EAGLE3.name:
        return EAGLE3
    try:
        found: Any = locate(name) if re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)+", name) else None
        kind = found() if isinstance(found, type) and issubclass(found, Kind) else found
    except (ErrorDuringImport, NotImplementedError, TypeError) as error:
        if isinstance(getattr(error, "value", None), KeyboardInterrupt):  # pydoc wraps any exception
            raise KeyboardInterrupt from None
        raise InputError(f"model.kind={name} cannot be imported ({first_line(error)}); correct its module") from None
    if not isinstance(kind, Kind):
        fault = "is no subclass or instance of eagle3.head.kind.Kind" if found else "names nothing that can be imported"
        raise InputError(
            f"model.kind={name} {fault}; give {EAGLE3.name}, or the import path of a kind of your own ({WHERE})"
        )
    kind.name = name
    return kind


def kind_in(folder: Path, name: str) -> Kind:
    """Return the kind that a file in `folder` names; a module that is in this folder itself is not imported: whoever
    made the head could run code."""
    for place in [] if name == EAGLE3.name else _places(name):
        if place.is_relative_to(folder.resolve()):
            raise InputError(
                f"{folder} names the kind {name}, a module that came with it, which could run any code and is not "
                f"imported; read it, and move it out of that folder"
            )
    return kind_named(name)


def _places(name: str) -> Iterator[Path]:
    """Yield the files and folders that importing `name` would look into, without importing anything."""
    top, *rest = name.split(".")
    try:
        spec = find_spec(top) if top.isidentifier() else None
    except ValueError:  # of a module that Python itself made, like __main__
        spec = None
    for place in map(Path, (spec.submodule_search_locations or [spec.origin or ""]) if spec else []):
        yield from (place.joinpath(*rest[:depth]).resolve() for depth in range(len(rest) + 1))


def new_head(kind: Kind, config: Any, draft_ids: Int[Tensor, " D"]) -> Head:
    """Make a head that knows its kind, and whose weights the caller sets."""
    head = kind.new_head(config, draft_ids)
    head.kind = kind.name
    return head
