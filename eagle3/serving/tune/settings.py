"""What tune chooses among, and how: keys of conf/serve/tune.yaml, checked before anything is loaded or started."""

from collections.abc import Mapping
from dataclasses import dataclass

from eagle3.errors import InputError

EVIDENCE = ("decoder", "server")
SMALLEST = {"concurrency": 1, "batch_size": 1, "rows": 1, "timed": 0, "warmup": 0, "requests_per_place": 0}


@dataclass(frozen=True, kw_only=True)
class TuneSettings:
    """The keys of the same names in conf/serve/tune.yaml."""

    concurrency: int
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

    def __post_init__(self) -> None:
        if self.evidence not in EVIDENCE:
            raise InputError(f"tune.evidence={self.evidence} is unknown; take one of: {', '.join(EVIDENCE)}")
        if self.evidence == "server" and self.timed < 1:
            raise InputError("tune.evidence=server times at least the longest chain; set tune.timed=1 or more")
        for name, smallest in SMALLEST.items():
            if getattr(self, name) < smallest:
                raise InputError(f"tune.{name}={getattr(self, name)} must be {smallest} or more")
        for name in ("steps", "topk", "draft_tokens"):
            values = getattr(self, name)
            if not isinstance(values, list) or any(not isinstance(one, int) or one < 1 for one in values):
                raise InputError(f"tune.{name}={values} must be a list of numbers from 1 up, e.g. tune.{name}=[4,8]")
        if not self.steps or not self.topk:
            raise InputError(f"tune.steps={self.steps} tune.topk={self.topk}: both need a number, e.g. tune.topk=[1]")
        for name, value in self.assumed.items():
            if value < 0:
                raise InputError(f"tune.assumed.{name}={value} must not be negative")
