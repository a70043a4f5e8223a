"""`triton.jit` also of functions that tests have wrapped: Triton wants the source and globals of what it is given."""

from collections.abc import Callable
from inspect import unwrap
from typing import Any

import triton


def triton_jit(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    if function is None:
        return lambda given: triton_jit(given, **options)
    return triton.jit(unwrap(function), **options)
