"""Checks at start-up that an installed library has the parts that we use without a promise that they stay."""

import inspect
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pkgutil import resolve_name

from eagle3.errors import InputError, first_line

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Library:
    """A package from PyPI, the range of versions that the tests run with, and its private parts that we use.

    A part is `module:name.attribute`, or `module:name.function(argument)` where we pass that argument.
    """

    package: str
    oldest: str
    newest: str  # a later patch release of it is supported too
    parts: tuple[str, ...]

    def require(self) -> None:
        """Raise InputError for an installation that is too old or lacks a part; warn of one newer than those tested."""
        installed = numbers(version(self.package))
        if installed < numbers(self.oldest):
            raise self.unsupported("is too old")
        for part in self.parts:
            if not has_part(part):
                raise self.unsupported(f"has no {part}")
        if installed[: len(numbers(self.newest))] > numbers(self.newest):
            found, tested = version(self.package), self.newest
            log.warning("%s %s is newer than %s, the newest release that is tested", self.package, found, tested)

    @contextmanager
    def uses(self) -> Iterator[None]:
        """Turn the error of a missing module, name or attribute into the InputError of `require`."""
        try:
            yield
        except (ImportError, AttributeError) as error:
            raise self.unsupported(f"does not fit ({first_line(error)})") from error

    def unsupported(self, reason: str) -> InputError:
        """Return the error for an installation: what is wrong, which versions are supported, what to install."""
        major, minor = numbers(self.newest)[:2]
        return InputError(
            f"{self.package} {version(self.package)} {reason}; {self.package} {self.oldest} to {self.newest} is "
            f"supported: pip install '{self.package}>={self.oldest},<{major}.{minor + 1}'"
        )


def numbers(release: str) -> tuple[int, ...]:
    """Turn 0.5.17.post1 into (0, 5, 17)."""
    return tuple(map(int, re.findall(r"\d+", release)[:3]))


def has_part(part: str) -> bool:
    """Say whether an installed library has a part."""
    name, _, argument = part.rstrip(")").partition("(")
    try:
        found = resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return not argument or argument in inspect.signature(found).parameters
