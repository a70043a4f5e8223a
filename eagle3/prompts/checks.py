"""The one place where a prompt passes or not: a list of checks, each giving the reason of refusal or None."""

from collections.abc import Callable
from typing import Any

from license_expression import ExpressionError, get_spdx_licensing

from eagle3.errors import InputError
from eagle3.prompts.prompt import Prompt

# Besides its own error the parser lets out what "()", "(OR MIT WITH x)" and deep nesting do to it.
UNPARSABLE = (ExpressionError, IndexError, AssertionError, RecursionError)

Check = Callable[[Prompt], str | None]


def build_checks(*, allowed_licenses: list[str]) -> list[Check]:
    """The checks in the order they are asked; the first reason counts. A filter is one more entry here."""
    return [AllowedLicense(allowed_licenses)]


def refusal(prompt: Prompt, checks: list[Check]) -> str | None:
    return next((reason for check in checks if (reason := check(prompt))), None)


class AllowedLicense:
    """SPDX expressions against an allow-list, case-insensitive: AND needs every licence allowed, OR one of them."""

    def __init__(self, allowed: list[str]):
        if isinstance(allowed, str):
            raise InputError(
                f"prompts.allowed_licenses={allowed} is not a list; write prompts.allowed_licenses=[{allowed}]"
            )
        self.licensing = get_spdx_licensing()
        self.reasons: dict[str, str | None] = {}  # many rows share few licences: each is parsed once
        self.allowed = {self._entry(entry) for entry in allowed}

    def __call__(self, prompt: Prompt) -> str | None:
        if not prompt.license or not prompt.license.strip():
            return "license missing"
        if prompt.license not in self.reasons:
            self.reasons[prompt.license] = self._reason(prompt.license)
        return self.reasons[prompt.license]

    def _entry(self, entry: str) -> str:
        try:
            expression = self.licensing.parse(entry)
        except UNPARSABLE:
            expression = None
        if expression is None:
            raise InputError(f"prompts.allowed_licenses holds {entry!r}, no licence name; write SPDX ids such as MIT")
        return str(expression).lower()

    def _reason(self, license: str) -> str | None:
        try:
            expression = self.licensing.parse(license)
            if self._permits(expression):
                return None
            unknown = {key.lower() for key in self.licensing.unknown_license_keys(expression)}
            # A name that SPDX does not know is the row's own text, which the rejects never quote.
            return "license unknown" if unknown - self.allowed else f"license not allowed: {expression}"
        except UNPARSABLE:
            return "license unparsable"

    def _permits(self, expression: Any) -> bool:
        if isinstance(expression, self.licensing.AND):
            return all(self._permits(part) for part in expression.args)
        if isinstance(expression, self.licensing.OR):
            return any(self._permits(part) for part in expression.args)
        return str(expression).lower() in self.allowed
