"""What a bench run measures: keys of conf/serve/bench.yaml, checked before a server is started."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from eagle3.errors import InputError

Side = Literal["plain", "head"]  # the plain target's server, and that of the target with the head


@dataclass(frozen=True, kw_only=True)
class BenchSettings:
    """The keys of the same names in conf/serve/bench.yaml."""

    prompts: Mapping[str, str] | None
    concurrency: Sequence[int]
    requests_per_place: int
    repeats: int
    warmup: int
    sampling: Mapping[str, Any] | None
    timeout_s: float
    plain_url: str | None
    head_url: str | None

    def __post_init__(self) -> None:
        if not self.concurrency or min(self.concurrency) < 1 or self.repeats < 1:
            given = f"bench.concurrency={list(self.concurrency)} bench.repeats={self.repeats}"
            raise InputError(f"{given}: at least one of each, from 1 up; try bench.concurrency=[1,8] bench.repeats=3")
        for name in ("requests_per_place", "warmup"):
            if getattr(self, name) < 0:
                raise InputError(f"bench.{name}={getattr(self, name)} must be 0 or more")
        if (self.sampling or {}).get("ignore_eos"):
            raise InputError(
                "bench.sampling holds ignore_eos: what a target says behind its end of turn nobody reads and no head "
                "was trained on; leave it out"
            )

    @property
    def urls(self) -> dict[Side, str]:
        """Servers that run already."""
        given: dict[Side, str | None] = {"plain": self.plain_url, "head": self.head_url}
        return {side: url.rstrip("/") for side, url in given.items() if url is not None}
