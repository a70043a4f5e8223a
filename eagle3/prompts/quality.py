"""Plain rules about the text of the users' turns. All are off unless a bound is set.

Gopher (Rae et al. 2021, table A1) refuses web pages of which more than 0.3 of the lines, or 0.15 of the characters in
runs of 5 words, are repeated, and those of which fewer than 0.8 of the words have a letter. Prompts hold logs, tables
and code, which repeat by nature: look at refused_sample.jsonl before you take a bound.
"""

import unicodedata
from collections import Counter

from eagle3.prompts.checks import Verdict
from eagle3.prompts.filters import user_turns
from eagle3.prompts.overlap.words import grams, hash_words, words
from eagle3.prompts.reading.prompt import Prompt


class QualityCheck:
    """max_repeated_lines: the share of lines that are there already; max_repeated_words: of words in runs of
    `repeated_run` that are; min_words_with_letters: share of what stands between spaces; max_word_characters: of the
    longest such; max_control_characters: share of characters. None sets no bound.
    """

    name = "quality"

    def __init__(
        self,
        *,
        max_repeated_lines: float | None,
        max_repeated_words: float | None,
        repeated_run: int,
        min_words_with_letters: float | None,
        max_word_characters: int | None,
        max_control_characters: float | None,
    ):
        self.repeated_run = repeated_run
        bounds = [
            ("too many repeated lines", repeated_lines, max_repeated_lines, 1),
            ("too many repeated words", self._repeated_words, max_repeated_words, 1),
            ("too few words with letters", words_with_letters, min_words_with_letters, -1),
            ("a word too long", longest_word, max_word_characters, 1),
            ("too many control characters", control_characters, max_control_characters, 1),
        ]
        self.bounds = [(reason, measure, bound, sign) for reason, measure, bound, sign in bounds if bound is not None]

    def __call__(self, prompt: Prompt) -> Verdict:
        text = "\n".join(user_turns(prompt)) if self.bounds else ""
        for reason, measure, bound, sign in self.bounds:
            if sign * measure(text) > sign * bound:
                return Verdict(reason=reason)
        return Verdict()

    def _repeated_words(self, text: str) -> float:
        """Return the share of runs of words that are there already."""
        runs = grams(hash_words(words(text)), self.repeated_run).tolist()
        return 1 - len(set(runs)) / len(runs) if runs else 0.0


def repeated_lines(text: str) -> float:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return 1 - len(set(lines)) / len(lines) if lines else 0.0


def words_with_letters(text: str) -> float:
    parts = text.split()
    return sum(any(map(str.isalpha, part)) for part in parts) / len(parts) if parts else 1.0


def longest_word(text: str) -> int:
    return max(map(len, text.split()), default=0)


def control_characters(text: str) -> float:
    """Return the share of control characters, lone surrogates and U+FFFD, of which a text has none."""
    kinds = Counter(
        char == "\ufffd" or (unicodedata.category(char) in ("Cc", "Cs") and char not in "\t\n\r\f") for char in text
    )
    return kinds[True] / len(text) if text else 0.0


class UnicodeRepair:
    """Mends text that was decoded wrongly ("donâ€™t") with ftfy; nothing else of it is changed."""

    name = "unicode"

    def __call__(self, prompt: Prompt) -> Verdict:
        from ftfy import TextFixerConfig, fix_encoding

        plain = TextFixerConfig(unescape_html=False, explain=False)
        mended = [{**message, "content": fix_encoding(message["content"], plain)} for message in prompt.messages]
        if mended == prompt.messages:
            return Verdict()
        return Verdict(prompt=prompt._replace(messages=mended), counts={"repaired": 1})
