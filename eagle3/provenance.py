"""Facts that a result must state to be made again: commit, command, machine and versions."""

import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from eagle3 import ROOT, __version__
from eagle3.secrets import public


def provenance() -> dict[str, str]:
    return {
        "git_revision": git_revision() or f"v{__version__}",
        **{package: version(package) for package in ("torch", "lightning", "transformers")},
        "python": sys.version.split()[0],
    }


def result_facts(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Return what a result must say to be made again: commit, command, machine and versions.

    `arguments` are those of a script whose main was called with them, by default the command line's. Servers that run
    already may run on another machine.
    """
    versions = provenance()
    words = [str(Path(sys.argv[0]).resolve()), *(sys.argv[1:] if arguments is None else arguments)]
    return {
        "commit": versions.pop("git_revision"),
        # to paste in the repository's root: its own files are named from there
        "command": shlex.join(["python", *(public(word.replace(f"{ROOT}/", "")) for word in words)]),
        "machine": machine(),
        "versions": versions,
    }


def machine() -> str:
    """GPUs and cores of this machine; nvidia-smi counts GPUs without taking memory on them."""
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        gpus = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        gpus = []
    counted = [f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus)]
    return ", ".join([*counted, f"{os.cpu_count()} {platform.machine()} cores"])


def git_revision() -> str:
    """Empty outside a clone of ours, and on a machine without git."""
    if not (ROOT / ".git").exists():  # the repository around an installed package is somebody else's
        return ""
    command = ["git", "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent).stdout.strip()
    except OSError:
        return ""
