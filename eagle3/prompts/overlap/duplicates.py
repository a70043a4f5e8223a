"""Which prompts repeat an earlier one that is kept: exactly, by id, or nearly. Memory does not grow with their number.

N prompts.
"""

from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

import numpy as np

from eagle3.prompts.overlap.near import NearRules, near_duplicates
from eagle3.prompts.overlap.runs import equal_in_part, parts_of
from eagle3.prompts.pool import in_threads
from eagle3.prompts.spool import Column, Scanned


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
        self.near = NearRules(threshold, shingle_words, comparisons) if near else None

    def find(self, scanned: Scanned, chosen: np.ndarray, folder: Path, *, processes: int) -> Choice:
        """Find duplicates among the chosen, [N] bool; `folder` takes what is large.

        The others count as past their source's limit."""
        repeats = Column(folder / "repeats", np.dtype(np.int32), (len(scanned),)).zeros()
        choice = Choice(np.where(chosen, np.uint8(Fate.KEPT), np.uint8(Fate.SOURCE_LIMIT)), repeats)
        if self.exact:
            [texts] = scanned.columns(folder, "text", threads=processes)
            mark_equal(texts.values(), choice, Fate.EXACT, threads=processes)
        [ids] = scanned.columns(folder, "id", threads=processes)
        mark_equal(ids.values(), choice, Fate.ID, threads=processes)  # ids have to be unique, whatever the settings
        if self.near is not None:
            chosen, bands = choice.fate == Fate.KEPT, scanned.columns(folder, "bands", threads=processes)
            for number, other in near_duplicates(scanned, chosen, bands, self.near, folder, processes=processes):
                choice.fate[number] = Fate.NEAR
                choice.repeats[number] = other
        return choice


def mark_equal(keys: np.ndarray, choice: Choice, fate: Fate, *, threads: int) -> None:
    """Give `fate` to each kept prompt whose key an earlier kept one has. Keys: [N] uint64."""
    kept = choice.fate == Fate.KEPT

    def mark(part: int) -> None:
        members, heads = equal_in_part(keys, kept, part)
        later = members != heads
        choice.fate[members[later]] = fate
        choice.repeats[members[later]] = heads[later]

    in_threads(mark, range(parts_of(keys)), threads)
