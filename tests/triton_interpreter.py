"""Triton's kernels without a GPU, where Triton is installed."""

import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest

needs_triton = pytest.mark.skipif(not find_spec("triton"), reason="Triton comes with PyTorch's CUDA builds")


def run_in_interpreter(code: str) -> None:
    """In a process of its own: the variable counts when kernels are imported. Modules of the tests can be imported."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", f"import triton_interpreter; triton_interpreter.patch(); {code}"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def in_triton(check: Callable[[str], None]) -> Callable[[str], None]:
    """Make a test of a function that takes a device: "cpu" in Triton's interpreter, "cuda" on a GPU."""

    @pytest.mark.parametrize(
        "device", [pytest.param("cpu", marks=needs_triton), pytest.param("cuda", marks=pytest.mark.gpu)]
    )
    def test(device: str) -> None:
        if device == "cuda":
            return check(device)
        return run_in_interpreter(f"from {check.__module__} import {check.__name__} as check; check('cpu')")

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
