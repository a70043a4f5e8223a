"""Readings by time, from one look at the server to the next, and whether acceptance has fallen."""

from collections import deque
from dataclasses import dataclass

from eagle3.serving.watch.counts import Counts


@dataclass(frozen=True, kw_only=True)
class Reading:
    """A line of watch.jsonl. `time` is in seconds since 1970, `throughput` in tokens/s.

    `accept_length` is None where nothing was drafted since the reading before, `error` why there are no numbers."""

    time: float
    accept_length: float | None = None
    throughput: float | None = None
    running: float | None = None
    error: str | None = None


def restarted(before: Counts, now: Counts) -> bool:
    """Say whether something that only counts up has gone down."""
    pairs = ((before.tokens, now.tokens), (before.drafts, now.drafts), (before.accepted, now.accepted))
    return any(earlier is not None and later is not None and later < earlier for earlier, later in pairs)


def reading_of(before: Counts | None, now: Counts, *, time: float, seconds: float) -> Reading:
    """Return the reading of what happened in the `seconds` since `before`, None where that is not known."""
    return Reading(
        time=time, accept_length=_accept_length(before, now), throughput=_throughput(before, now, seconds),
        running=now.running,
    )  # fmt: skip


def _accept_length(before: Counts | None, now: Counts) -> float | None:
    if now.drafts is None:  # SGLang's, which stays as it is while nothing is drafted
        return now.accept_length if now.running or before is None or now != before else None
    if before is None or before.drafts is None or before.accepted is None or now.accepted is None:
        return None
    drafts = now.drafts - before.drafts
    return 1 + (now.accepted - before.accepted) / drafts if drafts > 0 else None


def _throughput(before: Counts | None, now: Counts, seconds: float) -> float | None:
    if now.throughput is not None:
        return now.throughput
    if before is None or before.tokens is None or now.tokens is None or seconds <= 0:
        return None
    return (now.tokens - before.tokens) / seconds


class Alarm:
    """Compares the mean of the last `window` accept lengths with `baseline` less the share `drop`."""

    def __init__(self, *, baseline: float, drop: float, window: int) -> None:
        self.threshold = baseline * (1 - drop)
        self.lengths: deque[float] = deque(maxlen=window)
        self.fallen = False

    @property
    def mean(self) -> float | None:
        """That of a full window."""
        return sum(self.lengths) / len(self.lengths) if len(self.lengths) == self.lengths.maxlen else None

    def changed(self, reading: Reading) -> bool:
        """Take a reading in; say whether acceptance has fallen, or recovered, by it."""
        if reading.accept_length is not None:
            self.lengths.append(reading.accept_length)
        was = self.fallen
        if self.mean is not None:
            self.fallen = self.mean < self.threshold
        return self.fallen is not was

    def forget(self) -> None:
        """Begin a window anew, as after a restart: another head may be served."""
        self.lengths.clear()
