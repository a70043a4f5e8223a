"""Whether a row may be used: SPDX expressions against an allow-list, and sources refused by name."""

import re
from dataclasses import dataclass
from fnmatch import translate
from functools import cache, lru_cache
from typing import Any

from license_expression import ExpressionError, get_spdx_licensing

from eagle3.errors import InputError
from eagle3.prompts.checks import Verdict
from eagle3.prompts.licenses.terms import SourceTerms
from eagle3.prompts.reading.prompt import Prompt

# Besides its own error the parser lets out what "()", "(OR MIT WITH x)" and deep nesting do to it.
UNPARSABLE = (ExpressionError, IndexError, AssertionError, RecursionError)


@dataclass(frozen=True, kw_only=True)
class ForbiddenSource:
    """Sources whose terms forbid training, by shell-like patterns on their names."""

    name: str
    match: list[str]
    reason: str


class LicenseRules:
    """What conf/prompts/licenses says; case never matters.

    "A AND B" needs both licences allowed, "A OR B" one of them; a licence that nobody allowed is refused. A source on
    the `forbidden` list is refused whatever its licence says, unless `cleared` holds one of its names.
    """

    def __init__(
        self,
        *,
        allowed: list[str],
        allowed_terms: list[str],
        aliases: dict[str, str],
        forbidden: list[dict],
        cleared: list[str],
        free_of_credit: list[str],
    ):
        self.allowed = {_spdx_id(entry) for entry in allowed} | {_spelling(term) for term in allowed_terms}
        self.aliases = {_spelling(alias): id.lower() for alias, id in aliases.items()}
        self.forbidden = [ForbiddenSource(**entry) for entry in forbidden]
        self.patterns = [
            re.compile("|".join(translate(_dashed(match)) for match in entry.match)) for entry in self.forbidden
        ]
        self.cleared = {_dashed(name) for name in cleared}
        self.free_of_credit = {_spelling(license) for license in free_of_credit}  # for attribution.txt

    def license_refusal(self, license: str | None) -> str | None:
        """Say why rows of this licence are refused, never with words that only the row knows; None: they pass."""
        if not license or not license.strip():
            return "license missing"
        spelling = _spelling(license)
        if self.aliases.get(spelling, spelling) in self.allowed:
            return None
        try:
            expression = _parsed(license)
            if self._permits(expression):
                return None
            unknown = {self._id(key) for key in _licensing().unknown_license_keys(expression)}
            ours = self.allowed.union(self.aliases.values())
            return "license unknown" if unknown - ours else f"license not allowed: {expression}"
        except UNPARSABLE:
            return "license unparsable"

    def source_refusal(self, *names: str) -> str | None:
        """Say why a source with these names is refused, by the first entry that fits one of them; None: it passes."""
        dashed = [_dashed(name) for name in names]
        if self.cleared.intersection(dashed):
            return None
        for entry, pattern in zip(self.forbidden, self.patterns, strict=True):
            if any(pattern.match(name) for name in dashed):
                return f"source forbidden: {entry.name}: {entry.reason}"
        return None

    def _permits(self, expression: Any) -> bool:
        if isinstance(expression, _licensing().AND):
            return all(self._permits(part) for part in expression.args)
        if isinstance(expression, _licensing().OR):
            return any(self._permits(part) for part in expression.args)
        return self._id(str(expression)) in self.allowed

    def _id(self, symbol: str) -> str:
        return self.aliases.get(symbol.lower(), symbol.lower())


class LicenseCheck:
    """The rules for the rows of one source: its own names, each row's `source`, each row's licence."""

    name = "licenses"

    def __init__(self, rules: LicenseRules, terms: SourceTerms):
        self.rules = rules
        self.source = terms.name
        self.source_refusal = rules.source_refusal(*terms.known_as)

    def __call__(self, prompt: Prompt) -> Verdict:
        reason = self.source_refusal
        if reason is None and (names := {prompt.source, *prompt.known_as} - {self.source}):
            reason = self.rules.source_refusal(*sorted(names))
        return Verdict(reason=reason or self.rules.license_refusal(prompt.license))


def _spdx_id(entry: str) -> str:
    try:
        expression = _parsed(entry)
        known = expression is not None and not _licensing().unknown_license_keys(expression)
    except UNPARSABLE:
        known = False
    if not known or isinstance(expression, (_licensing().AND, _licensing().OR)):
        raise InputError(
            f"prompts.licenses.allowed holds {entry!r}, which is no SPDX id; write one such as MIT "
            f"(https://spdx.org/licenses), or name other terms in prompts.licenses.allowed_terms"
        )
    return str(expression).lower()


def spdx_ids(license: str) -> list[str]:
    """Return the SPDX ids that an expression names, in its order; empty for other terms."""
    try:
        expression = _parsed(license)
        unknown = set(_licensing().unknown_license_keys(expression))
        return [key for key in _licensing().license_keys(expression) if key not in unknown]
    except UNPARSABLE:
        return []


def _spelling(license: str) -> str:
    return " ".join(license.lower().split())


def _dashed(name: str) -> str:
    """Spell "ShareGPT_V3 unfiltered" and "sharegpt-v3-unfiltered" as one name."""
    return re.sub(r"[\s_]+", "-", name.lower())


@lru_cache(maxsize=4096)  # many rows share few licences
def _parsed(license: str) -> Any:
    return _licensing().parse(license)


@cache
def _licensing() -> Any:
    return get_spdx_licensing()
