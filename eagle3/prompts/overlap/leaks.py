"""Prompts that overlap with benchmarks: runs of 13 words in common are a leak, of 8 words are reported."""

import logging
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np

from eagle3.errors import InputError
from eagle3.prompts.checks import Verdict
from eagle3.prompts.overlap.words import grams, hash_words, words
from eagle3.prompts.reading.conversation import Refused
from eagle3.prompts.reading.prompt import Prompt
from eagle3.prompts.reading.rows import read_prompts
from eagle3.prompts.reading.sources import Source, plain_source

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Benchmark:
    """A set of texts that no prompt may hold. `state`: its files' names, sizes and versions."""

    name: str
    state: list[list[Any]]
    texts: list[str]
    unread: int  # rows, of which no text is here


def read_benchmarks(entries: list[str | dict]) -> list[Benchmark]:
    """Return the benchmarks in prompts.leaks.benchmarks, whose user and system turns count."""
    if not isinstance(entries, list):
        key = "prompts.leaks.benchmarks"
        raise InputError(f"{key}={entries} is not a list; write {key}=[{entries or ''}]")
    found: list[Benchmark] = []
    for index, entry in enumerate(entries):
        source = plain_source(f"prompts.leaks.benchmarks[{index}]", entry, split="test")
        if source.name in [earlier.name for earlier in found]:
            raise InputError(f"{source.key}.name={source.name} is taken by an earlier one; give it another name")
        found.append(_benchmark(source))
    return found


def _benchmark(source: Source) -> Benchmark:
    rows = [found for _, found in read_prompts(source, keep_answers=False)]
    prompts = [found for found in rows if isinstance(found, Prompt)]
    if not prompts:
        raise InputError(f"{source.key}.path={source.path} holds no prompt that can be read; name a benchmark's file")
    unread = Counter(found.reason for found in rows if isinstance(found, Refused))
    if unread:
        reasons = ", ".join(f"{reason}: {number}" for reason, number in unread.most_common())
        log.warning(
            "%s.path=%s: %d of %d rows cannot be read as prompts (%s), and overlap with them is NOT looked for; "
            "write their questions as rows with prompt or turns",
            source.key, source.path, unread.total(), len(rows), reasons,
        )  # fmt: skip
    texts = [message["content"] for prompt in prompts for message in prompt.messages]
    return Benchmark(source.name, source.fingerprint(), texts, unread.total())


class Overlap:
    """The n-word runs of all benchmarks, ascending, each with the first benchmark that has it."""

    def __init__(self, benchmarks: list[Benchmark], n: int):
        self.n = n
        runs = [np.unique(np.concatenate([grams(hash_words(words(text)), n) for text in benchmark.texts]))
                for benchmark in benchmarks]  # fmt: skip
        owners = np.concatenate([np.full(len(found), index) for index, found in enumerate(runs)])
        self.runs, first = np.unique(np.concatenate(runs), return_index=True)
        self.owners = owners[first].astype(np.int32)

    def owner(self, hashes: np.ndarray) -> int | None:
        """Return the first benchmark, in their order, that shares a run with the text of these words."""
        found = grams(hashes, self.n)
        if not len(found) or not len(self.runs):
            return None
        places = np.minimum(np.searchsorted(self.runs, found), len(self.runs) - 1)
        shared = places[self.runs[places] == found]
        return int(self.owners[shared].min()) if len(shared) else None


class LeakCheck:
    """Refuses a prompt that shares a long run of words with a benchmark, counts one that shares a short run.

    A benchmark's text that is shorter than the long run leaks when a turn has exactly its words. No run crosses the end
    of a turn.
    """

    name = "leaks"

    def __init__(self, benchmarks: list[Benchmark], *, dropped_words: int, reported_words: int):
        self.names = [benchmark.name for benchmark in benchmarks]
        self.long = Overlap(benchmarks, dropped_words)
        self.short = Overlap(benchmarks, reported_words)
        self.whole = {
            tuple(found): index
            for index, benchmark in reversed(list(enumerate(benchmarks)))
            for text in benchmark.texts
            if 0 < len(found := words(text)) < dropped_words
        }

    def __call__(self, prompt: Prompt) -> Verdict:
        reported = None
        for message in prompt.messages:
            found = words(message["content"])
            hashes = hash_words(found)
            owner = self.long.owner(hashes) if len(found) >= self.long.n else self.whole.get(tuple(found))
            if owner is not None:
                return Verdict(reason=f"leak: {self.names[owner]}")
            if reported is None:
                reported = self.short.owner(hashes)
        return Verdict(counts={} if reported is None else Counter([self.names[reported]]))
