"""What a folder of action=publish says, read without the code that wrote it."""

import json
from pathlib import Path
from typing import Any

COLUMNS = ["head", "set", "K", "T", "hardware", "engine", "accept length", "speed-up"]


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
    found = {(each["T"], each["accept length"], each["speed-up"], each["hardware"]) for each in as_dicts(folder)}
    expected = [number for result in results for number in numbers(result, weights)]
    assert expected and found == set(expected)
    assert len(measurements(folder)) == len(expected)


def as_dicts(folder: Path) -> list[dict[str, str]]:
    return [dict(zip(COLUMNS, row, strict=True)) for row in measurements(folder)]


def numbers(result: dict[str, Any], weights: str) -> list[tuple[str, ...]]:
    """Return sampling, accept length, speed-up and machine of each measurement of a result."""
    if "rows" in result:
        [name] = [name for name, facts in result["heads"].items() if weights in facts["sha256"].values()]
        lengths = [(row["sampling"], row["accept_length"]) for row in result["rows"] if row["head"] == name]
        return [
            (sampling, f"{length['value']:.3f} ± {length['standard_error']:.3f}", "-", result["machine"])
            for sampling, length in lengths
        ]
    sampling = result["sampling"]["temperature"] and f"T = {result['sampling']['temperature']:g}"
    return [
        (
            sampling or "greedy",
            f"{cell['sides']['head']['accept_length']:.3f}",
            "{value:.2f} [{low:.2f}, {high:.2f}]".format(**cell["speed_ups"]["head"]["tpot"]),
            result["machine"],
        )
        for cell in result["cells"]
    ]
