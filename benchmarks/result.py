"""Where a result comes from: every file in benchmarks/results says date, commit, command, machine and versions.

tests/test_numbers.py checks that the five are there.
"""

from datetime import date
from pathlib import Path
from typing import Any

from eagle3 import cli
from eagle3.storage.files import write_json

FACTS = ("date", "commit", "command", "machine", "versions")


def write_result(path: Path, values: dict[str, Any], arguments: list[str] | None = None) -> dict[str, Any]:
    """Write `values` after the five facts, and return both together.

    `arguments` are those of a script whose main was called with them; by default the command line's.
    """
    result = {"date": date.today().isoformat()} | cli.result_facts(arguments) | values
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, result)
    return result
