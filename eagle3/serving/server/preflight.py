"""What is looked at before a server starts, because SGLang would find it minutes later or never."""

import ast
import json
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from eagle3.errors import InputError
from eagle3.serving.check.checks import run_checks
from eagle3.serving.check.finding import Finding, TargetFacts
from eagle3.serving.head.files import read_files
from eagle3.serving.server.command import LaunchSettings
from eagle3.target.facts import target_config
from eagle3.target.files import TargetFiles

OLDEST = (0, 5, 17)  # whose flags and answers this project was written for
INSTALL = (
    "install it there (pip install 'sglang[all]>=0.5.17') or name an environment that has it: launch.python=PYTHON"
)
CAPTURES = "set_eagle3_layers_to_capture"  # what SGLang calls on the target's model
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


def require_capture(installation: Installation, target: TargetFiles) -> None:
    """Raise InputError if SGLang's class for the target has no way to capture hidden states."""
    if captures(installation.folder / "srt" / "models", target.architecture) is False:
        raise InputError(
            f"target.path={target.path} is a {target.architecture}: SGLang {installation.version} cannot capture "
            f"hidden states from that class, so it serves no EAGLE-3 head for it; take another target or SGLang"
        )


def captures(models: Path, architecture: str | None) -> bool | None:
    """Say whether the class or one that it inherits from defines the capture; None where that cannot be told.

    Read, not imported: SGLang's models import CUDA kernels."""
    classes: dict[str, tuple[list[str], bool]] = {}  # name → its bases, whether it defines or delegates the capture
    for path in models.glob("*.py"):
        try:
            module = ast.parse(path.read_bytes())
        except SyntaxError:  # of a newer Python than ours
            return None
        for node in module.body:
            if isinstance(node, ast.ClassDef):
                methods = {part.name for part in node.body if isinstance(part, ast.FunctionDef)}
                bases = [ast.unparse(base).split(".")[-1] for base in node.bases]
                classes[node.name] = bases, not methods.isdisjoint((CAPTURES, "__getattr__"))

    def inherits(name: str) -> bool:
        bases, defined = classes.get(name, ([], False))
        return defined or any(inherits(base) for base in bases if base != name)

    return inherits(architecture) if architecture in classes else None


def check_files(head: str, target: TargetFiles) -> list[Finding]:
    """Run the checks that need neither decoding nor the target's weights."""
    facts = TargetFacts(
        config=target_config(target.text_config, target.text_config.vocab_size, target.checkpoint_dtype),
        architecture=None,  # require_capture asks the installation
        dtype=target.checkpoint_dtype,
        identity=None,
        embedding=None,
    )
    return run_checks(read_files(head), facts)
