"""`triton.jit` for functions that tests may have wrapped: Triton needs the source and globals of the original."""

from collections.abc import Callable
from inspect import unwrap
from typing import Any

import triton


def triton_jit(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    if function is None:
        return lambda given: triton_jit(given, **options)
    return triton.jit(unwrap(function), **options)
