"""Which samples validate: decided by the prompt alone, so that it never depends on the order or on the store."""

import hashlib

import numpy as np


def split_fraction(sample_id: str) -> float:
    """Return a number in [0, 1) from the prompt's id (a sample is PROMPT or PROMPT#TURN)."""
    prompt = sample_id.rsplit("#", 1)[0]
    return hash64("split", prompt) / 2**64


def hash64(*values: int | str) -> int:
    """Return 64 bits that depend on all of `values`."""
    return int.from_bytes(hashlib.sha256(repr(values).encode()).digest()[:8])


def share_fractions(split: np.ndarray) -> np.ndarray:
    """Return other numbers in [0, 1) of the same prompts: the last 33 bits of 53, of which the split uses the first."""
    return split * 2**20 % 1
