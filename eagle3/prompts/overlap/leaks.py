"""Prompts that overlap with benchmarks: 13 words in a row in common are a leak."""

import logging
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from eagle3.errors import InputError
from eagle3.prompts.checks import Verdict
from eagle3.prompts.overlap.words import grams, hash_words, words
from eagle3.prompts.reading.prompt import Prompt, Refused
from eagle3.prompts.reading.rows import read_prompt, read_prompts
from eagle3.prompts.reading.sources import Source, plain_source

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Benchmark:
    """A set of texts that no prompt may contain. `state`: names, sizes and versions of its files."""

    name: str
    state: list[list[Any]]
    texts: list[str]
    unread: int  # rows that could not be read
    answers: list[str] = field(default_factory=list)


def read_benchmarks(benchmarks: list[str | dict]) -> list[Benchmark]:
    """Return the benchmarks of prompts.decontamination."""
    found: list[Benchmark] = []
    for index, entry in enumerate(benchmarks):
        source = plain_source(f"prompts.decontamination.benchmarks[{index}]", entry, split="test")
        if source.name in [earlier.name for earlier in found]:
            raise InputError(f"{source.key}.name={source.name} is taken by an earlier one; give it another name")
        found.append(_benchmark(source))
    return found


def _answers(value: Any, source: Source) -> list[str]:
    """Return the solutions of a row: from its columns of answers, and the assistant's turns."""
    if not isinstance(value, dict):
        return []
    answered = read_prompt(value, source, keep_answers=True)
    turns = answered.messages if isinstance(answered, Prompt) else []
    in_turns = [message["content"] for message in turns if message["role"] == "assistant"]
    return list(dict.fromkeys([*source.shape.read(value).texts("answer"), *in_turns]))


def _benchmark(source: Source) -> Benchmark:
    read = [(found, _answers(row.value, source)) for row, found in read_prompts(source, keep_answers=False)]
    rows = [found for found, _ in read]
    prompts = [found for found in rows if isinstance(found, Prompt)]
    if not prompts:
        raise InputError(f"{source.key}.path={source.path} has no prompt that can be read; name a benchmark's file")
    unread = Counter(found.reason for found in rows if isinstance(found, Refused))
    if unread:
        reasons = ", ".join(f"{reason}: {number}" for reason, number in unread.most_common())
        log.warning(
            "%s.path=%s: %d of %d rows cannot be read as prompts (%s), and overlap with them is NOT looked for; "
            "write their questions as rows with prompt or turns",
            source.key, source.path, unread.total(), len(rows), reasons,
        )  # fmt: skip
    texts = [message["content"] for prompt in prompts for message in prompt.messages]
    answers = [answer for _, several in read for answer in several]
    return Benchmark(source.name, source.fingerprint(), texts, unread.total(), answers)


class Overlap:
    """The n-word runs of all benchmarks in ascending order, each with the first benchmark that has it."""

    def __init__(self, benchmarks: list[Benchmark], n: int):
        self.n = n
        runs = [
            np.unique(np.concatenate([grams(hash_words(words(text)), n) for text in (*each.texts, *each.answers)]))
            for each in benchmarks
        ]
        owners = np.concatenate([np.full(len(found), index) for index, found in enumerate(runs)])
        self.runs, first = np.unique(np.concatenate(runs), return_index=True)
        self.owners = owners[first].astype(np.int32)

    def owner(self, hashes: np.ndarray) -> int | None:
        """Return the first benchmark that shares a run with the text of these words."""
        found = grams(hashes, self.n)
        if not len(found) or not len(self.runs):
            return None
        places = np.minimum(np.searchsorted(self.runs, found), len(self.runs) - 1)
        shared = places[self.runs[places] == found]
        return int(self.owners[shared].min()) if len(shared) else None


class LeakCheck:
    """Refuses a prompt that shares a run of `dropped_words` words with a benchmark.

    A shorter question is a leak if a turn has exactly its words; a short answer is not: many prompts are "42". No run
    crosses the end of a turn.
    """

    name = "leaks"

    def __init__(self, benchmarks: list[Benchmark], dropped_words: int):
        self.names = [benchmark.name for benchmark in benchmarks]
        self.overlap = Overlap(benchmarks, dropped_words)
        self.whole = {
            tuple(found): index
            for index, benchmark in reversed(list(enumerate(benchmarks)))
            for text in benchmark.texts
            if 0 < len(found := words(text)) < dropped_words
        }

    def __call__(self, prompt: Prompt) -> Verdict:
        for message in prompt.messages:
            found = words(message["content"])
            is_long = len(found) >= self.overlap.n
            owner = self.overlap.owner(hash_words(found)) if is_long else self.whole.get(tuple(found))
            if owner is not None:
                return Verdict(reason=f"leak: {self.names[owner]}")
        return Verdict()
