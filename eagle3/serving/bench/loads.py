"""The plain target and the head under the same loads, each load written as soon as it is measured."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from eagle3.engine.endpoint import is_reachable, server_information
from eagle3.engine.process import Server
from eagle3.errors import InputError
from eagle3.serving.check.turns import Turn
from eagle3.serving.server.load import LoadResult, PlainAnswers
from eagle3.settings.engine import LaunchSettings
from eagle3.settings.serving import BenchSettings, Side, Turns
from eagle3.storage.files import append_lines, json_line, read_jsonl

RESULTS = "results.jsonl"


@dataclass(frozen=True)
class MeasuredLoad:
    """One load on one server: a line of results.jsonl."""

    side: Side
    prompt_set: str
    concurrency: int
    start: int
    repeat: int
    result: LoadResult

    def to_json(self) -> dict[str, Any]:
        """Return numbers only: answers may be a user's text, so no token id is kept, and no time of a part."""
        row = asdict(self)
        for answer in row["result"]["answers"]:
            del answer["prompt_ids"], answer["output_ids"], answer["events_s"]
        return row


@dataclass(frozen=True)
class RunningServer:
    """A server that somebody else has started."""

    name: str
    url: str

    def failure(self) -> InputError:
        return InputError(f"{self.name} no longer answers; read its log and restart it")


@dataclass(frozen=True)
class BenchPlan:
    """Loads of each server. `conversations` maps the name of a set to first turns; `turns` says whether others follow.
    `sampling` is as SGLang's `sampling_params`."""

    settings: BenchSettings
    conversations: Mapping[str, Sequence[Turn]]
    turns: Turns
    sampling: Mapping[str, Any]


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
    for start in range(plan.settings.starts):
        for side in in_turn(commands, start):
            log = folder / f"server_{side if start == 0 else f'{side}_{start + 1}'}.log"
            with Server(launch, commands[side], log=log, name=f"the {side} server") as server:
                information[side] = server_information(server.url)
                measure_all({side: server}, plan, plain_answers, folder / RESULTS, start=start)


def measure_running(plan: BenchPlan, folder: Path, information: dict[Side, dict[str, Any]]) -> None:
    """Measure servers that are already running; the same repeat of a load runs on one right after the other."""
    servers = {side: RunningServer(f"bench.{side}_url={url}", url) for side, url in plan.settings.urls.items()}
    for side, server in servers.items():
        information[side] = server_information(server.url)
    if information.get("plain", {}).get("speculative_algorithm"):
        given = f"bench.plain_url={plan.settings.plain_url}"
        raise InputError(f"{given} already uses a draft head; give a server started without one")
    measure_all(servers, plan, PlainAnswers(plan.sampling), folder / RESULTS)


# --- loads -----------------------------------------------------------------------------------------------------------


def measure_all(
    servers: Mapping[Side, Server | RunningServer],
    plan: BenchPlan,
    plain_answers: PlainAnswers,
    results: Path,
    *,
    start: int = 0,
) -> None:
    """Measure every load on every server, in repeats; raise once a server has died, when what was measured is kept."""
    for repeat in range(plan.settings.repeats):
        for prompt_set, conversations in plan.conversations.items():
            for concurrency in plan.settings.concurrency:
                for side in in_turn(servers, repeat):
                    server = servers[side]
                    result = plain_answers.measure(
                        server.url,
                        conversations,
                        concurrency,
                        plan.settings,
                        plain=side == "plain",
                        progress=f"{side} {prompt_set} x{concurrency}",
                    )
                    load = MeasuredLoad(side, prompt_set, concurrency, start, repeat, result)
                    append_lines(results, json_line(load.to_json()))  # on disk before the next load starts
                    _require_answers(server, result)


def in_turn(sides: Iterable[Side], number: int) -> list[Side]:
    """Return the sides for the repeat or start of this number: backwards every other time, so that none always comes
    second."""
    return [*sides] if number % 2 == 0 else [*sides][::-1]


def _require_answers(server: Server | RunningServer, result: LoadResult) -> None:
    if result.failed and not is_reachable(server.url):
        raise server.failure()
    if not result.complete:
        raise InputError(
            f"{server.url}: all {len(result.failed)} requests of a load failed ({result.failed[0].error}); see that it "
            f"serves target.path, or raise bench.timeout_s"
        )


def read_results(results: Path) -> list[MeasuredLoad]:
    """Return what was measured so far; nothing where the file is not there yet."""
    return TypeAdapter(list[MeasuredLoad]).validate_python([*read_jsonl(results)]) if results.exists() else []
