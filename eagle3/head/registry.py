"""Finds the kind of a head: EAGLE-3 by its short name, others by import path (docs/how-to/own-head-kind.md)."""

from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from jaxtyping import Int
from torch import Tensor, nn

from eagle3.errors import InputError
from eagle3.head.eagle3 import EAGLE3
from eagle3.head.head import Head, HeadSizes, RMSNorm
from eagle3.head.kind import Kind
from eagle3.settings.parts import WHERE, imported


@cache
def kind_named(name: str) -> Kind:
    """Return the kind of a name: eagle3, or the import path of a class or instance."""
    if name == EAGLE3.name:
        return EAGLE3
    found = imported(name, "model.kind")
    kind = found() if isinstance(found, type) and issubclass(found, Kind) else found
    if not isinstance(kind, Kind):
        raise InputError(
            f"model.kind={name} is no subclass or instance of eagle3.head.kind.Kind; give {EAGLE3.name}, or the import "
            f"path of one ({WHERE})"
        )
    lacking = [each for each in ("new_head", "unroll", "cached") if getattr(type(kind), each) is getattr(Kind, each)]
    config_type = getattr(kind, "config_type", None)
    if not (isinstance(config_type, type) and issubclass(config_type, HeadSizes)):
        lacking.append("config_type, a subclass of eagle3.head.head.HeadSizes")
    if lacking:
        raise InputError(f"model.kind={name} lacks {', '.join(lacking)}; add that to the class")
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
    norm, lm_head = getattr(head, "norm", None), getattr(head, "lm_head", None)
    sizes = (config.draft_vocab_size, config.hidden_size)
    if not (
        isinstance(norm, RMSNorm)
        and norm.weight.shape == sizes[1:]
        and isinstance(lm_head, nn.Linear)
        and (lm_head.weight.shape, lm_head.bias) == (sizes, None)
    ):
        raise InputError(
            f"model.kind={kind.name}: the losses need other modules in its head; make norm = RMSNorm(hidden_size, "
            f"rms_norm_eps) and lm_head = nn.Linear(hidden_size, draft_vocab_size, bias=False)"
        )
    head.kind = kind.name
    return head
