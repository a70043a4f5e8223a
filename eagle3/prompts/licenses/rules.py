"""Decides whether a row may be used: SPDX expressions against an allow-list, and sources refused by name."""

import logging
import re
import unicodedata
from collections.abc import Callable
from contextlib import suppress
from fnmatch import translate
from functools import cache, lru_cache
from typing import Any

from license_expression import ExpressionError, get_spdx_licensing

from eagle3.errors import InputError
from eagle3.prompts.licenses.terms import SourceTerms
from eagle3.prompts.reading.prompt import Prompt, Verdict
from eagle3.settings.prompts import LicenseSettings

log = logging.getLogger(__name__)

# "()", "(OR MIT WITH x)" and deep nesting make the parser raise more than its own error.
UNPARSABLE = (ExpressionError, IndexError, AssertionError, RecursionError)


class LicenseRules:
    """The rules of conf/prompts/licenses; case never matters.

    "A AND B" needs both licences allowed, "A OR B" one of them; any other licence is refused. A source on the
    `forbidden` list is refused whatever its licence is, unless one of its names is in `cleared`.
    """

    def __init__(self, settings: LicenseSettings):
        self.allowed = {_spdx_id(entry) for entry in settings.allowed} | set(map(_spaced, settings.allowed_terms))
        self.aliases = {_spaced(alias): id for alias, id in settings.aliases.items()}
        self.forbidden = [
            (re.compile("|".join(map(_pattern, entry.match))), f"{entry.name}: {entry.reason}")
            for entry in settings.forbidden
        ]
        self.cleared = {_letters(name) for name in settings.cleared}
        self.free_of_credit = {_spaced(license) for license in settings.free_of_credit}  # for attribution.txt

    def resolve_alias(self, license: str) -> str:
        """Return the SPDX id or allowed terms that an alias means; any other licence is returned unchanged."""
        return license if _spaced(license) in self.allowed else self.aliases.get(_spaced(license), license)

    def license_refusal(self, license: str | None) -> str | None:
        """Return why rows of this licence are refused, without quoting the row; None: they pass."""
        if not license or not license.strip():
            return "license missing"
        license = self.resolve_alias(license)
        if _spaced(license) in self.allowed:
            return None
        try:
            expression = _parsed(license)
            if self._permits(expression):
                return None
            unknown = {self._id(key) for key in _licensing().unknown_license_keys(expression)}
            return "license unknown" if unknown - self.allowed else f"license not allowed: {expression}"
        except UNPARSABLE:
            # A list with a part that no expression can have; terms.join_licenses puts parentheses around an `or`.
            parts = [re.sub(r"^\((.*)\)$", r"\1", part) for part in license.split(" AND ")]
            refusals = [self.license_refusal(part) for part in parts] if len(parts) > 1 else ["license unparsable"]
            return next(filter(None, refusals), None)

    def source_refusal(self, *names: str) -> tuple[str, str] | None:
        """Return why a source of these names is refused, and the name that the first entry matches; None: it passes."""
        letters = {name: _letters(name) for name in names}
        if self.cleared.intersection(letters.values()):
            return None
        found = ((why, name) for pattern, why in self.forbidden for name in names if pattern.match(letters[name]))
        return next(((f"source forbidden: {why}", name) for why, name in found), None)

    def _permits(self, expression: Any) -> bool:
        for operator, combined in ((_licensing().AND, all), (_licensing().OR, any)):
            if isinstance(expression, operator):
                return combined(map(self._permits, expression.args))
        return self._id(str(expression)) in self.allowed

    def _id(self, symbol: str) -> str:
        return self.resolve_alias(symbol).lower()


class LicenseCheck:
    """Applies the rules to the rows of one source: its names, each row's `source` and licence."""

    name = "licenses"

    def __init__(self, rules: LicenseRules, terms: SourceTerms):
        self.rules = rules
        self.source = terms.name
        self.source_refusal = rules.source_refusal(*terms.known_as)
        _warn_of_overruled(rules, terms)

    def __call__(self, prompt: Prompt) -> Verdict:
        verdict, license = self._check(prompt.source, prompt.known_as, prompt.license)
        return verdict if license == prompt.license else Verdict(prompt=prompt._replace(license=license))

    @lru_cache(4096)  # noqa: B019 many rows share source, models and licence; each source has one check
    def _check(self, source: str, known_as: tuple[str, ...], license: str | None) -> tuple[Verdict, str | None]:
        """Return the verdict, and the licence, of one that passes as its SPDX id."""
        others = [name for name in (source, *known_as) if name != self.source]
        if refusal := self.source_refusal or self.rules.source_refusal(*others):
            return Verdict(*refusal), license
        if reason := self.rules.license_refusal(license):
            return Verdict(reason, license), license
        assert license is not None  # a missing one was refused
        return Verdict(), self.rules.resolve_alias(license)


def _warn_of_overruled(rules: LicenseRules, terms: SourceTerms) -> None:
    """Warn if settings let a source pass that its card or its name forbids."""
    if terms.license_from == "config" and terms.card_license and (refusal := rules.license_refusal(terms.card_license)):
        log.warning(
            "the licence %s set for source %s OVERRULES its dataset card, which says %s (%s): make sure you may",
            terms.license, terms.name, terms.card_license, refusal,
        )  # fmt: skip
    if cleared := rules.cleared.intersection(map(_letters, terms.known_as)):
        log.warning("prompts.licenses.cleared lets source %s pass whatever `forbidden` says: %s", terms.name, *cleared)


def _spdx_id(entry: str) -> str:
    with suppress(*UNPARSABLE):
        expression = _parsed(entry)
        is_one = expression is not None and not isinstance(expression, (_licensing().AND, _licensing().OR))
        if is_one and not _licensing().unknown_license_keys(expression):
            return str(expression).lower()
    raise InputError(
        f"prompts.licenses.allowed holds {entry!r}, which is not an SPDX id; write one such as MIT "
        f"(https://spdx.org/licenses), or name other terms in prompts.licenses.allowed_terms"
    )


def spdx_ids(license: str) -> list[str]:
    """Return the SPDX ids in an expression, in its order; empty for other terms."""
    try:
        expression = _parsed(license)
        unknown = set(_licensing().unknown_license_keys(expression))
        return [key for key in _licensing().license_keys(expression) if key not in unknown]
    except UNPARSABLE:
        return []


def _spaced(license: str) -> str:
    return " ".join(license.lower().split())


def _letters(name: str) -> str:
    """Return one form for "ShareGPT_V3 unfiltered", "sharegpt-v3.unfiltered" and full-width letters."""
    return "".join(filter(str.isalnum, unicodedata.normalize("NFKC", name).casefold()))


def _pattern(match: str) -> str:
    """Return the regular expression of a shell-like pattern for such a form."""
    parts = re.split(r"(\[[^]]*\]|[*?])", match)
    return translate("".join(part if index % 2 else _letters(part) for index, part in enumerate(parts)))


_licensing: Callable[[], Any] = cache(get_spdx_licensing)


@lru_cache(maxsize=4096)  # many rows share few licences
def _parsed(license: str) -> Any:
    return _licensing().parse(license)
