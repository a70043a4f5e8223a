"""The plain target and the head under the same loads, each load written as soon as it is measured."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from eagle3.engine.adaptive import require_adaptive
from eagle3.engine.endpoint import is_reachable, server_information
from eagle3.engine.process import Server
from eagle3.engine.timed import ServedAnswer
from eagle3.errors import InputError
from eagle3.serving.server.load import Agreement, LoadResult, PlainAnswers, measure_load, repeat_prompts
from eagle3.settings.engine import LaunchSettings
from eagle3.settings.serving import BenchSettings, Side
from eagle3.storage.files import json_line, read_jsonl, with_filename

RESULTS = "results.jsonl"


@dataclass(frozen=True)
class MeasuredLoad:
    """One load on one server: a line of results.jsonl."""

    side: Side
    prompt_set: str
    concurrency: int
    repeat: int
    result: LoadResult

    def to_json(self) -> dict[str, Any]:
        """Return numbers only: answers may be a user's text, so no token id is kept."""
        row = asdict(self)
        for answer in row["result"]["answers"]:
            del answer["output_ids"]
        return row

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> Self:
        result = row["result"]
        read = {
            "answers": [ServedAnswer(**each) for each in result["answers"]],
            "agreement": Agreement(**result["agreement"]),
        }
        return cls(**row | {"result": LoadResult(**result | read)})


@dataclass(frozen=True)
class RunningServer:
    """A server that answers; `failure` makes what to raise if it no longer does."""

    side: Side
    url: str
    failure: Callable[[], InputError]


@dataclass(frozen=True)
class BenchPlan:
    """What is measured on each server. `prompts` maps the name of a set to token ids, `sampling` is as SGLang's
    `sampling_params`."""

    settings: BenchSettings
    prompts: Mapping[str, Sequence[list[int]]]
    sampling: Mapping[str, Any]

    def requests(self, prompt_set: str, concurrency: int) -> list[list[int]]:
        """Return the set's prompts, repeated where places would otherwise stand empty for most of the time."""
        return repeat_prompts(self.prompts[prompt_set], at_least=self.settings.requests_per_place * concurrency)


# --- servers ---------------------------------------------------------------------------------------------------------


def measure_launched(
    launch: LaunchSettings,
    commands: Mapping[Side, list[str]],
    plan: BenchPlan,
    folder: Path,
    information: dict[Side, dict[str, Any]],
) -> None:
    """Start the servers one after the other, each for all its loads; `information` receives what they report."""
    plain_answers = PlainAnswers(plan.sampling)
    for side, command in commands.items():
        with Server(launch, command, log=folder / f"server_{side}.log", name=f"the {side} server") as server:
            information[side] = server_information(server.url)
            if side == "adaptive":
                require_adaptive(information[side], name=server.name)
            measure_all([RunningServer(side, server.url, server.failure)], plan, plain_answers, folder / RESULTS)


def measure_running(plan: BenchPlan, folder: Path, information: dict[Side, dict[str, Any]]) -> None:
    """Measure servers that are already running; the same repeat of a load runs on one right after the other."""
    for side, url in plan.settings.urls.items():
        information[side] = server_information(url)
        if side == "adaptive":
            require_adaptive(information[side], name=f"bench.adaptive_url={url}")
    if information.get("plain", {}).get("speculative_algorithm"):
        given = f"bench.plain_url={plan.settings.plain_url}"
        raise InputError(f"{given} drafts already: name a server that was started without head")
    running = [RunningServer(side, url, _unreachable(side, url)) for side, url in plan.settings.urls.items()]
    measure_all(running, plan, PlainAnswers(plan.sampling), folder / RESULTS)


def _unreachable(side: Side, url: str) -> Callable[[], InputError]:
    return lambda: InputError(f"bench.{side}_url={url} answers no more; start it again and see its log")


# --- loads -----------------------------------------------------------------------------------------------------------


def measure_all(running: Sequence[RunningServer], plan: BenchPlan, plain_answers: PlainAnswers, results: Path) -> None:
    """Measure every load on every server, in repeats; raise once a server has died, when what was measured is kept."""
    for repeat in range(plan.settings.repeats):
        for prompt_set in plan.prompts:
            for concurrency in plan.settings.concurrency:
                # The order changes with the repeat, so that neither server always comes second.
                for server in running if repeat % 2 == 0 else reversed(running):
                    result = _measure(server, plan, plain_answers, prompt_set, concurrency)
                    append(results, MeasuredLoad(server.side, prompt_set, concurrency, repeat, result))
                    _require_answers(server, result)


def _require_answers(server: RunningServer, result: LoadResult) -> None:
    if result.failed and not is_reachable(server.url):
        raise server.failure()
    if not result.complete:
        raise InputError(
            f"{server.url}: all {len(result.failed)} requests of a load failed ({result.failed[0].error}); see that it "
            f"serves target.path, or raise bench.timeout_s"
        )


def _measure(
    server: RunningServer, plan: BenchPlan, plain_answers: PlainAnswers, prompt_set: str, concurrency: int
) -> LoadResult:
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


def append(results: Path, load: MeasuredLoad) -> None:
    """Add a line and see it on disk before the next load starts."""
    with with_filename(results), results.open("ab") as file:
        file.write(json_line(load.to_json()))
        file.flush()
        os.fsync(file.fileno())


def read_results(results: Path) -> list[MeasuredLoad]:
    """Return what was measured so far; nothing where the file is not there yet."""
    return [MeasuredLoad.from_json(row) for row in read_jsonl(results)] if results.exists() else []
