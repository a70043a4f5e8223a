"""Texts as words and hashes, to compare duplicates and leaks. Shapes: U units of a text, G runs of them, S shingles."""

import unicodedata
from collections.abc import Sequence
from functools import cache

import numpy as np
import regex
import xxhash
from jaxtyping import Int64, UInt64

# Scripts without spaces between words: each letter with its marks is a unit, a part of a word.
UNSPACED = r"\p{Line_Break=Complex_Context}\p{Han}\p{Hiragana}\p{Katakana}\u30fc"  # the first: Thai, Khmer, ...
UNIT = rf"[[\p{{L}}\p{{N}}]--[{UNSPACED}]][[\p{{L}}\p{{N}}\p{{M}}]--[{UNSPACED}]]*+|[{UNSPACED}]\p{{M}}*+"
WORDS = regex.compile(UNIT, regex.V1)
# Symbols matter for duplicates ("3 + 4" is not "3 - 4"). Punctuation, quotes and underscores do not, except in
# operators: "!=", ":=" and the "!" of "!ready".
PUNCTUATION = r"\p{Terminal_Punctuation}\p{Quotation_Mark}'`…¿¡"
OPERATOR = r"[!:?](?==)|(?<![\w!])!++(?=[\w(])"
WORDS_AND_SYMBOLS = regex.compile(rf"{UNIT}|[^\p{{L}}\p{{N}}\p{{M}}\s_{PUNCTUATION}]|{OPERATOR}", regex.V1)

# Characters that are not seen, such as soft hyphens, joiners, marks of direction and variants of emoji; and the
# stroke that lengthens Arabic words.
UNSEEN = regex.compile(r"[\p{Default_Ignorable_Code_Point}\u0640]")
# Decompositions of the same character in another shape. The others change what is said: "x²" is not "x2".
SAME = ("<wide>", "<narrow>", "<initial>", "<medial>", "<final>", "<isolated>", "<compat>", "<small>", "<vertical>",
        "<square>", "<noBreak>")  # fmt: skip

# Units are counted so that a clause counts like the same clause in English. The measured numbers are units for each
# word of the same text in English: of the Universal Declaration of Human Rights, and of the questions of
# tests/prompts/overlap/test_scripts.py.
WORD = 84  # whole numbers, because where a run ends must not depend on rounding
COUNTS = (
    (r"\p{Han}", WORD * 2 // 3),  # 1.5 and 1.7 in Chinese
    (r"[\p{Hiragana}\p{Katakana}\u30fc\p{Thai}\p{Lao}]", WORD * 2 // 7),  # 4.2 and 3.4 in Thai
    (f"[{UNSPACED}]", WORD // 3),  # 3.6 and 2.7 in Khmer, 3.7 and 2.4 in Burmese
    (
        r"[\p{Tamil}\p{Telugu}\p{Kannada}\p{Malayalam}\p{Hangul}]",
        WORD * 3 // 2,
    ),  # long words: 0.5 to 0.7 and 0.7 to 0.8
    ("", WORD),
)

FACTOR = 0x9E3779B97F4A7C15  # odd, so that it has an inverse
INVERSE = pow(FACTOR, -1, 2**64)


class _Shapes(dict[int, str]):
    """Code points → the usual shape of their characters, filled as texts need them."""

    def __missing__(self, code: int) -> str:
        character = chr(code)
        is_shape = unicodedata.decomposition(character).startswith(SAME)
        return self.setdefault(code, unicodedata.normalize("NFKC", character) if is_shape else character)


_shapes = _Shapes()


@cache
def _count(character: str) -> int:
    """Return the count of a unit that begins with this character."""
    return next(count for script, count in COUNTS if regex.match(script, character))


def normal_form(text: str) -> str:
    """Return the form in which all texts are compared: without case, and each character in one shape.

    Marks stay: they make other words in most scripts ("résumé", vowel signs). `casefold` would make "Masse" of "Maße".
    """
    if text.isascii():
        return text.lower()
    return unicodedata.normalize("NFC", UNSEEN.sub("", text).translate(_shapes).lower())


def words(text: str) -> list[str]:
    """Split a text into words, or letters in scripts without spaces, to compare leaks."""
    return WORDS.findall(normal_form(text))


def words_and_symbols(text: str) -> list[str]:
    """Split a text into words and operators, to compare duplicates; a text without any stays whole."""
    return WORDS_AND_SYMBOLS.findall(normal_form(text)) or [text]


def hash_text(text: str) -> int:
    """Return a 64-bit hash, the same in every process."""
    return xxhash.xxh3_64_intdigest(text.encode())


class Units:
    """The words, letters and symbols of a text, and hashes of their runs.

    The hash of a run is the sum of the hash of its unit k · INVERSE^k, modulo 2^64, wherever the run begins: sums over
    the beginnings of the text give it. Two runs have the same hash with probability 2^-64.
    """

    def __init__(self, found: Sequence[str]):
        number = len(found)
        hashes = np.fromiter(map(hash_text, found), dtype=np.uint64, count=number)
        self.sums: UInt64[np.ndarray, " U+1"] = np.zeros(number + 1, dtype=np.uint64)
        np.cumsum(hashes * _powers(INVERSE, number), out=self.sums[1:])
        self.before: Int64[np.ndarray, " U+1"] = np.arange(0, (number + 1) * WORD, WORD)  # counts before each unit
        if not "".join(found).isascii():
            np.cumsum(np.fromiter((_count(unit[0]) for unit in found), np.int64, number), out=self.before[1:])

    def __len__(self) -> int:
        return len(self.before) - 1

    def has(self, words: int) -> bool:
        """Tell whether the text has so many words."""
        return bool(self.before[-1] >= words * WORD)

    def runs(self, words: int) -> UInt64[np.ndarray, " G"]:
        """Return, for each unit, the hash of the shortest run from there that has so many words, if there is one."""
        ends = np.searchsorted(self.before, self.before[:-1] + words * WORD)
        return self._hashes(ends[ends <= len(self)])

    def runs_of_units(self, number: int) -> UInt64[np.ndarray, " G"]:
        """Return the hashes of all runs of so many units."""
        return self._hashes(np.arange(number, len(self) + 1))

    def _hashes(self, ends: np.ndarray) -> UInt64[np.ndarray, " G"]:
        starts = slice(len(ends))
        return (self.sums[ends] - self.sums[starts]) * _powers(FACTOR, len(ends))


def _powers(base: int, number: int) -> UInt64[np.ndarray, " _"]:
    """Return the first powers of `base`, modulo 2^64, from 1."""
    return _many_powers(base, max(1024, 1 << number.bit_length()))[:number]


@cache
def _many_powers(base: int, number: int) -> UInt64[np.ndarray, " _"]:
    powers = np.full(number, base, dtype=np.uint64)
    powers[0] = 1
    return np.cumprod(powers)


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


def shingles(found: Sequence[str], n: int) -> UInt64[np.ndarray, " S"]:
    """Return the set of n-word runs of these units in ascending order; fewer words are one run."""
    units = Units(found)
    return np.unique(units.runs(n) if units.has(n) else units.runs_of_units(len(units)))
