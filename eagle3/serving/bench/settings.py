"""What a bench run measures: keys of conf/serve/bench.yaml."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

# The plain target's server, that of the target with the head, and the same whose steps change with the load.
Side = Literal["plain", "head", "adaptive"]
SIDES: tuple[Side, ...] = get_args(Side)


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
    adaptive_url: str | None

    @property
    def urls(self) -> dict[Side, str]:
        """Servers that run already."""
        given: dict[Side, str | None] = {
            "plain": self.plain_url,
            "head": self.head_url,
            "adaptive": self.adaptive_url,
        }
        return {side: url.rstrip("/") for side, url in given.items() if url is not None}
