"""What `action=watch` reads, how often, and when it says that acceptance has fallen."""

from dataclasses import dataclass
from pathlib import Path

from eagle3.errors import InputError
from eagle3.serving.head.files import read_without_weights


@dataclass(frozen=True, kw_only=True)
class WatchSettings:
    """Keys of conf/serve/watch.yaml. `drop` is a share of the baseline, `window` counts readings."""

    url: str | None
    every_s: float
    for_s: float | None
    baseline: float | None
    drop: float
    window: int
    timeout_s: float


def baseline_of(settings: WatchSettings, head: str | None) -> float:
    """Return the accept length to compare with: the given one, else what the head was measured to accept."""
    if settings.baseline is not None:
        return settings.baseline
    if head is None:
        raise InputError(
            "watch.baseline is not set and no head is given; set it, e.g. watch.baseline=2.5, or head=HEAD"
        )
    record = read_without_weights(Path(head)).record
    if record is None or record.accept_length is None:
        raise InputError(
            f"watch.baseline is not set and head={head} has no accept length in training.json; set watch.baseline to "
            f"what the head accepted when it was good, or export it beside its target, which measures it"
        )
    return record.accept_length.accept_length
