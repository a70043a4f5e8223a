"""The SGLang that launch.python finds, known before a server starts."""

import json
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from eagle3.engine.command import LaunchSettings
from eagle3.errors import InputError

OLDEST = (0, 5, 17)  # whose flags and answers this project was written for
INSTALL = (
    "install it there (pip install 'sglang[all]>=0.5.17') or name an environment that has it: launch.python=PYTHON"
)
# Without importing sglang: that takes half a minute, and what is wrong with it the log of the start will say.
PROBE = """
import importlib.metadata, importlib.util, json
found = importlib.util.find_spec("sglang")
facts = {"folder": found and found.submodule_search_locations[0], "version": None, "devices": 0}
if found:
    facts["version"] = importlib.metadata.version("sglang")
    import torch
    facts["devices"] = torch.cuda.device_count()
print(json.dumps(facts))
"""


@dataclass(frozen=True)
class Installation:
    """SGLang as launch.python finds it; `devices` counts the GPUs that PyTorch sees there."""

    folder: Path
    version: str
    devices: int


def find_sglang(settings: LaunchSettings) -> Installation:
    """Ask launch.python for its SGLang; InputError unless it is there and new enough."""
    named = f"launch.python={settings.interpreter}"
    command = [settings.interpreter, "-c", PROBE]
    try:
        probe = subprocess.run(command, env=settings.environment, capture_output=True, text=True, check=False)
    except OSError as error:
        raise InputError(f"{named} cannot be run: {error.strerror}; name a Python interpreter") from None
    if probe.returncode:
        reason = (probe.stderr.strip() or f"exit status {probe.returncode}").splitlines()[-1]
        raise InputError(f"{named} has no working SGLang ({reason}); {INSTALL}")
    facts = json.loads(probe.stdout.splitlines()[-1])
    if facts["folder"] is None:
        raise InputError(f"{named} has no SGLang; {INSTALL}")
    if numbers(facts["version"]) < OLDEST:
        raise InputError(f"{named} has SGLang {facts['version']}, 0.5.17 is the oldest that will do; {INSTALL}")
    return Installation(Path(facts["folder"]), facts["version"], facts["devices"])


def numbers(version: str) -> tuple[int, ...]:
    """Turn 0.5.17.post1 into (0, 5, 17)."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def require_devices(installation: Installation, settings: LaunchSettings) -> None:
    """Raise InputError if there are fewer GPUs than launch.tp_size."""
    if installation.devices < settings.tp_size:
        raise InputError(
            f"launch.tp_size={settings.tp_size}: PyTorch of {settings.interpreter} sees {installation.devices} GPUs; "
            f"serve where they are, or set launch.tp_size and CUDA_VISIBLE_DEVICES"
        )
