"""Which prompts have equal keys: sorted in parts, so that memory does not grow with N, the number of prompts."""

from collections.abc import Iterator

import numpy as np

PART = 1 << 18  # prompts that are sorted or looked through at a time: some 15 MB


def parts_of(keys: np.ndarray) -> int:
    """Return into how many parts keys are cut. They are hashes: equal parts of their range hold about as many each."""
    return max(1, -(-len(keys) // PART))


def equal_runs(keys: np.ndarray, chosen: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield what equal_in_part does of every part."""
    for part in range(parts_of(keys)):
        yield equal_in_part(keys, chosen, part)


def equal_in_part(keys: np.ndarray, chosen: np.ndarray, part: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the chosen numbers whose key occurs more than once, each with the lowest number that has the same key.

    Those of one key stand together, ascending. Keys: [N] uint64."""
    numbers = _in_part(keys, chosen, part, parts_of(keys))
    order = np.argsort(keys[numbers], kind="stable")
    numbers, ordered = numbers[order], keys[numbers[order]]
    begins = np.ones(len(numbers), dtype=bool)
    begins[1:] = ordered[1:] != ordered[:-1]
    run = np.cumsum(begins) - 1
    repeated = np.bincount(run, minlength=1)[run] > 1
    return numbers[repeated], numbers[begins][run][repeated]


def _in_part(keys: np.ndarray, chosen: np.ndarray, part: int, parts: int) -> np.ndarray:
    width = (1 << 64) // parts + 1
    low, high = np.uint64(part * width), np.uint64(min((part + 1) * width, (1 << 64)) - 1)
    found = []
    for start in range(0, len(keys), PART):
        block = keys[start : start + PART]
        inside = chosen[start : start + PART] & (block >= low) & (block <= high)
        found.append(np.flatnonzero(inside) + start)
    return np.concatenate(found) if found else np.zeros(0, dtype=np.int64)
