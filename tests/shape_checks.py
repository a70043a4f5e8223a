"""Check shapes in signatures while tests run: a type checker for jaxtyping that leaves all other types to mypy."""

from collections.abc import Callable
from typing import Any, get_args

from beartype import beartype
from jaxtyping import AbstractArray


def check_shapes(function: Callable[..., Any]) -> Callable[..., Any]:
    """Check those parameters and that result of `function` whose annotations hold a shape."""
    annotations = getattr(function, "__annotations__", {})
    without = [name for name, hint in annotations.items() if not holds_shape(hint)]
    if len(without) == len(annotations):
        return function  # compiling a check that never fails takes time
    annotations.update(dict.fromkeys(without, Any))
    return beartype(function)


def holds_shape(hint: Any) -> bool:
    if isinstance(hint, type) and issubclass(hint, AbstractArray):
        return True
    return any(holds_shape(part) for part in get_args(hint))
