"""One bar over all that is done, with the rate of tokens, wherever it is done."""

import logging
import threading
import time
from dataclasses import dataclass, field
from typing import Protocol, Self

from eagle3.progress import Bar

log = logging.getLogger(__name__)


class Progress(Protocol):
    """Is told what has ended and how many tokens that were, as soon as it is known."""

    note: str  # beside the rate: what does not work just now

    def add(self, *, ended: int = 0, tokens: int = 0) -> None: ...


class Meter:
    """A `Progress` that shows a bar."""

    def __init__(self, total: int, *, desc: str, unit: str, of: str) -> None:
        """`of` names the tokens."""
        self.desc, self.of, self.note = desc, of, ""
        self.tokens, self.since, self.last = 0, 0.0, 0.0
        self.bar = Bar(total=total, desc=desc, unit=unit, smoothing=0.05)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.close()
        if self.tokens:
            log.info("%s: %.0f %s/s since the first", self.desc, self.rate, self.of)

    def add(self, *, ended: int = 0, tokens: int = 0) -> None:
        if self.since:
            self.tokens += tokens
        elif tokens:  # from here on: what came before is the start of servers, and what it made of tokens
            self.since = time.perf_counter()
        self.last = time.perf_counter()
        said = [f"{self.rate:.0f} {self.of}/s"] if self.since else []
        self.bar.set_postfix_str(", ".join(filter(None, [*said, self.note])), refresh=False)
        self.bar.update(ended)

    @property
    def rate(self) -> float:
        """Tokens a second, from the first to the last that came."""
        return self.tokens / max(self.last - self.since, 1e-9) if self.since else 0


@dataclass
class Tally:
    """A `Progress` that remembers, for another thread that asks now and then."""

    ended: int = 0
    tokens: int = 0
    note: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, *, ended: int = 0, tokens: int = 0) -> None:
        with self.lock:
            self.ended += ended
            self.tokens += tokens

    def take(self) -> dict[str, int]:
        """Return what has come since the last call."""
        with self.lock:
            taken = {"ended": self.ended, "tokens": self.tokens}
            self.ended = self.tokens = 0
        return taken
