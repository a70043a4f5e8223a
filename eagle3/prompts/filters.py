"""Filters by length and language; the natural language of a prompt and its share of code, by rules and py3langid."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from eagle3.errors import InputError
from eagle3.prompts.reading.prompt import Prompt, Verdict
from eagle3.settings.prompts import LanguageSettings, LengthSettings

UNKNOWN = "unknown"
NO_LANGUAGE = "zxx"  # ISO 639's code for "no linguistic content", which py3langid gives to numbers and markup
READ_CHARACTERS = 400  # of a prompt's prose
MIN_BYTES = 16  # of its words in UTF-8: a Chinese character carries more than a Latin letter
MIN_CONFIDENCE = 0.5  # py3langid's probability of its guess

FENCES = ("```", "~~~")
# Beginnings of code lines in the most common languages and tools. Matched at the line's first character that is not a
# space; every part is bounded or ends at a character that it cannot contain, so that no line takes long.
CODE_BEGINNING = re.compile(
    r"""
    (?:async\ )?def\ \w+\( | class\ \w+\s*[(:{]
  | from\ [\w.]+\ import\b | import\ [\w.{*"']+\s*(?:$|[,;]|\b(?:as|from)\b)
  | (?:if|elif|else|for|while|with|try|except|finally|match|case)\b.{0,200}:$
  | (?:return|raise|assert|yield|del|await)\b[^.?!]{0,200}$
  | (?:public|private|protected|static|final|export|const|let|var|func|fn|pub|impl|struct|enum|namespace|typedef|void)
    \ [^.?!]{1,200}[({;=]
  | [A-Za-z_][\w.]{0,100}(?:\[[^\]]{0,100}\])?(?::\ ?[\w.\[\]]{1,60})?\s?(?:=|[+*/|&:-]=)\s?\S
  | [A-Za-z_][\w.]{0,100}\(.*\)[;,:]?$
  | ["'][\w\ -]{1,60}["']\s?:
  | (?:>>>|\.\.\.|\$|\#include|\#!|//|/\*|\*/|</?[A-Za-z][^<>]{0,200}>|@\w+[($])(?:\s|$|\w)
  | (?:SELECT|INSERT\ INTO|UPDATE|DELETE\ FROM|CREATE\ TABLE|ALTER\ TABLE|FROM|WHERE|GROUP\ BY|ORDER\ BY|JOIN)\ \S
    """,
    re.VERBOSE,
)
CODE_ENDINGS = ("{", "}", "};", "},", ");", "):", "({", "})", "[", "]", "],")
INDENTED = ("    ", "\t")

INLINE_CODE = re.compile(r"`[^`\n]*`")
NO_WORD = re.compile(r"[\d_/\\@=<>{}()|#$]")  # paths, addresses, numbers, identifiers, tags


@dataclass(frozen=True, kw_only=True)
class LengthCheck(LengthSettings):
    """None sets no limit."""

    name = "length"

    def __call__(self, prompt: Prompt) -> Verdict:
        for unit, (low, high) in self.bounds().items():
            value = prompt_characters(prompt) if unit == "characters" else len(user_turns(prompt))
            if low is not None and value < low:
                return Verdict(reason=f"fewer than {low} {unit}")
            if high is not None and value > high:
                return Verdict(reason=f"more than {high} {unit}")
        return Verdict()


@dataclass(frozen=True, kw_only=True)
class LanguageCheck(LanguageSettings):
    """Compares the language of the user turns with an allow-list of ISO 639 codes; None allows every language.

    The language of code, very short and undecided texts is unknown; `unknown` says whether to keep or refuse them.
    """

    name = "language"

    def __post_init__(self) -> None:
        if self.allowed is not None and (unknown := set(self.allowed) - set(languages())):
            # YAML reads a bare `no` (Norwegian) as false.
            raise InputError(
                f"prompts.language.allowed has {min(unknown)!r}, which is none of the ISO 639 codes that can be "
                f"detected ({', '.join(languages())}); quote codes in YAML: 'no'"
            )

    def __call__(self, prompt: Prompt) -> Verdict:
        if self.allowed is None:
            return Verdict()
        language = detect_language(split_code(user_turns(prompt)).prose)
        if language == UNKNOWN:
            return Verdict(reason="language unknown" if self.unknown == "refuse" else None)
        return Verdict(reason=None if language in self.allowed else f"language not allowed: {language}")


def user_turns(prompt: Prompt) -> list[str]:
    return [message["content"] for message in prompt.messages if message["role"] == "user"]


def prompt_characters(prompt: Prompt) -> int:
    return sum(map(len, prompt.asked()))


# --- language and code ---


class Split(NamedTuple):
    """The prose of a text, without code lines and fenced blocks, and the share of code among its characters."""

    prose: str
    code_share: float


def split_code(texts: Iterable[str]) -> Split:
    """Separate prose from code line by line; line ends and indentation are not counted."""
    prose: list[str] = []
    characters = code_characters = 0
    for text in texts:
        fenced = after_code = False
        for line in text.splitlines():
            stripped = line.strip()
            fence = stripped.startswith(FENCES)
            if stripped:  # a blank line does not end an indented block
                inside = fenced or fence or (after_code and line.startswith(INDENTED))
                after_code = bool(inside or stripped.endswith(CODE_ENDINGS) or CODE_BEGINNING.match(stripped))
            fenced ^= fence
            characters += len(stripped)
            if after_code:
                code_characters += len(stripped)
            else:
                prose.append(stripped)
    return Split("\n".join(prose), code_characters / characters if characters else 0.0)


def detect_language(prose: str) -> str:
    """Return the ISO 639 code of a text's language, or `unknown` for code, short or undecided texts."""
    words = INLINE_CODE.sub(" ", prose[:READ_CHARACTERS]).split()
    # Words beyond ASCII stay whole: Chinese has no spaces.
    text = " ".join(word for word in words if not word.isascii() or not NO_WORD.search(word))
    if len(text.encode()) < MIN_BYTES:
        return UNKNOWN
    language, confidence = _identifier().classify(text)
    return UNKNOWN if language == NO_LANGUAGE or confidence < MIN_CONFIDENCE else language


@cache
def _identifier() -> Any:
    """Load py3langid's model at the first call: 0.8 s, 130 MB, so it is not pickled to other processes."""
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)


def languages() -> list[str]:
    """Return the codes that the detector can return, without `unknown`."""
    return sorted(set(_identifier().labels) - {NO_LANGUAGE})
