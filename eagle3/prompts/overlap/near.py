"""Near duplicates: each prompt is compared with earlier kept ones that share a band of its MinHash signature.

C candidates: the chosen prompts that share a band with another; `numbers` [C] says which they are, and a candidate's
place is its place in there. B bands. A run: the candidates with the same key of one band. `earlier` [C, B] leads to the
one before in the run, as its place plus 1; 0 is none. Both are on disk, where every process sees them. `dropped` [C].

Candidates are compared in rounds. Workers compare each with kept ones of the rounds before, and with earlier ones of
its own round, of which nobody knows yet whether they are kept. Then the round is decided in order, and its `earlier` is
made to lead to kept ones alone. The result is the same for any number of workers.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from functools import cached_property, lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from eagle3.prompts.overlap.runs import PART, equal_runs
from eagle3.prompts.overlap.words import compared_text, jaccard, shingles
from eagle3.prompts.pool import OrderedPool, in_threads
from eagle3.prompts.spool import Column, Scanned

ROUND = 8192  # candidates
TASK = 256  # of them, for a worker at a time
FEW = 100_000  # candidates that one process compares before others have started
REMEMBERED = 4096  # sets of shingles in the memory of a process


class NearRules(NamedTuple):
    """threshold: of the Jaccard similarity, computed exactly; comparisons: kept ones, and ones of its own round, that a
    prompt is compared with at most, those that share most bands first: templates share them by the thousand."""

    threshold: float
    shingle_words: int
    comparisons: int


class Candidates(NamedTuple):
    numbers: Column
    earlier: Column


class Task(NamedTuple):
    """Some candidates of a round: their places from `start`."""

    round: int  # its first place
    start: int
    kept: np.ndarray  # [candidates, B] the last kept one of each run before the round, as its place plus 1; 0 is none


class Found(NamedTuple):
    """What is similar to candidates, by place: a kept one, or else all earlier ones of the round."""

    kept: dict[int, int]
    undecided: dict[int, list[int]]


def near_duplicates(
    scanned: Scanned, chosen: np.ndarray, bands: list[Column], rules: NearRules, folder: Path, *, processes: int
) -> Iterator[tuple[int, int]]:
    """Yield the number of each of the chosen, [N] bool, that repeats an earlier kept one, and that one's number."""
    candidates = find_candidates(folder, bands, chosen, threads=processes)
    numbers, earlier = candidates.numbers.values(), candidates.earlier.values(writable=True)
    count = len(numbers)
    dropped = np.zeros(count, dtype=bool)
    with OrderedPool(Comparer(scanned, candidates, rules), processes if count >= FEW else 1) as workers:
        progress = tqdm(range(0, count, ROUND), desc="near duplicates", unit=" rounds", disable=count < FEW)
        for first in progress:
            for place, other in _round(earlier, dropped, workers, first):
                yield int(numbers[place]), int(numbers[other])


