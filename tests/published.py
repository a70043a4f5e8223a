"""What a folder of action=publish says, read without the code that wrote it."""

import json
import re
from pathlib import Path
from typing import Any

COLUMNS = ["head", "set", "K", "T", "hardware", "engine", "accept length", "speed-up"]
OF_TEXT = ("head", "set", "engine")


def measurements(folder: Path) -> list[list[str]]:
    """Return the cells of the card's table of measurements."""
    card = (folder / "README.md").read_text()
    table = card.partition("## Measurements")[2].partition("\n## ")[0]
    head, _, *rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line.startswith("|")
    ]
    assert head == COLUMNS
    return rows


def require_numbers_of_results(folder: Path) -> None:
    """Assert that the card has a line for each number of results.json, and no other."""
    results = json.loads((folder / "results.json").read_text())["results"]
    weights = json.loads((folder / "training.json").read_text())["files"]["model.safetensors"]
    expected = [number for result in results for number in numbers(result, weights)]
    found = [(*counts(row["set"]), *(row[key] for key in COLUMNS if key not in OF_TEXT)) for row in as_dicts(folder)]
    assert expected and sorted(found) == sorted(expected)


def as_dicts(folder: Path) -> list[dict[str, str]]:
    return [dict(zip(COLUMNS, row, strict=True)) for row in measurements(folder)]


def counts(text: str) -> tuple[str, str, str]:
    """Return source or prompt set, number of prompts or requests, and concurrency."""
    found = re.fullmatch(
        r"(\S+?)(?:: (.+?))?, (\d+) (?:prompts|requests)(?:, (\d+) at a time)?, at most \d+ tokens", text
    )
    assert found, text
    return (found[1] if found[4] else found[2] or "all"), found[3], found[4] or ""


def numbers(result: dict[str, Any], weights: str) -> list[tuple[str, ...]]:
    """Return `counts`, K, T, machine, accept length and speed-up of each measurement of a result."""
    if "rows" in result:
        [name] = [name for name, facts in result["heads"].items() if weights in facts["sha256"].values()]
        return [
            (
                row["source"], str(row["prompts"]), "", drafts(row["steps"], row["topk"], row["draft_tokens"]),
                row["sampling"], result["machine"], with_error(**row["accept_length"]), "-",
            )
            for row in result["rows"]
            if row["head"] == name
        ]  # fmt: skip
    server, temperature = result["server_info"]["head"], result["sampling"]["temperature"]
    shape = drafts(*(server[f"speculative_{key}"] for key in ("num_steps", "eagle_topk", "num_draft_tokens")))
    return [
        (
            cell["prompt_set"], str(cell["sides"]["head"]["requests"]), str(cell["concurrency"]), shape,
            f"T = {temperature:g}" if temperature else "greedy", result["machine"],
            f"{cell['sides']['head']['accept_length']:.3f}",
            "{value:.2f} [{low:.2f}, {high:.2f}]".format(**cell["speed_ups"]["head"]["tpot"]),
        )
        for cell in result["cells"]
    ]  # fmt: skip


def drafts(steps: int, topk: int, draft_tokens: int) -> str:
    return f"chain of {steps}" if topk == 1 else f"tree {steps}/{topk}/{draft_tokens}"


def with_error(value: float, standard_error: float | None, **_: Any) -> str:
    return f"{value:.3f}" + ("" if standard_error is None else f" ± {standard_error:.3f}")
