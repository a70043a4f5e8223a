"""One progress bar with the rate of tokens, wherever the work is done."""

import logging
import threading
import time
from dataclasses import dataclass, field
from typing import Protocol, Self

from eagle3.progress import Bar

log = logging.getLogger(__name__)


class Progress(Protocol):
    """Counts items that have ended and their tokens, as soon as each is known."""

    note: str  # shown next to the rate: what does not work at the moment

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
        if self.tokens and self.last - self.since > 1:  # results of one batch come at once: they have no rate
            log.info("%s: %.0f %s/s, counted from the first result", self.desc, self.rate, self.of)

    def add(self, *, ended: int = 0, tokens: int = 0) -> None:
        if self.since:
            self.tokens += tokens
        elif tokens:  # the rate begins here: the time before was the start of servers
            self.since = time.perf_counter()
        self.last = time.perf_counter()
        rate = f"{self.rate:.0f} {self.of}/s" if self.tokens else ""
        self.bar.set_postfix_str(", ".join(filter(None, [rate, self.note])), refresh=False)
        self.bar.update(ended)

    @property
    def rate(self) -> float:
        """Tokens per second, from the first to the last."""
        return self.tokens / max(self.last - self.since, 1e-9) if self.since else 0


@dataclass
class ProgressBuffer:
    """A `Progress` that keeps its counts until another thread takes them."""

    ended: int = 0
    tokens: int = 0
    note: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, *, ended: int = 0, tokens: int = 0) -> None:
        with self.lock:
            self.ended += ended
            self.tokens += tokens

    def take(self) -> dict[str, int]:
        """Return the counts since the last call."""
        with self.lock:
            taken = {"ended": self.ended, "tokens": self.tokens}
            self.ended = self.tokens = 0
        return taken
