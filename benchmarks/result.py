"""Where a result comes from: every file in benchmarks/results says commit, command, machine and versions.

tests/test_numbers.py looks for the four, and holds the numbers of the pages against these files.
"""

import os
import platform
import shlex
import sys
from pathlib import Path
from typing import Any

from eagle3 import cli
from eagle3.storage import write_json

ROOT = Path(__file__).parent.parent
FACTS = ("commit", "command", "machine", "versions")


def write_result(path: Path, values: dict[str, Any], arguments: list[str] | None = None) -> dict[str, Any]:
    """Write `values` behind the four facts, and return both together.

    `arguments` are those of a script whose main was called with them; by default the command line's.
    """
    result = facts(arguments) | values
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, result)
    return result


def facts(arguments: list[str] | None = None) -> dict[str, Any]:
    versions = cli.provenance()
    return {
        "commit": versions.pop("git_revision"),
        "command": command(sys.argv[1:] if arguments is None else arguments),
        "machine": machine(),
        "versions": versions,
    }


def command(arguments: list[str]) -> str:
    """To paste in the repository's root: its own files are named from there."""
    script = Path(sys.argv[0]).resolve()
    words = [str(script), *arguments]
    return shlex.join(["python", *(word.replace(f"{ROOT.resolve()}/", "") for word in words)])


def machine() -> str:
    import torch  # hundreds of MB, which benchmarks/prompts.py measures in processes that import this file

    gpus = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    counted = [f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus)]
    return ", ".join([*counted, f"{os.cpu_count()} {platform.machine()} cores"])
