"""Triton's kernels without a GPU, where Triton is installed."""

import atexit
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from traceback import format_exc
from typing import Any

import pytest

needs_triton = pytest.mark.skipif(not find_spec("triton"), reason="Triton comes with PyTorch's CUDA builds")


@cache
def interpreter() -> subprocess.Popen[str]:
    """A process of its own, for all tests: the variable counts when Triton is imported, which takes seconds."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    started = subprocess.Popen(
        [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )
    atexit.register(started.communicate)  # the end of its input is its end
    return started


def serve() -> None:
    """Call the functions that lines of stdin name, and answer each with ok or a traceback."""
    patch()
    for line in sys.stdin:
        module, name = line.split()
        try:
            getattr(import_module(module), name)("cpu")
            print("ok", flush=True)
        except Exception:
            print(repr(format_exc()), flush=True)


def in_triton(check: Callable[[str], None]) -> Callable[[str], None]:
    """Make a test of a function that takes a device: "cpu" in Triton's interpreter, "cuda" on a GPU."""

    @pytest.mark.parametrize(
        "device", [pytest.param("cpu", marks=needs_triton), pytest.param("cuda", marks=pytest.mark.gpu)]
    )
    def test(device: str) -> None:
        if device == "cuda":
            return check(device)
        process = interpreter()
        process.stdin.write(f"{check.__module__} {check.__name__}\n")
        process.stdin.flush()
        assert (said := process.stdout.readline().strip()) == "ok", said

    return test


def patch() -> None:
    """Fill gaps that Triton's interpreter has had in some of the versions 3.5 to 3.9."""
    from triton.runtime import interpreter

    patch_tensor, splat = interpreter._patch_lang_tensor, interpreter.InterpreterBuilder.create_splat

    def patch_index(tensor: Any, *scope: Any) -> None:  # Triton 3.5 has no scope
        """The bound of a loop may be a tensor, also with NumPy 2.4."""
        patch_tensor(tensor, *scope)
        set_attribute = scope[0].set_attr if scope else setattr
        set_attribute(tensor, "__index__", lambda self: self.handle.data.item())

    def splat_bool(builder: Any, shape: Any, value: Any) -> Any:
        """A mask from one comparison is a mask, not a number."""
        if value.data.dtype == bool:
            value = interpreter.TensorHandle(value.data, interpreter.tl.int1)
        return splat(builder, shape, value)

    interpreter._patch_lang_tensor = patch_index
    interpreter.InterpreterBuilder.create_splat = splat_bool


if __name__ == "__main__":
    serve()
