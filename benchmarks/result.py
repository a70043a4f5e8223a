"""What benchmarks share: commands and configs of this clone, and results that say where they come from.

Every file in benchmarks/results has date, commit, command, machine and versions; tests/test_numbers.py checks that.
"""

import json
import subprocess
import sys
import time
from contextlib import nullcontext
from datetime import date
from pathlib import Path
from typing import Any

from eagle3.provenance import result_facts
from eagle3.storage.files import write_json

ROOT = Path(__file__).parent.parent
FACTS = ("date", "commit", "command", "machine", "versions")


def call(*command: str, log: Path | None = None) -> float:
    """Run a script of this clone and return its seconds; if it fails, this process ends with its status."""
    print("\n$ python", *command, flush=True)
    started = time.perf_counter()
    with log.open("wb") if log else nullcontext() as file:
        done = subprocess.run([sys.executable, *command], cwd=ROOT, stdout=file, stderr=file)
    if done.returncode:
        print(f"failed, see {log}" if log else "failed", flush=True)
        sys.exit(done.returncode)
    return time.perf_counter() - started


def as_override(value: Any) -> str:
    """Write a value as Hydra's command line takes it."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}: {as_override(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return f"[{', '.join(map(as_override, value))}]"
    return json.dumps(value)


def write_result(path: Path, values: dict[str, Any], arguments: list[str] | None = None) -> dict[str, Any]:
    """Write `values` after the five facts, and return both together.

    `arguments` are those of a script whose main was called with them; by default the command line's.
    """
    result = {"date": date.today().isoformat()} | result_facts(arguments) | values
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, result)
    return result
