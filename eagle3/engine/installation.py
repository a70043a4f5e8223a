"""The SGLang that launch.python finds, known before a server starts."""

import subprocess

from eagle3.adapters.library import numbers
from eagle3.engine.versions import OLDEST
from eagle3.errors import InputError
from eagle3.settings.engine import LaunchSettings

INSTALL = (
    "install it there (pip install 'sglang[all]>=0.5.17') or name an environment that has it: launch.python=PYTHON"
)
# Neither imports sglang: that takes half a minute, and the log of a failed start says what is wrong with it.
PROBE = """
import importlib.metadata, importlib.util
print(importlib.metadata.version("sglang") if importlib.util.find_spec("sglang") else "")
"""
GPUS = "import torch; print(torch.cuda.device_count())"


def find_sglang(settings: LaunchSettings) -> str:
    """Return the version of launch.python's SGLang; InputError if it is missing or too old."""
    named = f"launch.python={settings.interpreter}"
    version = _run(settings, PROBE)
    if not version:
        raise InputError(f"{named} has no SGLang; {INSTALL}")
    if numbers(version) < OLDEST:
        raise InputError(f"{named} has SGLang {version}, the oldest supported is 0.5.17; {INSTALL}")
    return version


def count_gpus(settings: LaunchSettings) -> int:
    """Return how many GPUs the PyTorch of launch.python sees; InputError if there are fewer than launch.tp_size."""
    gpus = int(_run(settings, GPUS))
    if gpus < settings.tp_size:
        raise InputError(
            f"launch.tp_size={settings.tp_size}: PyTorch of {settings.interpreter} sees {gpus} GPUs; run this on a "
            f"machine that has them, or set launch.tp_size and CUDA_VISIBLE_DEVICES"
        )
    return gpus


def _run(settings: LaunchSettings, code: str) -> str:
    """Return the last line that Python code prints in the server's environment."""
    named = f"launch.python={settings.interpreter}"
    command = [settings.interpreter, "-c", code]
    try:
        ran = subprocess.run(command, env=settings.environment, capture_output=True, text=True, check=False)
    except OSError as error:
        raise InputError(f"{named} cannot be run: {error.strerror}; name a Python interpreter") from None
    if ran.returncode:
        reason = (ran.stderr.strip() or f"exit status {ran.returncode}").splitlines()[-1]
        raise InputError(f"{named} has no working SGLang ({reason}); {INSTALL}")
    return ran.stdout.splitlines()[-1]