def find_candidates(folder: Path, bands: list[Column], chosen: np.ndarray, *, threads: int) -> Candidates:
    files = [folder / f"runs.{band}" for band in range(len(bands))]
    is_candidate = np.zeros(len(chosen), dtype=bool)

    def find_runs(band: int) -> None:
        with files[band].open("wb") as file:
            for members, heads in equal_runs(bands[band].values(), chosen):
                before = np.where(members != heads, np.roll(members, 1), -1)
                file.write(np.stack([members, before], axis=1).astype(np.int32).tobytes())
                is_candidate[members] = True

    in_threads(find_runs, range(len(bands)), threads)
    count = int(is_candidate.sum())
    candidates = Candidates(
        Column(folder / "numbers", np.dtype(np.int32), (count,)),
        Column(folder / "earlier", np.dtype(np.int32), (count, len(bands))),
    )
    numbers, earlier = candidates.numbers.zeros(), candidates.earlier.zeros()
    numbers[:] = np.flatnonzero(is_candidate)

    def link(band: int) -> None:
        pairs = Column(files[band], np.dtype(np.int32), (files[band].stat().st_size // 8, 2)).values()
        for start in range(0, len(pairs), PART):
            members, before = np.array(pairs[start : start + PART]).T
            places = np.searchsorted(numbers, before) + 1
            earlier[np.searchsorted(numbers, members), band] = np.where(before >= 0, places, 0)
        files[band].unlink()

    in_threads(link, range(len(bands)), threads)
    return candidates


def _round(
    earlier: np.ndarray, dropped: np.ndarray, workers: OrderedPool[Task, Found], first: int
) -> Iterator[tuple[int, int]]:
    """Decide the round that begins at the place `first`; yield who is dropped, and for whom."""
    links = np.array(earlier[first : first + ROUND])
    kept = _before_round(links, first, dropped, earlier)
    tasks = (Task(first, first + start, kept[start : start + TASK]) for start in range(0, len(links), TASK))
    for task, found in workers(tasks):
        for place in range(task.start, task.start + len(task.kept)):
            other = found.kept.get(place)
            if other is None:
                other = next((one for one in found.undecided.get(place, ()) if not dropped[one]), None)
            if other is not None:
                dropped[place] = True
                yield place, other
    earlier[first : first + ROUND] = _to_kept(links, kept, first, dropped)


def _before_round(links: np.ndarray, first: int, dropped: np.ndarray, earlier: np.ndarray) -> np.ndarray:
    """Follow the links [R, B] of a round until they leave it and lead to a kept one, or to none."""
    kept = links.copy()
    while len((inside := np.nonzero(kept > first))[0]):
        rows, bands = inside
        kept[rows, bands] = kept[kept[rows, bands] - 1 - first, bands]
    rows, bands = np.nonzero((kept > 0) & dropped[kept - 1])
    kept[rows, bands] = earlier[kept[rows, bands] - 1, bands]  # which leads to a kept one since its round was decided
    return kept


def _to_kept(links: np.ndarray, kept: np.ndarray, first: int, dropped: np.ndarray) -> np.ndarray:
    """Follow the links of a decided round past the dropped ones; `kept`: where they lead to before it."""
    links = np.where(links > first, links, kept)
    while len((past := np.nonzero((links > first) & dropped[links - 1]))[0]):
        rows, bands = past
        links[rows, bands] = links[links[rows, bands] - 1 - first, bands]
    return links


class Comparer:
    """Compares the candidates of a task; sent to every worker once."""

    def __init__(self, scanned: Scanned, candidates: Candidates, rules: NearRules):
        self.scanned = scanned
        self.candidates = candidates
        self.rules = rules

    def __getstate__(self) -> dict:
        return {name: self.__dict__[name] for name in ("scanned", "candidates", "rules")}

    @cached_property
    def numbers(self) -> np.ndarray:
        return self.candidates.numbers.values()

    @cached_property
    def earlier(self) -> np.ndarray:
        return self.candidates.earlier.values()

    def __call__(self, task: Task) -> Found:
        found = Found({}, {})
        for place, kept in enumerate(task.kept.tolist(), task.start):
            similar = (other for other in self._kept(kept) if self._similar(place, other))
            if (one := next(similar, None)) is not None:
                found.kept[place] = one
            elif others := [other for other in self._undecided(place, task.round) if self._similar(place, other)]:
                found.undecided[place] = others
        return found

    def _kept(self, links: list[int]) -> list[int]:
        """Return the kept ones to compare with, those that share the most bands first."""
        shared: Counter[int] = Counter()
        for band, link in enumerate(links):
            for _ in range(self.rules.comparisons):
                if not link:
                    break
                shared[link - 1] += 1
                link = int(self.earlier[link - 1, band])
        return [other for other, _ in shared.most_common(self.rules.comparisons)]

    def _undecided(self, place: int, first: int) -> list[int]:
        shared: Counter[int] = Counter()
        for band, link in enumerate(self.earlier[place].tolist()):
            for _ in range(self.rules.comparisons):
                if link <= first:
                    break
                shared[link - 1] += 1
                link = int(self.earlier[link - 1, band])
        return [other for other, _ in shared.most_common(self.rules.comparisons)]

    def _similar(self, place: int, other: int) -> bool:
        one, two = self._shingles(place), self._shingles(other)
        small, large = sorted((len(one), len(two)))
        return small >= self.rules.threshold * large and jaccard(one, two) >= self.rules.threshold

    @cached_property
    def _shingles(self) -> Callable[[int], np.ndarray]:
        def of_place(place: int) -> np.ndarray:
            text = compared_text(self.scanned.prompt(int(self.numbers[place]))["messages"])
            return shingles(text, self.rules.shingle_words)

        return lru_cache(maxsize=REMEMBERED)(of_place)
