"""Filters by length and language."""

from dataclasses import dataclass

from eagle3.errors import InputError
from eagle3.prompts.checks import Verdict
from eagle3.prompts.language import UNKNOWN, language_of, languages, split_code
from eagle3.prompts.reading.prompt import Prompt
from eagle3.settings.prompts import LanguageSettings, LengthSettings


@dataclass(frozen=True, kw_only=True)
class LengthCheck(LengthSettings):
    """None sets no bound."""

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
        language = language_of(split_code(user_turns(prompt)).prose)
        if language == UNKNOWN:
            return Verdict(reason="language unknown" if self.unknown == "refuse" else None)
        return Verdict(reason=None if language in self.allowed else f"language not allowed: {language}")


def user_turns(prompt: Prompt) -> list[str]:
    return [message["content"] for message in prompt.messages if message["role"] == "user"]


def prompt_characters(prompt: Prompt) -> int:
    return sum(map(len, prompt.asked()))
