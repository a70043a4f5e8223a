"""What a recogniser is, and the usual kind: a pattern, its checksum, and the words around that say what it is."""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, get_args

Action = Literal["drop", "mask", "keep"]
ACTIONS = get_args(Action)

# How far words may be from what they name, in characters. Bounded, so that no text costs more than linear time.
WORDS_BEFORE, WORDS_AFTER = 80, 40
TABLE, HEADER = 4000, 200  # a table's first line names its columns

# A match that goes on to the left or right is part of a longer number, name or hash.
JOINED_BEFORE = re.compile(r"(?:\w|\d[a-z]{0,8}[-.])\Z", re.ASCII | re.IGNORECASE)
JOINED_AFTER = re.compile(r"\w|[-.]\d", re.ASCII)
WORD = re.compile(r"\w*", re.ASCII)
LOOK_BACK = 10  # characters that JOINED_BEFORE can span

# What comes right before a number that is somebody's property but nobody's identity.
OTHER_NUMBER = re.compile(
    r"(?:order|invoice|ticket|tracking|(?<!payer[ _-])ref(?:erence)?|sku|parts?|serial|build|version|isbn|commit"
    r"|article|item|model|batch|product|bestell|rechnungs|artikel|auftrags|commande|facture|pedido|factura|ordine|fattura|bestelling)"
    r"[-_ ]?(?:number|nummer|no|nr|n[º°]|num|id)?[\W_]{0,4}(?:is |lautet |est |es )?\Z"
)
LONGEST_OTHER = 40


class Span(NamedTuple):
    """Characters text[start:end]."""

    start: int
    end: int


class Recogniser(ABC):
    """Finds one entity in text. To add one: a subclass with `entity` and `find`, and an entry in the config."""

    entity: str  # in reasons, counts and placeholders, e.g. EMAIL_ADDRESS

    def __init__(self, *, action: Action):
        self.action = action

    def files(self) -> list[Path]:
        """List what it reads: prompts are made again when one of them changes."""
        return []

    def made_with(self) -> str | None:
        """Return the program and version that it finds with, if it is one that can change by itself."""
        return None

    @abstractmethod
    def find(self, text: str) -> Iterable[Span]:
        """Yield where the entity is. Digits, dashes and blanks come in ASCII (see policy.readable)."""


class BatchRecogniser(Recogniser):
    """Finds in many texts at once, because each call is dear; rows are given to it in groups before they are judged.

    Ids and names of sources are not: they are looked at one by one, by the other recognisers.
    """

    def __init__(self, *, action: Action):
        super().__init__(action=action)
        self._ahead: dict[str, list[Span]] = {}

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_ahead": {}}

    def look_ahead(self, texts: Iterable[str]) -> None:
        """Find in all of these; what was looked at before is forgotten."""
        known = [text for text in dict.fromkeys(texts) if text]
        self._ahead = dict(zip(known, self.find_all(known), strict=True)) if known else {}

    def find(self, text: str) -> list[Span]:
        if text and text not in self._ahead:
            self.look_ahead([text])
        return self._ahead.get(text, [])

    @abstractmethod
    def find_all(self, texts: Sequence[str]) -> list[list[Span]]:
        """Return what is in each of the texts, none of which is empty."""


class Pattern(Recogniser):
    """All matches of `pattern` that stand alone, are `valid`, and have their `context` where they need one.

    `gates` are lower-case words of which every text that matches holds one: most texts are done with at their sight.
    Write patterns with bounded repeats: a match may be tried from every character of a text.
    """

    pattern: re.Pattern[str]
    context: re.Pattern[str] | None = None
    gates: tuple[str, ...] = ()

    def find(self, text: str) -> Iterator[Span]:
        if self.gates and not mentions(text, self.gates):
            return
        position = 0
        while match := self.pattern.search(text, position):
            span = Span(*match.span())
            if stands_alone(text, span) and self.valid(match):
                if self.in_context(text, match):
                    yield span
                position = span.end
            else:  # the first word may have been of something else: a year before a card's number
                position = after_word(text, span.start)

    def valid(self, match: re.Match[str]) -> bool:
        """Tell whether check digits and the like are right."""
        return True

    def needs_context(self, match: re.Match[str]) -> bool:
        """Tell whether words around must say what it is; False for forms that nothing else has."""
        return True

    def in_context(self, text: str, match: re.Match[str]) -> bool:
        if self.context is None or not self.needs_context(match):
            return True
        return has_context(text, Span(*match.span()), self.context)


def words(*alternatives: str) -> re.Pattern[str]:
    """Match any of these as whole words of lower-cased text; "tax id" is in tax-id too, and ssn in ssn_number."""
    alternatives = tuple(alternative.replace(" ", "[ _-]") for alternative in alternatives)
    return re.compile(rf"(?<![^\W_])(?:{'|'.join(alternatives)})(?![^\W_])")


def after_word(text: str, start: int) -> int:
    """Return where to search on when nothing stands alone from `start`: nothing begins later in the same word."""
    return max(start + 1, WORD.match(text, start).end())  # type: ignore[union-attr]


def mentions(text: str, gates: tuple[str, ...]) -> bool:
    lowered = text.lower()
    return any(gate in lowered for gate in gates)


def stands_alone(text: str, span: Span) -> bool:
    before = text[max(0, span.start - LOOK_BACK) : span.start]
    return not (JOINED_BEFORE.search(before) or JOINED_AFTER.match(text, span.end))


def has_context(text: str, span: Span, context: re.Pattern[str]) -> bool:
    """Tell whether the words around, or the head of the table that the span is in, name what it is."""
    before = text[max(0, span.start - WORDS_BEFORE) : span.start].lower()
    found = (
        context.search(before)
        or context.search(text[span.end : span.end + WORDS_AFTER].lower())
        or context.search(_table_header(text, span.start).lower())
    )
    return found is not None and OTHER_NUMBER.search(before[-LONGEST_OTHER:]) is None


def _table_header(text: str, position: int) -> str:
    oldest = max(0, position - TABLE)
    blank_line = text.rfind("\n\n", oldest, position)
    start = oldest if blank_line < 0 else blank_line + 2
    return text[start : min(start + HEADER, position)].partition("\n")[0]
