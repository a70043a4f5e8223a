"""Secrets of issuers that no rule knows: long random values, by what they are called or by a prefix before them."""

import re
from collections.abc import Iterator
from itertools import pairwise

from eagle3.prompts.privacy.passwords import entropy, is_random
from eagle3.prompts.privacy.recogniser import Recogniser, Span

VALUE = re.compile(r"(?<![\w+/.~-])[\w-][\w+/.~:-]{8,400}[\w=+/-]={0,2}(?![\w+/~])", re.ASCII)
SEPARATORS = re.compile(r"[_.:/~-]")
UUID = re.compile(r"[0-9a-z]{8}-(?:[0-9a-z]{4}-){3}[0-9a-z]{12}", re.IGNORECASE)  # of issuers whose ids are no numbers
NAMES = re.compile(
    r"key|secret|token|private|access|auth|passw|credential|bearer|client[ _-]?(?:id|sec)|webhook|api|sid\b|\bpwd"
    r"|(?<![a-z])pat(?![a-z])|(?<![a-z])(?:sk|rk|pk|pri|sdk)[_-]|[_-](?:live|prod)[_-]",
    re.IGNORECASE,
)
# What is as random and opens nothing.
HARMLESS = re.compile(
    r"(?:sha\d*|md5|hash|commit|checksum|digest|integrity|etag|revision|uuid|guid|fingerprint|signature|public|rev|blob"
    r"|tree|https?|href|src|url|path|version|file|image|import|from|def|class|basic)\W{0,4}\s?\S{0,3}\Z|#\Z",
    re.IGNORECASE,
)
ASSIGNED = re.compile(r"(?<!\?token)[:=]\s*[\"'`]?\Z", re.IGNORECASE)  # a badge's token is published
UNNAMED = re.compile(r"\s*(?:default|value)?\s*[:=]?\s*[\"'`]?", re.IGNORECASE)  # then the line above may name it
OPEN_ENDS = ("=", ":", "(", "{", "[", ",")
LOOKED_UP = re.compile(r"(?:cache|primary|foreign|sort|partition|public|idempotency)[ _-]?key", re.IGNORECASE)
BEFORE = 40  # characters of the line that may name it
NAMED_LENGTH, NAMED_ENTROPY = 16, 3.0
ONE_CASE_LENGTH = 22  # of letters alone; words are shorter
MIXED_LENGTH, MIXED_PART = 16, 2.5  # of letters alone; names in code have longer parts from capital to capital
ISSUER = re.compile(r"[a-z]{2,6}_")  # then digits and letters of one case
ISSUED_LENGTH, ISSUED_DIGITS = 36, 6
SHORT_LENGTH, SHORT_ENTROPY, SHORT_SWITCHES = 10, 2.8, 0.3  # assigned to what is called a key
PREFIXED_LENGTH, PREFIXED_ENTROPY, PREFIXED_SWITCHES = 24, 3.5, 0.35  # names in code have longer runs of one kind


class RandomValue(Recogniser):
    """The longest part of a value between dashes, dots and the like has to be random, or the value a UUID."""

    entity = "API_KEY"

    def find(self, text: str) -> Iterator[Span]:
        for match in VALUE.finditer(text):
            before = _line_before(text, match.start())
            if "://" in match.group() or before.endswith("://"):
                yield from _in_url(match)
            elif not HARMLESS.search(before) and _is_secret(match.group(), before):
                yield Span(*match.span())


def _line_before(text: str, start: int) -> str:
    """Return the end of the line before a value, with the one above if the value alone is called nothing there."""
    *above, line = text[max(0, start - BEFORE) : start].rsplit("\n", 2)
    goes_on = above and above[-1].rstrip().endswith(OPEN_ENDS) and UNNAMED.fullmatch(line)
    return above[-1] + line if goes_on else line


def _in_url(url: re.Match[str]) -> Iterator[Span]:
    """Yield parts of a URL's path that are secrets by their own prefix."""
    start = url.start()
    for part in url.group().split("/"):
        if len(part) >= NAMED_LENGTH and _is_secret(part, before=""):
            yield Span(start, start + len(part))
        start += len(part) + 1


def _is_secret(value: str, before: str) -> bool:
    uuid = UUID.search(value)
    body = uuid.group() if uuid else max(SEPARATORS.split(value), key=len)
    prefix = value.removesuffix(body) if value.endswith(body) else ""
    if NAMES.search(LOOKED_UP.sub("", f"{before} {prefix}")):
        return bool(uuid or _is_named_secret(body) or (ASSIGNED.search(before) and _is_short_secret(value)))
    return bool(prefix) and "/" not in value and _is_prefixed_secret(body, prefix)


def _is_named_secret(body: str) -> bool:
    if not is_random(body) or entropy(body) < NAMED_ENTROPY:
        return False
    if any(map(str.isdigit, body)):
        return len(body) >= NAMED_LENGTH and any(map(str.isalpha, body))
    if body.islower() or body.isupper():
        return len(body) >= ONE_CASE_LENGTH and body.isalpha()
    parts = 1 + sum(map(str.isupper, body[1:]))
    return len(body) >= MIXED_LENGTH and body.isalpha() and len(body) / parts <= MIXED_PART


def _is_short_secret(value: str) -> bool:
    return (
        len(value) >= SHORT_LENGTH and value.isalnum() and any(map(str.isdigit, value)) and any(map(str.isalpha, value))
        and is_random(value) and entropy(value) >= SHORT_ENTROPY and _switches(value) >= SHORT_SWITCHES
    )  # fmt: skip


def _is_prefixed_secret(body: str, prefix: str) -> bool:
    if HARMLESS.search(prefix):
        return False
    if ISSUER.fullmatch(prefix) and body.islower():
        return len(body) >= ISSUED_LENGTH and sum(map(str.isdigit, body)) >= ISSUED_DIGITS and is_random(body)
    kinds = any(map(str.isdigit, body)) and any(map(str.islower, body)) and any(map(str.isupper, body))
    return (
        kinds and len(body) >= PREFIXED_LENGTH and is_random(body) and entropy(body) >= PREFIXED_ENTROPY
        and _switches(body) >= PREFIXED_SWITCHES
    )  # fmt: skip


def _switches(body: str) -> float:
    """Return how often, of all places, a digit, small or capital letter is followed by another kind."""
    kinds = [(char.isdigit(), char.isupper()) for char in body]
    return sum(one != other for one, other in pairwise(kinds)) / (len(kinds) - 1)
