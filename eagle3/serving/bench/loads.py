"""The benchmark: the plain target and the head under the same loads, each measurement kept as soon as it is there."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any, Literal, Self

from eagle3.errors import InputError
from eagle3.serving.server.client import Answer
from eagle3.serving.server.command import LaunchSettings
from eagle3.serving.server.load import Agreement, LoadResult, measure_load
from eagle3.serving.server.process import Server, answers, server_information
from eagle3.serving.server.same_answers import PlainAnswers
from eagle3.storage import json_line, read_jsonl, with_filename

Side = Literal["plain", "head"]
RESULTS = "results.jsonl"


@dataclass(frozen=True)
class Measurement:
    """One load on one server: a line of results.jsonl."""

    side: Side
    prompt_set: str
    concurrency: int
    repeat: int
    result: LoadResult

    def to_json(self) -> dict[str, Any]:
        """Numbers only: answers are somebody's text, and leave no token id behind."""
        row = asdict(self)
        for answer in row["result"]["answers"]:
            del answer["output_ids"]
        return row

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> Self:
        result = row["result"]
        read = {
            "answers": [Answer(**each) for each in result["answers"]],
            "agreement": Agreement(**result["agreement"]),
        }
        return cls(**row | {"result": LoadResult(**result | read)})


@dataclass(frozen=True)
class Running:
    """A server that answers; `failure` is what to raise if it no longer does."""

    side: Side
    url: str
    failure: Callable[[], InputError]


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


@dataclass(frozen=True)
class Plan:
    """What is measured on each server: `prompts` maps the name of a set to token ids, `sampling` is as SGLang's
    `sampling_params`."""

    settings: BenchSettings
    prompts: Mapping[str, Sequence[list[int]]]
    sampling: Mapping[str, Any]

    def requests(self, prompt_set: str, concurrency: int) -> list[list[int]]:
        """Every prompt once, and again in turn where the places would otherwise stand empty for most of the time."""
        prompts = self.prompts[prompt_set]
        return list(islice(cycle(prompts), max(len(prompts), self.settings.requests_per_place * concurrency)))


# --- servers ---------------------------------------------------------------------------------------------------------


def measure_launched(
    launch: LaunchSettings,
    commands: Mapping[Side, list[str]],
    plan: Plan,
    folder: Path,
    information: dict[Side, dict[str, Any]],
) -> None:
    """Start the servers one after the other, each for all its measurements; `information` gets what they say of
    themselves."""
    plain_answers = PlainAnswers(plan.sampling)
    for side, command in commands.items():
        with Server(launch, command, log=folder / f"server_{side}.log", name=f"the {side} server") as server:
            information[side] = server_information(server.url)
            measure_all([Running(side, server.url, server.failure)], plan, plain_answers, folder / RESULTS)


def measure_running(plan: Plan, folder: Path, information: dict[Side, dict[str, Any]]) -> None:
    """Servers that run already, each repeat of a load on one right before or behind that on the other."""
    for side, url in plan.settings.urls.items():
        information[side] = server_information(url)
    if information.get("plain", {}).get("speculative_algorithm"):
        given = f"bench.plain_url={plan.settings.plain_url}"
        raise InputError(f"{given} drafts already: name a server that was started without head")
    running = [Running(side, url, _unreachable(side, url)) for side, url in plan.settings.urls.items()]
    measure_all(running, plan, PlainAnswers(plan.sampling), folder / RESULTS)


def _unreachable(side: Side, url: str) -> Callable[[], InputError]:
    return lambda: InputError(f"bench.{side}_url={url} answers no more; start it again and see its log")


# --- measurements ----------------------------------------------------------------------------------------------------


def measure_all(running: Sequence[Running], plan: Plan, plain_answers: PlainAnswers, results: Path) -> None:
    """Every load on every server, in repeats; raises once a server has died, what was measured before is kept."""
    for repeat in range(plan.settings.repeats):
        for prompt_set in plan.prompts:
            for concurrency in plan.settings.concurrency:
                # The order changes with the repeat, so that neither server always comes second.
                for server in running if repeat % 2 == 0 else reversed(running):
                    result = _measure(server, plan, plain_answers, prompt_set, concurrency)
                    append(results, Measurement(server.side, prompt_set, concurrency, repeat, result))
                    _require_answers(server, result)


def _require_answers(server: Running, result: LoadResult) -> None:
    if result.failed and not _reachable(server.url):
        raise server.failure()
    if not result.complete:
        raise InputError(
            f"{server.url}: all {len(result.failed)} requests of a load failed ({result.failed[0].error}); see that it "
            f"serves target.path, or raise bench.timeout_s"
        )


def _measure(server: Running, plan: Plan, plain_answers: PlainAnswers, prompt_set: str, concurrency: int) -> LoadResult:
    requests = plan.requests(prompt_set, concurrency)
    result = measure_load(
        server.url,
        requests,
        concurrency=concurrency,
        sampling=plan.sampling,
        warmup=plan.settings.warmup,
        timeout_s=plan.settings.timeout_s,
        progress=f"{server.side} {prompt_set} x{concurrency}",
    )
    return plain_answers.compared(result, requests, plain=server.side == "plain")


def _reachable(url: str) -> bool:
    try:
        answers(url, "/server_info")
    except (OSError, ValueError):
        return False
    return True


def append(results: Path, measurement: Measurement) -> None:
    """On disk before the next measurement starts."""
    with with_filename(results), results.open("ab") as file:
        file.write(json_line(measurement.to_json()))
        file.flush()
        os.fsync(file.fileno())


def read_results(results: Path) -> list[Measurement]:
    """What was measured so far; nothing where the file is not there yet."""
    return [Measurement.from_json(row) for row in read_jsonl(results)] if results.exists() else []
