"""Secrets by the rules that others keep: a file in the format of gitleaks, read with Python's expressions."""

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from eagle3.errors import InputError
from eagle3.prompts.privacy.passwords import PLACEHOLDER, entropy
from eagle3.prompts.privacy.recogniser import Action, Recogniser, Span

# RE2 writes "\z" where Python writes "\Z", and lets flags begin inside an expression: Python wants them around a group.
END, POSIX = re.compile(r"\\z"), {"[:alnum:]": "A-Za-z0-9", "[:alpha:]": "A-Za-z", "[:digit:]": "0-9"}
FLAGS = re.compile(r"\(\?([ims]+)\)")


@dataclass(frozen=True)
class Rule:
    pattern: re.Pattern[str]
    group: int  # of the secret in the pattern; 0: the first that is there
    entropy: float
    keywords: tuple[str, ...]  # in lower case; a text without any of them has no secret of this rule

    def secrets(self, text: str) -> Iterator[Span]:
        for match in self.pattern.finditer(text):
            group = self.group or (1 if self.pattern.groups and match[1] else 0)
            if entropy(match[group]) >= self.entropy and not PLACEHOLDER.search(match[group]):
                yield Span(*match.span(group))


class RuleFile(Recogniser):
    """The rules of `path`, e.g. gitleaks' own config/gitleaks.toml: expression, keywords, entropy, group.

    Allow-lists of paths and commits have no meaning here; what cannot be read as a rule is an error.
    """

    entity = "SECRET"

    def __init__(self, *, path: str, action: Action):
        super().__init__(action=action)
        self.path = Path(path).expanduser()
        self.rules  # noqa: B018 a broken file is told before the first row is read

    def __getstate__(self) -> dict:
        return {key: value for key, value in self.__dict__.items() if key != "rules"}

    def files(self) -> list[Path]:
        return [self.path]

    @cached_property
    def rules(self) -> list[Rule]:
        key = f"prompts.privacy.recognisers.rules.path={self.path}"
        try:
            entries = tomllib.loads(self.path.read_text(encoding="utf-8"))["rules"]
            entries = [dict(entry) for entry in entries if "regex" in entry]  # the others look at paths
        except OSError:
            raise InputError(f"{key} cannot be read; name a rule file such as gitleaks' config/gitleaks.toml") from None
        except (ValueError, KeyError, TypeError):
            raise InputError(f"{key} holds no [[rules]] in the format of gitleaks; fetch it again") from None
        return [_rule(key, entry) for entry in entries]

    def find(self, text: str) -> Iterator[Span]:
        lowered = text.lower()
        for rule in self.rules:
            if not rule.keywords or any(keyword in lowered for keyword in rule.keywords):
                yield from rule.secrets(text)


def _rule(key: str, entry: dict[str, Any]) -> Rule:
    expression = END.sub(r"\\Z", entry["regex"])
    for posix, python in POSIX.items():
        expression = expression.replace(posix, python)
    try:
        pattern = re.compile(_with_flags_around(expression))
    except re.error as error:
        raise InputError(
            f"{key}: Python cannot read the expression of rule {entry.get('id')} ({error}); take the rule out"
        ) from None
    keywords = tuple(keyword.lower() for keyword in entry.get("keywords", ()))
    return Rule(pattern, int(entry.get("secretGroup", 0)), float(entry.get("entropy", 0)), keywords)


def _with_flags_around(expression: str) -> str:
    """Put what follows "(?i)" up to the end of its group into "(?i:…)"."""
    while match := FLAGS.search(expression):
        depth, at = 0, match.end()
        while at < len(expression):
            if expression[at] == "\\":
                at += 2
                continue
            if expression[at] == "[":  # brackets in a class are characters
                at = _end_of_class(expression, at)
                continue
            depth += {"(": 1, ")": -1}.get(expression[at], 0)
            if depth < 0:
                break
            at += 1
        inside = expression[match.end() : at]
        expression = f"{expression[: match.start()]}(?{match[1]}:{inside}){expression[at:]}"
    return expression


def _end_of_class(expression: str, start: int) -> int:
    at = start + (3 if expression.startswith("[^]", start) else 2)
    while at < len(expression) and expression[at] != "]":
        at += 2 if expression[at] == "\\" else 1
    return at + 1
