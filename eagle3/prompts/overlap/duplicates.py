"""Which prompts repeat an earlier one: exactly, by id, or nearly. Memory does not grow with N, the number of prompts.

Near duplicates share a band of their MinHash signatures (signatures.py) and have Jaccard similarity of their shingles
of at least the threshold, computed exactly. A prompt is dropped when it repeats an earlier one that is kept. Prompts
written to one template share bands by the thousand: each is compared with a limited number. B: bands.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from enum import IntEnum
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from eagle3.prompts.overlap.words import compared_text, jaccard, shingles
from eagle3.prompts.spool import Column, Scanned, on_disk

PART = 1 << 18  # prompts that are sorted or looked through at a time: some 15 MB
SHOWN = 20_000  # candidates from which on there is a progress bar
REMEMBERED = 4096  # sets of shingles kept in memory while prompts are compared


class Fate(IntEnum):
    """What becomes of a prompt that passed the checks."""

    KEPT = 0
    EXACT = 1
    ID = 2
    NEAR = 3
    SOURCE_LIMIT = 4
    MIX = 5
    LIMIT = 6


class Choice(NamedTuple):
    """What becomes of each prompt, and of duplicates the prompt that they repeat. [N] each."""

    fate: np.ndarray  # uint8, a Fate
    repeats: np.ndarray  # int32


class Duplicates:
    """What conf/prompts says about duplicates. All methods work on the numbers of the prompts in `scanned`."""

    def __init__(self, *, exact: bool, near: bool, threshold: float, shingle_words: int, comparisons: int):
        self.exact = exact
        self.near = near
        self.threshold = threshold
        self.shingle_words = shingle_words
        self.comparisons = comparisons

    def find(self, scanned: Scanned, chosen: np.ndarray, folder: Path) -> Choice:
        """Find duplicates among the chosen, [N] bool; `folder` takes what is large.

        The others count as past their source's limit."""
        choice = Choice(
            np.where(chosen, np.uint8(Fate.KEPT), np.uint8(Fate.SOURCE_LIMIT)),
            on_disk(folder / "repeats", (len(scanned),), np.int32),
        )
        if self.exact:
            [texts] = scanned.columns(folder, "text")
            mark_equal(texts.values(), choice, Fate.EXACT)
        [ids] = scanned.columns(folder, "id")
        mark_equal(ids.values(), choice, Fate.ID)  # ids have to be unique, whatever the settings
        if self.near:
            chosen, bands = choice.fate == Fate.KEPT, scanned.columns(folder, "bands")
            near = NearDuplicates(folder, bands, chosen, comparisons=self.comparisons)
            near.drop(choice, similar(lambda number: self._shingles(scanned, number), self.threshold))
        return choice

    def _shingles(self, scanned: Scanned, number: int) -> np.ndarray:
        return shingles(compared_text(scanned.prompt(number)["messages"]), self.shingle_words)


def mark_equal(keys: np.ndarray, choice: Choice, fate: Fate) -> None:
    """Give `fate` to each kept prompt whose key an earlier kept one has. Keys: [N] uint64."""
    for members, heads in equal_runs(keys, choice.fate == Fate.KEPT):
        later = members != heads
        choice.fate[members[later]] = fate
        choice.repeats[members[later]] = heads[later]


