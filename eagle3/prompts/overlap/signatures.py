"""What a row is compared by, in fixed width: hashes of its id and text, and the bands of its MinHash signature.

N rows, B bands, R values of the signature in each.
"""

from typing import Any

import numpy as np
import xxhash
from datasketch import MinHash

from eagle3.prompts.overlap.words import compared_text, hash_text, shingles, words_and_symbols
from eagle3.prompts.reading.prompt import Prompt

SCHEME = "affine32"  # of datasketch's permutations: 32-bit values
SEED = 1


class Signer:
    """Rows of `dtype` from prompts. Two texts of Jaccard similarity s share a band with probability 1-(1-s^R)^B."""

    def __init__(self, *, shingle_words: int, bands: int, band_rows: int):
        self.shingle_words = shingle_words
        self.bands = bands
        self.band_rows = band_rows
        self.empty = {"num_perm": bands * band_rows, "seed": SEED, "scheme": SCHEME, "hashfunc": int}
        self.empty["permutations"] = MinHash(**self.empty).permutations

    @property
    def dtype(self) -> np.dtype:
        return np.dtype([("id", "u8"), ("text", "u8"), ("bands", "u8", (self.bands,))])

    def __call__(self, prompt: Prompt) -> tuple[int, int, list[int]]:
        text = compared_text(prompt.messages)
        exact = hash_text(" ".join(words_and_symbols(text)))
        return hash_text(prompt.id), exact, self._band_keys(shingles(text, self.shingle_words))

    def _band_keys(self, found: np.ndarray) -> list[int]:
        signature: Any = MinHash(**self.empty)
        signature.update_batch((found >> np.uint64(32)).tolist())
        values = signature.hashvalues.astype("<u4").reshape(self.bands, self.band_rows)
        return [xxhash.xxh3_64_intdigest(band.tobytes()) for band in values]
