"""Times a draft setting, or the plain target, on a real server under the user's load."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from eagle3.draft_shape import Shape
from eagle3.engine.command import launch_command
from eagle3.engine.draft import Draft
from eagle3.engine.endpoint import is_reachable
from eagle3.engine.process import Server
from eagle3.errors import InputError
from eagle3.serving.bench.stats import summarise
from eagle3.serving.server.load import LoadResult, PlainAnswers
from eagle3.settings.engine import LaunchSettings
from eagle3.settings.serving import TuneSettings


@dataclass(frozen=True)
class LoadTiming:
    """Numbers of one load. `seconds_per_token` is the median over answers of their time per output token.

    `accept_length` is by the server's own counts, None without a head. `same_answers` is the share of answers that
    equal the plain server's."""

    seconds_per_token: float
    tokens_per_second: float
    accept_length: float | None
    same_answers: float | None
    requests: int
    failed: int


def timing_of(result: LoadResult) -> LoadTiming:
    """Summarise a load; InputError if no answer has a second token."""
    numbers = summarise([result])
    if numbers.tpot is None:
        reason = ", ".join(numbers.errors) or "all answers are one token long"
        raise InputError(f"none of {numbers.requests} answers can be timed: {reason}")
    return LoadTiming(
        numbers.tpot.median,
        numbers.throughput,
        numbers.accept_length,
        numbers.same_answers,
        numbers.requests,
        numbers.failed,
    )


Timer = Callable[[Shape | None], dict[int, LoadTiming]]  # at each number of concurrent requests


@dataclass(frozen=True, kw_only=True)
class ServerTimer:
    """Starts a server with a setting (None: the plain target), sends it each load, and stops it."""

    settings: TuneSettings
    launch: LaunchSettings
    target: str
    revision: str | None
    head: str
    prompts: Sequence[list[int]]
    sampling: Mapping[str, Any]
    log_dir: Path

    @cached_property
    def plain_answers(self) -> PlainAnswers:
        return PlainAnswers(self.sampling)

    def command(self, setting: Shape | None) -> list[str]:
        draft = Draft(head=self.head, **setting._asdict()) if setting else None
        return launch_command(self.launch, target=self.target, revision=self.revision, draft=draft)

    def __call__(self, setting: Shape | None) -> dict[int, LoadTiming]:
        name = "-".join(map(str, setting)) if setting else "plain"
        log = self.log_dir / f"{name}.log"
        with Server(self.launch, self.command(setting), log=log, name=f"server {name}") as server:
            return {load: self._timed(server, load, plain=setting is None) for load in self.settings.all_loads}

    def _timed(self, server: Server, concurrency: int, *, plain: bool) -> LoadTiming:
        progress = f"time {server.name} x{concurrency}"
        result = self.plain_answers.measure(
            server.url, self.prompts, concurrency, self.settings, plain=plain, progress=progress
        )
        if result.failed and not is_reachable(server.url):
            raise server.failure()
        timing = timing_of(result)
        if not plain and timing.accept_length is None:
            raise InputError(f"{server.name} counted no verification, so it did not draft; see its log {server.log}")
        return timing
