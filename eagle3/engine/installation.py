"""The SGLang that launch.python finds, known before a server starts."""

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

from eagle3.adapters.library import numbers
from eagle3.engine.versions import OLDEST
from eagle3.errors import InputError
from eagle3.settings.engine import LaunchSettings

INSTALL = (
    "install it there (pip install 'sglang[all]>=0.5.17') or name an environment that has it: launch.python=PYTHON"
)
# Neither imports sglang: that takes half a minute, and the log of a failed start says what is wrong with it.
PROBE = """
import importlib.metadata, importlib.util, json
found = importlib.util.find_spec("sglang")
folder = found and found.submodule_search_locations[0]
print(json.dumps({"folder": folder, "version": found and importlib.metadata.version("sglang")}))
"""
GPUS = "import torch; print(torch.cuda.device_count())"


@dataclass(frozen=True)
class Installation:
    """The SGLang that launch.python imports."""

    folder: Path
    version: str


def find_sglang(settings: LaunchSettings) -> Installation:
    """Ask launch.python for its SGLang; InputError if it is missing or too old."""
    named = f"launch.python={settings.interpreter}"
    facts = json.loads(_run(settings, PROBE))
    if facts["folder"] is None:
        raise InputError(f"{named} has no SGLang; {INSTALL}")
    if numbers(facts["version"]) < OLDEST:
        raise InputError(f"{named} has SGLang {facts['version']}, the oldest supported is 0.5.17; {INSTALL}")
    return Installation(Path(facts["folder"]), facts["version"])


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
