"""Signatures to compare prompts: hashes of id and text, shingles, and the bands of their MinHash signature.

B bands, R values of the signature in each, V = B · R, S shingles of a text.
"""

from typing import NamedTuple

import numpy as np
import xxhash
from datasketch import MinHash
from jaxtyping import UInt32, UInt64

from eagle3.prompts.overlap.words import compared_text, hash_text, shingles, words_and_symbols
from eagle3.prompts.reading.prompt import Prompt
from eagle3.settings.prompts import DuplicateSettings

SCHEME = "affine32"  # of datasketch's permutations: 32-bit values
SEED = 1
BLOCK = 4096  # shingles that are permuted at a time: 2 MB


class Signature(NamedTuple):
    """64-bit hashes, the same in every process."""

    id: int
    text: int  # of the compared words: equal for exact duplicates
    shingles: UInt64[np.ndarray, " S"]  # the set of runs of words, ascending
    bands: list[int]  # B


def text_hash(text: str) -> int:
    """Return the hash that exact duplicates share."""
    return hash_text(" ".join(words_and_symbols(text)))


class Signer:
    """Makes signatures. Texts of Jaccard similarity s share a band with probability 1-(1-s^R)^B."""

    def __init__(self, settings: DuplicateSettings):
        self.shingle_words, self.bands, self.band_rows = settings.shingle_words, settings.bands, settings.band_rows
        self.permutations = MinHash(num_perm=self.bands * self.band_rows, seed=SEED, scheme=SCHEME).permutations

    def __call__(self, prompt: Prompt) -> Signature:
        text = compared_text(prompt.messages)
        found = shingles(text, self.shingle_words)
        return Signature(hash_text(prompt.id), text_hash(text), found, self._band_keys(found))

    def _band_keys(self, found: UInt64[np.ndarray, " S"]) -> list[int]:
        values = self.minhash(found).astype("<u4").tobytes()
        size = 4 * self.band_rows
        return [xxhash.xxh3_64_intdigest(values[start : start + size]) for start in range(0, len(values), size)]

    def minhash(self, found: UInt64[np.ndarray, " S"]) -> UInt32[np.ndarray, " V"]:
        """Return datasketch's MinHash of the upper halves of the hashes."""
        count = self.bands * self.band_rows
        signature = MinHash(count, SEED, hashfunc=int, permutations=self.permutations, scheme=SCHEME)
        for start in range(0, len(found), BLOCK):
            signature.update_batch(found[start : start + BLOCK] >> np.uint64(32))
        return signature.hashvalues
