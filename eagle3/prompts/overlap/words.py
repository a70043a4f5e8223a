"""Texts as words and hashes, to compare duplicates and leaks. Shapes: W words of a text, n of a gram, G grams."""

import re
import unicodedata
from collections.abc import Sequence

import numpy as np
import xxhash
from jaxtyping import UInt64

# Scripts without spaces between words: each character is a word.
UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
WORD = f"[{UNSPACED}]|[^\\W_{UNSPACED}]+"
WORDS = re.compile(WORD)
# Symbols matter for duplicates ("3 + 4" is not "3 - 4"). Punctuation, quotes and underscores do not, except in
# operators: "!=", ":=" and the "!" of "!ready".
PUNCTUATION = ".,;:!?'\"`‘’“”«»…。、，；：！？"  # noqa: RUF001 these are meant
OPERATOR = r"[!:?](?==)|(?<![\w!])!+(?=[\w(])"
WORDS_AND_SYMBOLS = re.compile(f"{WORD}|[^\\w\\s{PUNCTUATION}]|{OPERATOR}")

# Soft hyphens, characters without width, marks of direction, variants of emoji.
UNSEEN = re.compile("[\u00ad\u061c\u180e\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufe00-\ufe0f\ufeff]")

FACTOR = np.uint64(0x9E3779B97F4A7C15)  # of the polynomial over a gram; odd, so that no bit of a word is lost


def words(text: str) -> list[str]:
    """Split a text into casefolded words in plain letters, without diacritics, to compare leaks."""
    if not text.isascii():
        parts = unicodedata.normalize("NFKD", UNSEEN.sub("", text))
        text = "".join(part for part in parts if not unicodedata.combining(part))
    return WORDS.findall(text.casefold())


def words_and_symbols(text: str) -> list[str]:
    """Split a text into casefolded words and operators, to compare duplicates; a text without any stays whole.

    The composition of characters does not matter, but "résumé" is not "resume", nor "x²" "x2": their answers differ.
    """
    if not text.isascii():
        text = unicodedata.normalize("NFC", UNSEEN.sub("", text))
    return WORDS_AND_SYMBOLS.findall(text.casefold()) or [text]


def compared_text(messages: list[dict[str, str]]) -> str:
    """Return the turns to compare for duplicates, without system turns: all traffic of a product shares those."""
    return "\n".join(message["content"] for message in messages if message["role"] != "system")


def hash_text(text: str) -> int:
    """Return a 64-bit hash, the same in every process."""
    return xxhash.xxh3_64_intdigest(text.encode())


def hash_words(found: Sequence[str]) -> UInt64[np.ndarray, " W"]:
    return np.fromiter(map(hash_text, found), dtype=np.uint64, count=len(found))


def grams(hashes: UInt64[np.ndarray, " W"], n: int) -> UInt64[np.ndarray, " G"]:
    """Return the hash of each run of n words: the sum of hash · FACTOR^(words after it in the run), modulo 2^64.

    Empty if there are fewer than n words. Two runs have the same hash with probability 2^-64.
    """
    count = max(len(hashes) - n + 1, 0)
    total = np.zeros(count, dtype=np.uint64)
    for place in range(n if count else 0):
        total = total * FACTOR + hashes[place : place + count]
    return total


class Owners:
    """Hashes in ascending order, each with the first of `sets` that has it."""

    def __init__(self, sets: list[UInt64[np.ndarray, " _"]]):
        owners = np.repeat(np.arange(len(sets), dtype=np.int32), [len(each) for each in sets])
        self.hashes, first = np.unique(np.concatenate(sets), return_index=True)
        self.owners = owners[first]

    def first(self, found: UInt64[np.ndarray, " _"]) -> int | None:
        """Return the first set that has one of these hashes."""
        if not len(found) or not len(self.hashes):
            return None
        places = np.minimum(np.searchsorted(self.hashes, found), len(self.hashes) - 1)
        owners = self.owners[places[self.hashes[places] == found]]
        return int(owners.min()) if len(owners) else None


def shingles(text: str, n: int) -> UInt64[np.ndarray, " S"]:
    """Return the set of n-word runs of a text in ascending order; a shorter text is one run. S: their number."""
    hashes = hash_words(words_and_symbols(text))
    return np.unique(grams(hashes, min(n, len(hashes))))
