"""action=watch: read the server again and again until the time is over or Ctrl-C."""

import logging
import time
from pathlib import Path

from eagle3.errors import InputError, Interrupted
from eagle3.serving.watch.counts import Counts, NothingToRead, Unavailable, read_counts
from eagle3.serving.watch.output import Output
from eagle3.serving.watch.reading import Alarm, Reading, reading_of, restarted
from eagle3.serving.watch.settings import WatchSettings, baseline_of

log = logging.getLogger(__name__)
LONGEST_WAIT_S = 300.0  # between looks at a server that is gone, unless every_s is longer


def watch(settings: WatchSettings, head: str | None, *, folder: Path) -> None:
    """Write readings into `folder` and say what they mean; Interrupted at Ctrl-C, InputError where none can be had."""
    if settings.url is None:
        raise InputError("watch.url is not set; give the running server, e.g. watch.url=http://127.0.0.1:30000")
    baseline = baseline_of(settings, head)
    alarm = Alarm(baseline=baseline, drop=settings.drop, window=settings.window)
    watcher = Watcher(settings, settings.url.rstrip("/"), alarm, Output(folder, head, baseline, alarm))
    log.info(
        "%s: accept length below %.3f counts as fallen; page: %s", watcher.url, alarm.threshold, watcher.output.page
    )
    end = time.monotonic() + settings.for_s if settings.for_s is not None else float("inf")
    try:
        while True:
            watcher.look()
            wait = watcher.wait_s()
            if time.monotonic() + wait >= end:
                return
            time.sleep(wait)
    except KeyboardInterrupt:
        raise Interrupted(f"stopped; the readings are in {folder}, hydra.run.dir={folder} goes on with them") from None


class Watcher:
    """What is kept from one look at the server to the next."""

    def __init__(self, settings: WatchSettings, url: str, alarm: Alarm, output: Output) -> None:
        self.settings, self.url, self.alarm, self.output = settings, url, alarm, output
        self.before: Counts | None = None
        self.looked = 0.0  # when, by the monotonic clock
        self.failures = 0  # in a row
        self.known = False  # whether it has ever told an accept length

    def look(self) -> None:
        """Take one reading, and say what is new about it."""
        try:
            counts = read_counts(self.url, timeout_s=self.settings.timeout_s)
        except NothingToRead as reason:
            if not self.known:
                raise InputError(f"watch.url={self.url} tells no accept length: {reason}") from None
            self._fail(str(reason))
        except Unavailable as reason:
            self._fail(str(reason))
        else:
            self._take(counts)

    def wait_s(self) -> float:
        """Return the seconds until the next look: longer from failure to failure."""
        longest = max(self.settings.every_s, LONGEST_WAIT_S)
        return min(self.settings.every_s * 2 ** min(self.failures, 30), longest)

    def _fail(self, reason: str) -> None:
        if self.failures == 0:
            log.warning("%s: %s; waiting for it", self.url, reason)
        self.failures += 1
        self.output.add(Reading(time=time.time(), error=reason))

    def _take(self, counts: Counts) -> None:
        now = time.monotonic()
        if self.failures:
            log.info("%s answers again", self.url)
        if not self.known and counts.since_start:
            log.warning(
                "%s gives no accept length in /metrics: that of /server_info is the mean since its start, which falls "
                "slowly; start it with --enable-metrics (launch.extra_flags={enable-metrics: true})", self.url,
            )  # fmt: skip
        if self.before is not None and restarted(self.before, counts):
            log.warning("%s was restarted: its counters began anew, and so does the window", self.url)
            self.before = None
            self.alarm.forget()
        reading = reading_of(self.before, counts, time=time.time(), seconds=now - self.looked)
        self.before, self.looked, self.failures, self.known = counts, now, 0, True
        changed = self.alarm.changed(reading)
        self.output.add(reading)
        if changed:
            self._say_change()

    def _say_change(self) -> None:
        mean, threshold = self.alarm.mean, self.alarm.threshold
        if self.alarm.fallen:
            log.warning(
                "accept length %.3f over %d readings, below %.3f: adapt the head to today's traffic: %s",
                mean, self.settings.window, threshold, self.output.command,
            )  # fmt: skip
        else:
            log.info("accept length %.3f has recovered, %.3f or more", mean, threshold)
