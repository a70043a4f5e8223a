"""Prompts that overlap with benchmarks: 13 words in a row in common, or a whole question, are a leak."""

import logging
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from eagle3.errors import InputError
from eagle3.prompts.overlap.duplicates import text_hash
from eagle3.prompts.overlap.words import Owners, Units, words
from eagle3.prompts.reading.prompt import Prompt, Refused, Verdict
from eagle3.prompts.reading.rows import read_prompt, read_prompts
from eagle3.prompts.reading.sources import Source, require_unique_names, source_at

log = logging.getLogger(__name__)

CONTAINED = 8  # words from which a whole question inside of a turn is no coincidence


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
    sources = [
        source_at(f"prompts.decontamination.benchmarks[{index}]", entry, split="test")
        for index, entry in enumerate(benchmarks)
    ]
    require_unique_names(sources)
    return [_benchmark(source) for source in sources]


def _answers(row: object, source: Source) -> list[str]:
    """Return the solutions of a row: from its columns of answers, and the assistant's turns."""
    if not isinstance(row, dict):
        return []
    answered = read_prompt(row, source, keep_answers=True)
    turns = answered.messages if isinstance(answered, Prompt) else []
    in_turns = [message["content"] for message in turns if message["role"] == "assistant"]
    return list(dict.fromkeys([*source.shape.read(row).texts("answer"), *in_turns]))


def _benchmark(source: Source) -> Benchmark:
    rows = list(read_prompts(source))
    read = [(found, _answers(row, source)) for row, found in rows]
    prompts = [found for found, _ in read if isinstance(found, Prompt)]
    if not prompts:
        raise InputError(f"{source.key}.path={source.path} has no prompt that can be read; name a benchmark's file")
    unread = Counter(found.reason for found, _ in read if isinstance(found, Refused))
    if unread:
        reasons = ", ".join(f"{reason}: {number}" for reason, number in unread.most_common())
        log.warning(
            "%s.path=%s: %d of %d rows cannot be read as prompts (%s), and overlap with them is NOT looked for; "
            "write their questions as rows with prompt or turns",
            source.key, source.path, unread.total(), len(read), reasons,
        )  # fmt: skip
    texts = [message["content"] for prompt in prompts for message in prompt.messages]
    # Also the question without its options, which prompts may leave out or put otherwise.
    questions = [source.shape.read(row).first("prompt") for row, _ in rows if isinstance(row, dict)]
    texts = list(dict.fromkeys([*texts, *(question for question in questions if isinstance(question, str))]))
    answers = [answer for _, several in read for answer in several]
    return Benchmark(source.name, source.fingerprint(), texts, unread.total(), answers)


class LeakCheck:
    """Refuses a prompt that shares a run of `dropped_words` words with a benchmark.

    A shorter question is a leak if a turn contains all of it, or, below CONTAINED words, if a turn repeats it exactly;
    a short answer is not: many prompts are "42". No run crosses the end of a turn.
    """

    name = "leaks"

    def __init__(self, benchmarks: list[Benchmark], dropped_words: int):
        self.names = [benchmark.name for benchmark in benchmarks]
        self.dropped_words = dropped_words
        self.lengths: set[int] = set()  # in units, of the shorter questions that a turn may contain
        self.leaks = Owners([np.concatenate([*map(self._question, each.texts), *map(self._runs, each.answers)])
                             for each in benchmarks])  # fmt: skip

    def _question(self, text: str) -> np.ndarray:
        """Return the hashes that a turn with this question has."""
        units = Units(words(text))
        if units.has(self.dropped_words):
            return units.runs(self.dropped_words)
        if units.has(CONTAINED):
            self.lengths.add(len(units))
            return units.runs_of_units(len(units))
        return np.array([text_hash(text)] if len(units) else [], dtype=np.uint64)

    def _runs(self, text: str) -> np.ndarray:
        return Units(words(text)).runs(self.dropped_words)

    def __call__(self, prompt: Prompt) -> Verdict:
        for message in prompt.messages:
            units = Units(words(message["content"]))
            parts = [units.runs_of_units(length) for length in self.lengths]
            owner = self.leaks.first(np.concatenate([units.runs(self.dropped_words), *parts]))
            if owner is None and not units.has(CONTAINED):
                owner = self.leaks.first(np.array([text_hash(message["content"])], dtype=np.uint64))
            if owner is not None:
                return Verdict(reason=f"leak: {self.names[owner]}")
        return Verdict()
