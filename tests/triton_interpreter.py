"""Triton's kernels without a GPU, where Triton is installed."""

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

needs_triton = pytest.mark.skipif(not find_spec("triton"), reason="Triton comes with PyTorch's CUDA builds")


def run_in_interpreter(code: str) -> None:
    """In a process of its own: the variable counts when kernels are imported. Modules of the tests can be imported."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