def equal_runs(keys: np.ndarray, chosen: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the chosen numbers whose key occurs more than once, each with the lowest number that has the same key.

    Keys are hashes, so that their range cut into equal parts cuts them into parts of about equal size.
    """
    parts = max(1, -(-len(keys) // PART))
    for part in range(parts):
        numbers = _in_part(keys, chosen, part, parts)
        order = np.argsort(keys[numbers], kind="stable")
        numbers, ordered = numbers[order], keys[numbers[order]]
        begins = np.ones(len(numbers), dtype=bool)
        begins[1:] = ordered[1:] != ordered[:-1]
        run = np.cumsum(begins) - 1
        repeated = np.bincount(run, minlength=1)[run] > 1
        yield numbers[repeated], numbers[begins][run][repeated]


def _in_part(keys: np.ndarray, chosen: np.ndarray, part: int, parts: int) -> np.ndarray:
    width = (1 << 64) // parts + 1
    low, high = np.uint64(part * width), np.uint64(min((part + 1) * width, (1 << 64)) - 1)
    found = []
    for start in range(0, len(keys), PART):
        block = keys[start : start + PART]
        inside = chosen[start : start + PART] & (block >= low) & (block <= high)
        found.append(np.flatnonzero(inside) + start)
    return np.concatenate(found) if found else np.zeros(0, dtype=np.int64)


class NearDuplicates:
    """The pass over the prompts in their order, each compared with the kept ones that share a band with it.

    C candidates: the chosen prompts that share a band with another; `numbers` [C] says which they are. The kept ones of
    a run (equal keys of one band) form a chain: `latest` of the run's head, then `previous` of each. All three arrays
    are [B, C] int32 on disk and hold places among the candidates plus 1, so that 0 is none.
    """

    def __init__(self, folder: Path, bands: list[Column], chosen: np.ndarray, *, comparisons: int):
        self.comparisons = comparisons
        is_candidate = np.zeros(len(chosen), dtype=bool)
        for band, keys in enumerate(bands):
            with _runs_file(folder, band).open("wb") as file:
                for members, heads in equal_runs(keys.values(), chosen):
                    file.write(np.stack([members, heads], axis=1).astype(np.int32).tobytes())
                    is_candidate[members] = True
        self.numbers = np.flatnonzero(is_candidate).astype(np.int32)
        self.heads, self.latest, self.previous = (
            on_disk(folder / name, (len(bands), len(self.numbers)), np.int32)
            for name in ("heads", "latest", "previous")
        )
        for band in range(len(bands)):
            members, heads = np.fromfile(_runs_file(folder, band), dtype=np.int32).reshape(-1, 2).T
            self.heads[band, self._place(members)] = self._place(heads) + 1

    def _place(self, numbers: np.ndarray) -> np.ndarray:
        return np.searchsorted(self.numbers, numbers)

    def drop(self, choice: Choice, are_similar: Callable[[int, int], bool]) -> None:
        """Give every candidate that is similar to an earlier kept one its fate."""
        progress = tqdm(self.numbers, desc="near duplicates", unit=" prompts", disable=len(self.numbers) < SHOWN)
        for place, number in enumerate(map(int, progress)):
            kept = (int(self.numbers[other]) for other in self._kept_before(place))
            found = next((other for other in kept if are_similar(number, other)), None)
            if found is None:
                self._keep(place)
            else:
                choice.fate[number] = Fate.NEAR
                choice.repeats[number] = found

    def _kept_before(self, place: int) -> list[int]:
        """Return the places to compare with, those that share the most bands first."""
        shared: Counter[int] = Counter()
        for band in np.flatnonzero(self.heads[:, place]).tolist():
            other = int(self.latest[band, self.heads[band, place] - 1])
            for _ in range(self.comparisons):
                if not other:
                    break
                shared[other - 1] += 1
                other = int(self.previous[band, other - 1])
        return [other for other, _ in shared.most_common(self.comparisons)]

    def _keep(self, place: int) -> None:
        for band in np.flatnonzero(self.heads[:, place]).tolist():
            head = self.heads[band, place] - 1
            self.previous[band, place] = self.latest[band, head]
            self.latest[band, head] = place + 1


def _runs_file(folder: Path, band: int) -> Path:
    return folder / f"runs.{band}"


def similar(shingles_of: Callable[[int], np.ndarray], threshold: float) -> Callable[[int, int], bool]:
    """Tell whether two prompts are near duplicates, by the exact Jaccard similarity of their shingles."""
    remembered = lru_cache(maxsize=REMEMBERED)(shingles_of)

    def compare(number: int, other: int) -> bool:
        one, two = remembered(number), remembered(other)
        small, large = sorted((len(one), len(two)))
        return small >= threshold * large and jaccard(one, two) >= threshold

    return compare
