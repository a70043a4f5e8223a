"""Parts of recognisers: patterns, their validators, and the context words around a match."""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

# How far context words may be from a match, in characters. Bounded, so that no text takes more than linear time.
WORDS_BEFORE, WORDS_AFTER = 80, 40
TABLE, HEADER = 4000, 200  # characters searched for a table's first line, and read of it

# A match with such neighbours is part of a longer number, name or hash. Escaped line ends and tabs of code are none.
JOINED_BEFORE = re.compile(r"(?:\w(?<!\\[nrt])|\d[a-z]{0,8}[-.])\Z", re.ASCII | re.IGNORECASE)
JOINED_AFTER = re.compile(r"\w|[-.]\d", re.ASCII)
WORD = re.compile(r"\w*", re.ASCII)
LOOK_BACK = 10  # characters that JOINED_BEFORE can span

# Words right before a number that identifies a thing and not a person.
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


class Recogniser(NamedTuple):
    """Finds one entity in text. A recogniser of your own may be any object with these two attributes."""

    entity: str  # in reasons, counts and placeholders, e.g. EMAIL_ADDRESS
    find: Callable[[str], Iterable[Span]]  # gets text with digits, dashes and blanks in ASCII (policy.readable)


@dataclass(frozen=True)
class Pattern:
    """Finds the matches of `pattern` that stand alone, are `valid`, and are `clear` or near a word of `context`.

    Use bounded repeats in patterns: a match may be tried at every character of a text.
    """

    pattern: re.Pattern[str]
    valid: Callable[[re.Match[str]], bool] = bool  # check digits and the like
    clear: Callable[[re.Match[str]], object] | None = None  # unambiguous without context
    context: re.Pattern[str] | None = None

    def __call__(self, text: str) -> Iterator[Span]:
        if self.context and not self.clear and not self.context.search(text.lower()):
            return
        position = 0
        while match := self.pattern.search(text, position):
            span = Span(*match.span())
            if stands_alone(text, span) and self.valid(match):
                if self.context is None or (self.clear and self.clear(match)) or has_context(text, span, self.context):
                    yield span
                position = span.end
            else:  # the first word may belong to something else: a year before a card number
                position = after_word(text, span.start)


def words(*alternatives: str) -> re.Pattern[str]:
    """Match any of these as whole words of lower-cased text; "tax id" also matches tax-id, and ssn ssn_number."""
    alternatives = tuple(alternative.replace(" ", "[ _-]") for alternative in alternatives)
    return re.compile(rf"(?<![^\W_])(?:{'|'.join(alternatives)})(?![^\W_])")


def after_word(text: str, start: int) -> int:
    """Return where to continue if nothing stands alone at `start`: no match starts inside the same word."""
    return max(start + 1, WORD.match(text, start).end())  # type: ignore[union-attr]


def mentions(text: str, gates: tuple[str, ...]) -> bool:
    lowered = text.lower()
    return any(gate in lowered for gate in gates)


def matches(pattern: re.Pattern[str], text: str, is_found: Callable[[re.Match[str]], object]) -> Iterator[Span]:
    """Yield the matches that pass a test, also inside a word."""
    return (Span(*match.span()) for match in pattern.finditer(text) if is_found(match))


def text_before(text: str, position: int, length: int) -> str:
    return text[max(0, position - length) : position]


def stands_alone(text: str, span: Span) -> bool:
    joined_before = JOINED_BEFORE.search(text_before(text, span.start, LOOK_BACK))
    return not (joined_before or JOINED_AFTER.match(text, span.end))


def longest_runs(parts: list[Span], most: int, is_found: Callable[[Span], bool]) -> Iterator[Span]:
    """Find runs of up to `most` neighbouring parts: of those that begin with a part, the longest. None overlaps."""
    first = 0
    while first < len(parts):
        spans = [Span(parts[first].start, part.end) for part in parts[first : first + most]]
        last = next((last for last in range(len(spans), 0, -1) if is_found(spans[last - 1])), None)
        if last is not None:
            yield spans[last - 1]
        first += last or 1


def has_context(text: str, span: Span, context: re.Pattern[str]) -> bool:
    """Tell whether a context word is near the span, or in the first line of its table."""
    before = text_before(text, span.start, WORDS_BEFORE).lower()
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
