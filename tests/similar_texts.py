"""Texts that repeat one another, and a brute-force reference for their duplicates."""

import random
from typing import Any

from prompt_stage import users

from eagle3.prompts.overlap.words import words_and_symbols

VOCABULARY = [f"word{number}" for number in range(400)]
LONG = " ".join(VOCABULARY[:40])


def texts_with_copies(count: int, seed: int) -> list[str]:
    """Random texts; about half are an earlier one with up to a third of its words changed, some word for word."""
    rng = random.Random(seed)
    texts: list[str] = []
    for _ in range(count):
        if texts and rng.random() < 0.5:
            words = rng.choice(texts).split()
            for _ in range(rng.randint(0, len(words) // 9)):
                words[rng.randrange(len(words))] = rng.choice(VOCABULARY)
        else:
            words = rng.choices(VOCABULARY, k=rng.randint(1, 60))
        texts.append(" ".join(words))
    return texts


def set_of_runs(text: str) -> set[tuple[str, ...]]:
    """The shingles again, without hashes."""
    words = words_and_symbols(text)
    size = min(3, len(words))
    return {tuple(words[start : start + size]) for start in range(len(words) - size + 1)}


def kept_by_brute_force(texts: list[str], threshold: float) -> list[str]:
    kept: list[tuple[str, set]] = []
    for text in texts:
        runs = set_of_runs(text)
        if all(len(runs & other) / len(runs | other) < threshold for _, other in kept):
            kept.append((text, runs))
    return [text for text, _ in kept]


def asked(system: str, *texts: str, **fields: Any) -> dict:
    return {"license": "MIT", "messages": [{"role": "system", "content": system}, *users(*texts)], **fields}
