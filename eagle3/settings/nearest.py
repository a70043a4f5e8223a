"""Keys and options that somebody may have meant."""

from collections.abc import Sequence
from difflib import get_close_matches

LIKE = 0.7  # difflib's ratio, from which two names are one with a slip


def did_you_mean(given: str, known: Sequence[str]) -> str:
    """Return ` (did you mean …?)` with the nearest name, or nothing. A key without its groups finds those with it."""
    known = [key for key in known if key != given]  # a YAML file may set a key that nothing takes
    if "/" in given:  # a group
        known = [key.replace(".", "/") for key in known]
    inside = [key for key in known if key.endswith(f".{given}")]
    alike = inside[:3] or get_close_matches(given, known, n=1, cutoff=LIKE) or _by_last_word(given, known)
    return f" (did you mean {' or '.join(alike)}?)" if alike else ""


def _by_last_word(given: str, known: Sequence[str]) -> list[str]:
    """Of `weight_decya`, or of a key below another group."""
    by_word = {key.rpartition(".")[2]: key for key in reversed(known)}
    return [by_word[word] for word in get_close_matches(given.rpartition(".")[2], list(by_word), n=1, cutoff=LIKE)]
