"""Assigns samples to validation by their prompt alone, whatever their order and whichever store they are in."""

import hashlib

import numpy as np


def split_fraction(sample_id: str) -> float:
    """Return a number in [0, 1) that depends on the prompt's id alone."""
    prompt, _ = prompt_and_turn(sample_id)
    return hash64("split", prompt) / 2**64


def prompt_and_turn(sample_id: str) -> tuple[str, int]:
    """Return the prompt's id and the sample's first turn: PROMPT#TURN, or any other id, which is a prompt's turn 0."""
    prompt, mark, turn = sample_id.rpartition("#")
    return (prompt, int(turn)) if mark and turn.isascii() and turn.isdecimal() else (sample_id, 0)


def hash64(*values: int | str) -> int:
    """Return 64 bits that depend on all of `values`."""
    return int.from_bytes(hashlib.sha256(repr(values).encode()).digest()[:8])


def share_fractions(split: np.ndarray) -> np.ndarray:
    """Return other numbers in [0, 1) for the same prompts: the lowest 33 of 53 bits; the split uses the highest."""
    return split * 2**20 % 1
