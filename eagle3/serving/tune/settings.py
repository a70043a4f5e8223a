"""What tune chooses among, and how: keys of conf/serve/tune.yaml."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class TuneSettings:
    """The keys of the same names in conf/serve/tune.yaml."""

    concurrency: int
    loads: list[int] | None
    steps: list[int]
    topk: list[int]
    draft_tokens: list[int]
    evidence: str
    batch_size: int
    timed: int
    requests_per_place: int
    warmup: int
    timeout_s: float
    assumed: Mapping[str, float]
    rows: int
