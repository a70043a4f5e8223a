"""Findings that are let through: values that are nobody's, and a team's own values, patterns and domains."""

import re
from collections.abc import Sequence

from eagle3.errors import InputError
from eagle3.prompts.privacy.nobodys import is_nobodys

DOMAIN = re.compile(r"(?:@|%40|://(?:[^/@]*@)?)([^/:?#\s@]+)")  # of an email address or a URL


class Allowed:
    """nobodys: let through what nobodys.py knows; values, patterns: whole findings, without case; domains: of email
    addresses and URLs, with what is below them."""

    def __init__(self, *, nobodys: bool, values: Sequence[str], patterns: Sequence[str], domains: Sequence[str]):
        self.nobodys = nobodys
        self.values = {value.casefold() for value in values}
        self.patterns = [_compiled(pattern) for pattern in patterns]
        self.domains = tuple(f".{domain.casefold().lstrip('.@')}" for domain in domains)

    def __call__(self, entity: str, value: str) -> bool:
        return (
            (self.nobodys and is_nobodys(entity, value))
            or value.casefold() in self.values
            or any(pattern.fullmatch(value) for pattern in self.patterns)
            or (bool(self.domains) and self._is_own(value))
        )

    def _is_own(self, value: str) -> bool:
        domain = DOMAIN.search(value)
        return domain is not None and f".{domain[1].casefold()}".endswith(self.domains)


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern, re.IGNORECASE)
    except re.error as error:
        raise InputError(
            f"prompts.privacy.allowed.patterns holds {pattern!r}, which is no regular expression ({error}); mend it"
        ) from None
