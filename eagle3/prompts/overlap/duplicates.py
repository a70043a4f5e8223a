"""The signatures that prompts are compared by, and those of the prompts that earlier runs kept.

B bands, R values of the MinHash signature in each, S shingles of a text.
"""

import json
import os
import re
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import xxhash
from datasketch import MinHash
from jaxtyping import UInt64

from eagle3.errors import InputError
from eagle3.prompts.overlap.words import Units, hash_text, shingles, words_and_symbols
from eagle3.prompts.reading.prompt import CALLS, Prompt
from eagle3.settings.prompts import DuplicateSettings

SCHEME = "affine32"  # of datasketch's permutations: 32-bit values
SEED = 1
LEAST_OPENING = 8  # words: many conversations begin with a greeting
UNITS_OF_A_WORD = 4  # at most, in any script
BLOCK = 4096  # shingles that are permuted at a time: 2 MB

RENDERED = ("tools", "chat_template_kwargs")  # what of a prompt reaches the chat template besides its messages
# Words by which a user switches the target's mode: "/no_think", "<think>", "detailed thinking on", "Reasoning: high".
SWITCH = re.compile(
    r"(?<![\w/.:])/[a-z][\w-]*(?![\w/])"
    r"|</?\|?\w*(?:think|reason)\w*\|?>"
    r"|\b(?:thinking|reasoning)(?: (?:mode|effort|level))?\s*[:=]?\s*"
    r"(?:on|off|true|false|enabled|disabled|none|minimal|low|medium|high)\b",
    re.IGNORECASE,
)


class Signature(NamedTuple):
    """64-bit hashes, the same in every process."""

    id_hash: int
    text_hash: int  # of the mode and of all compared words: equal for exact duplicates
    mode_hash: int  # only prompts of one mode are duplicates
    opening_hash: int  # of the first questions: requests of one conversation share it, each with the history so far
    shingles: UInt64[np.ndarray, " S"]  # the set of runs of words of the questions and results of tools, ascending
    answers: UInt64[np.ndarray, " S"]  # and of the answers, if they are kept
    bands: list[int]  # B, of the questions


class Signer:
    """Makes signatures. Questions of Jaccard similarity s share a band with probability 1-(1-s^R)^B."""

    def __init__(self, settings: DuplicateSettings):
        self.shingle_words, self.bands, self.band_rows = settings.shingle_words, settings.bands, settings.band_rows
        self.empty = MinHash(self.bands * self.band_rows, SEED, hashfunc=int, scheme=SCHEME)

    def __call__(self, prompt: Prompt) -> Signature:
        mode = hash_mode(prompt)
        asked = [text for turn in prompt.messages for text in _given(turn)]
        answers = [turn["content"] for turn in prompt.messages if turn["role"] == "assistant" and CALLS not in turn]
        question = words_and_symbols("\n".join(asked))
        answered = words_and_symbols("\n".join(answers)) if answers else []
        found = shingles(question, self.shingle_words)
        minhash = self.empty.copy()
        for start in range(0, len(found), BLOCK):
            minhash.update_batch(found[start : start + BLOCK] >> np.uint64(32))  # the upper halves of the hashes
        bands = minhash.hashvalues.astype("<u4").reshape(self.bands, self.band_rows)
        return Signature(
            id_hash=hash_text(prompt.id),
            text_hash=hash_text(f"{mode}\n{' '.join(question)}\n{' '.join(answered)}"),
            mode_hash=mode,
            opening_hash=hash_text(" ".join(opening(asked))),
            shingles=found,
            answers=shingles(answered, self.shingle_words) if answers else np.array([], dtype=np.uint64),
            bands=[xxhash.xxh3_64_intdigest(band.tobytes()) for band in bands],
        )


def opening(asked: list[str]) -> list[str]:
    """Return the words of the first questions, of as many as have LEAST_OPENING words together."""
    found: list[str] = []
    for text in asked:
        found += words_and_symbols(text)
        if Units(found[: LEAST_OPENING * UNITS_OF_A_WORD]).has(LEAST_OPENING):
            break
    return found


def _given(turn: dict[str, Any]) -> list[str]:
    """Return the texts of a turn of the question: users' turns, results of tools and the calls that they belong to."""
    if CALLS in turn:
        functions = [call["function"] for call in turn[CALLS]]
        return [f"{each['name']} {json.dumps(each['arguments'], ensure_ascii=False)}" for each in functions]
    return [turn["content"]] if turn["role"] in ("user", "tool") else []


@lru_cache(maxsize=256)  # many rows share a long system turn
def text_hash(text: str) -> int:
    """Return the hash that texts share whose words and symbols are the same."""
    return hash_text(" ".join(words_and_symbols(text)))


def hash_mode(prompt: Prompt) -> int:
    """Return a hash of everything that decides how a question is answered: system turns, the tools and variables that
    the chat template gets, and the switches in the users' turns.
    """
    turns = [turn for turn in prompt.messages if turn["role"] != "assistant"]
    decisive = [
        (place, text_hash(turn["content"]) if turn["role"] == "system" else _switches(turn["content"]))
        for place, turn in enumerate(turns)
        if turn["role"] != "tool"
    ]
    record = prompt.record()
    mode = [[each for each in decisive if each[1]], *(record.get(key) for key in RENDERED)]
    return hash_text(json.dumps(mode, ensure_ascii=False, sort_keys=True))


def _switches(text: str) -> list[str]:
    return [" ".join(found.lower().split()) for found in SWITCH.findall(text)]


def known_files(folders: list[str]) -> dict[str, str]:
    """Return the prompts of earlier runs by the folder that has them: each `out_dir`, and its held-out ones.

    Raises InputError if a run has none.
    """
    found: dict[str, str] = {}
    for folder in folders:
        held_out = os.path.join(folder, "held_out")
        files = {each: os.path.join(each, "prompts", "prompts.jsonl") for each in (folder, held_out)}
        if not os.path.isfile(files[folder]):
            raise InputError(
                f"prompts.duplicates.known={folders}: {files[folder]} does not exist; name the out_dir of earlier runs"
            )
        found |= {each: file for each, file in files.items() if os.path.isfile(file)}
    return found


def known_prompt(row: Any, *, keep_answers: bool) -> Prompt | None:
    """Return a row of prompts.jsonl as a prompt, without its answers unless those of this run are kept; None if the
    stage did not write it.
    """
    try:
        prompt = Prompt.of_record(row)
        kept = [turn for turn in prompt.messages if keep_answers or turn["role"] != "assistant" or CALLS in turn]
        return prompt._replace(messages=kept) if all(isinstance(turn["content"], str) for turn in kept) else None
    except (TypeError, KeyError, AttributeError):
        return None
