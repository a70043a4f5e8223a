"""Secrets of issuers that no rule knows: long random values, by what they are called or by a prefix before them."""

import re
from collections.abc import Iterator
from itertools import pairwise

from eagle3.prompts.privacy.passwords import entropy, is_random
from eagle3.prompts.privacy.recogniser import Recogniser, Span

VALUE = re.compile(r"(?<![\w+/.~-])[A-Za-z0-9][\w+/.~:-]{10,400}[\w=+/-]={0,2}(?![\w+/~])", re.ASCII)
SEPARATORS = re.compile(r"[_.:/~-]")
UUID = re.compile(r"[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}", re.IGNORECASE)
NAMES = re.compile(
    r"key|secret|token|private|access|auth|passw|credential|(?<![a-z])pat(?![a-z])|bearer|client[ _-]?(?:id|sec)"
    r"|webhook|api|sid\b|\bpwd",
    re.IGNORECASE,
)
# What is as random and opens nothing.
HARMLESS = re.compile(
    r"(?:sha\d*|md5|hash|commit|checksum|digest|integrity|etag|revision|uuid|guid|fingerprint|signature|public|rev|blob"
    r"|tree|https?|href|src|url|path|version|file|image|import|from|def|class|basic)\W{0,4}\s?\S{0,3}\Z",
    re.IGNORECASE,
)
LOOKED_UP = re.compile(r"(?:cache|primary|foreign|sort|partition|public|idempotency)[ _-]?key", re.IGNORECASE)
BEFORE = 40  # characters of the line that may name it
NAMED_LENGTH, NAMED_ENTROPY = 16, 3.0
ONE_CASE_LENGTH = 22  # of letters alone; words are shorter
PREFIXED_LENGTH, PREFIXED_ENTROPY, PREFIXED_SWITCHES = 24, 3.5, 0.35  # names in code have longer runs of one kind


class RandomValue(Recogniser):
    """The longest part of a value between dashes, dots and the like has to be random, or the value a UUID."""

    entity = "API_KEY"

    def find(self, text: str) -> Iterator[Span]:
        for match in VALUE.finditer(text):
            before = text[max(0, match.start() - BEFORE) : match.start()].rpartition("\n")[2]
            if not (before.endswith("://") or HARMLESS.search(before)) and _is_secret(match.group(), before):
                yield Span(*match.span())


def _is_secret(value: str, before: str) -> bool:
    if "://" in value:
        return False
    body = max(SEPARATORS.split(value), key=len)
    prefix = value.removesuffix(body) if value.endswith(body) else ""
    if NAMES.search(LOOKED_UP.sub("", f"{before} {prefix}")):
        return UUID.search(value) is not None or _is_named_secret(body)
    return bool(prefix) and "/" not in value and _is_prefixed_secret(body)


def _is_named_secret(body: str) -> bool:
    if not is_random(body) or entropy(body) < NAMED_ENTROPY:
        return False
    if any(map(str.isdigit, body)):
        return len(body) >= NAMED_LENGTH and any(map(str.isalpha, body))
    return len(body) >= ONE_CASE_LENGTH and body.isalpha() and (body.islower() or body.isupper())


def _is_prefixed_secret(body: str) -> bool:
    kinds = any(map(str.isdigit, body)) and any(map(str.islower, body)) and any(map(str.isupper, body))
    return (
        kinds and len(body) >= PREFIXED_LENGTH and is_random(body) and entropy(body) >= PREFIXED_ENTROPY
        and _switches(body) >= PREFIXED_SWITCHES
    )  # fmt: skip


def _switches(body: str) -> float:
    """Return how often, of all places, a digit, small or capital letter is followed by another kind."""
    kinds = [(char.isdigit(), char.isupper()) for char in body]
    return sum(one != other for one, other in pairwise(kinds)) / (len(kinds) - 1)
