"""One draft setting, or the plain target, timed on a real server under the user's load."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from eagle3.engine.command import launch_command
from eagle3.engine.draft import Draft
from eagle3.engine.endpoint import is_reachable
from eagle3.engine.process import Server
from eagle3.errors import InputError
from eagle3.serving.bench.stats import summarise
from eagle3.serving.server.load import LoadResult, measure_load, repeat_prompts
from eagle3.serving.server.same_answers import PlainAnswers
from eagle3.serving.tune.predict import Gain, Setting
from eagle3.settings.engine import LaunchSettings


@dataclass(frozen=True)
class LoadTiming:
    """Numbers of a load. `seconds_per_token` is the median over answers of their time per output token.

    `gain`, and `per_depth`, the share of verifications that accepted at least 1, 2, … drafts, are by the server's own
    counts; None and empty without a head. `same_answers` is the share that is the plain server's answer."""

    seconds_per_token: float
    tokens_per_second: float
    gain: Gain | None
    per_depth: list[float]
    same_answers: float | None
    requests: int
    failed: int

    @property
    def verification_seconds(self) -> float:
        assert self.gain is not None
        return self.seconds_per_token * self.gain.tokens


def timing_of(result: LoadResult) -> LoadTiming:
    """Sum up a load; InputError where no answer has a second token."""
    numbers = summarise([result])
    if numbers.tpot is None:
        reason = ", ".join(numbers.errors) or "all answers are one token long"
        raise InputError(f"none of {numbers.requests} answers can be timed: {reason}")
    gain = None
    if numbers.accept_length is not None:
        tokens = sum(answer.output_tokens - 1 for answer in result.complete)  # the first is prefill's
        gain = Gain(numbers.accept_length, tokens / sum(answer.verify_ct for answer in result.complete))
    return LoadTiming(
        numbers.tpot.median,
        numbers.throughput,
        gain,
        numbers.per_depth,
        numbers.same_answers,
        numbers.requests,
        numbers.failed,
    )


Timer = Callable[[Setting | None], LoadTiming]


@dataclass(frozen=True, kw_only=True)
class ServerTimer:
    """Starts a server with a setting (None: the plain target), loads it with the prompts, stops it."""

    launch: LaunchSettings
    target: str
    revision: str | None
    head: str
    prompts: Sequence[list[int]]
    concurrency: int
    requests_per_place: int
    sampling: Mapping[str, Any]
    warmup: int
    timeout_s: float
    log_dir: Path

    @cached_property
    def plain_answers(self) -> PlainAnswers:
        return PlainAnswers(self.sampling)

    def command(self, setting: Setting | None) -> list[str]:
        draft = Draft(head=self.head, **setting._asdict()) if setting else None
        return launch_command(self.launch, target=self.target, revision=self.revision, draft=draft)

    def __call__(self, setting: Setting | None) -> LoadTiming:
        return self.at_loads(setting, [self.concurrency])[self.concurrency]

    def at_loads(self, setting: Setting | None, loads: Sequence[int]) -> dict[int, LoadTiming]:
        """Time one server with each of `loads` requests at a time."""
        name = "-".join(map(str, setting)) if setting else "plain"
        log = self.log_dir / f"{name}.log"
        with Server(self.launch, self.command(setting), log=log, name=f"server {name}") as server:
            return {load: self._timed(server, load, plain=setting is None) for load in loads}

    def _timed(self, server: Server, concurrency: int, *, plain: bool) -> LoadTiming:
        requests = repeat_prompts(self.prompts, at_least=self.requests_per_place * concurrency)
        result = measure_load(
            server.url,
            requests,
            concurrency=concurrency,
            sampling=self.sampling,
            warmup=self.warmup,
            timeout_s=self.timeout_s,
            progress=f"time {server.name} x{concurrency}",
        )
        if result.failed and not is_reachable(server.url):
            raise server.failure()
        found = timing_of(self.plain_answers.compared(result, requests, plain=plain))
        if not plain and found.gain is None:
            raise InputError(f"{server.name} counted no verification, so it did not draft; look into {server.log}")
        return found
