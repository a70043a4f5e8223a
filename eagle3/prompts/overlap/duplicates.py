"""Duplicates: the signatures that prompts are compared by, and prompts that earlier runs kept.

B bands, R values of the MinHash signature in each, S shingles of a text.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash
from datasketch import MinHash
from jaxtyping import UInt64

from eagle3.errors import InputError
from eagle3.prompts.overlap.words import Owners, compared_text, hash_text, shingles, words_and_symbols
from eagle3.prompts.reading.prompt import Prompt, Verdict
from eagle3.settings.prompts import DuplicateSettings
from eagle3.storage.files import read_jsonl

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
        self.empty = MinHash(self.bands * self.band_rows, SEED, hashfunc=int, scheme=SCHEME)

    def __call__(self, prompt: Prompt) -> Signature:
        text = compared_text(prompt.messages)
        found = shingles(text, self.shingle_words)
        minhash = self.empty.copy()
        for start in range(0, len(found), BLOCK):
            minhash.update_batch(found[start : start + BLOCK] >> np.uint64(32))  # the upper halves of the hashes
        bands = minhash.hashvalues.astype("<u4").reshape(self.bands, self.band_rows)
        keys = [xxhash.xxh3_64_intdigest(band.tobytes()) for band in bands]
        return Signature(hash_text(prompt.id), text_hash(text), found, keys)


class KnownCheck:
    """Refuses a prompt that one of `folders`, each the `out_dir` of an earlier run, has kept: a store trained together
    with theirs has none of them twice."""

    name = "known"

    def __init__(self, folders: list[str]):
        self.folders = folders
        for path in self.files():
            if not path.is_file():
                raise InputError(
                    f"prompts.duplicates.known={self.folders}: {path} does not exist; name the out_dir of earlier runs"
                )
        texts = [(compared_text(row["messages"]) for row in read_jsonl(path)) for path in self.files()]
        self.kept = Owners([np.fromiter(map(text_hash, each), dtype=np.uint64) for each in texts])

    def files(self) -> list[Path]:
        """List the files read; if one changes, the prompts are made again."""
        return [Path(folder) / "prompts" / "prompts.jsonl" for folder in self.folders]

    def __call__(self, prompt: Prompt) -> Verdict:
        owner = self.kept.first(np.array([text_hash(compared_text(prompt.messages))], dtype=np.uint64))
        return Verdict(reason=None if owner is None else f"known: {self.folders[owner]} has it")
