"""`action=bench`: from prompts and servers to the report, which covers whatever was measured."""

import logging
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from eagle3.answers.chat import Chat
from eagle3.engine.command import Draft, launch_command, shell_line
from eagle3.errors import InputError, Interrupted
from eagle3.secrets import public
from eagle3.serving.bench.loads import RESULTS, BenchPlan, MeasuredLoad, measure_launched, measure_running, read_results
from eagle3.serving.bench.report import write_bench_report
from eagle3.serving.check.prompts import Conversations, file_conversations, prompt_source
from eagle3.serving.server.launch import prepare, require_head
from eagle3.settings.engine import LaunchSettings
from eagle3.settings.serving import PromptFile, Side
from eagle3.target.files import TargetFiles

log = logging.getLogger(__name__)


def prompt_sets(
    chat: Chat, paths: Mapping[str, str], settings: PromptFile, *, limit: int | None, max_length: int
) -> dict[str, Conversations]:
    """Return the conversations of each set. Those whose first prompt is longer than `max_length` are left out and
    counted in the log. `settings` say how each path is read; their own path does not count."""
    if not paths:
        raise InputError("bench.prompts and prompts.path are not set; try bench.prompts={chat: FILE.jsonl}")
    sets = {}
    for name, path in paths.items():
        source = prompt_source(replace(settings, path=path))
        assert source is not None
        found = file_conversations(chat, source, turns=settings.turns, limit=limit, max_length=max_length)
        left_out = dict(found.left_out) or "none"
        log.info(
            f"{name}: {len(found.first)} conversations of {path}, prompts.turns={settings.turns}, left out: {left_out}"
        )
        sets[name] = found
    return sets


def bench(
    launch: LaunchSettings,
    target: TargetFiles,
    draft: Draft | None,
    plan: BenchPlan,
    *,
    origin: Mapping[str, Any],
    folder: Path,
    dry_run: bool,
) -> None:
    """Measure the servers that run already, or start both; the verdict goes to stdout, the rest to `folder`.

    `draft` may be None only if they run already. `origin` goes into the report: commit, command, machine, versions.
    When a server dies or somebody presses Ctrl-C, the report is written of what was measured before."""
    commands = {} if plan.settings.urls else bench_commands(launch, target, draft)
    if dry_run:
        if commands:
            require_head(launch, target, draft)
        print(public("\n".join(shell_line(launch, command) for command in commands.values())))
        return
    if (folder / RESULTS).exists():
        raise InputError(f"{folder} holds the results of another bench run; name a new folder: hydra.run.dir=DIR")
    facts = gather_facts(target, plan, commands, origin)
    try:
        if commands:
            launch.require_room(max(plan.settings.concurrency), setting="the highest of bench.concurrency")
            prepare(launch, target, draft)
            measure_launched(launch, commands, plan, folder, facts["server_info"])
        else:
            measure_running(plan, folder, facts["server_info"])
    except KeyboardInterrupt:
        raise Interrupted(f"what was measured before is in {folder}") from None
    finally:
        if loads := read_results(folder / RESULTS):
            facts["notes"] = find_notes(loads, facts, plan) or "none"
            print(write_bench_report(loads, facts, folder))
            print(f"report: {folder / 'report.md'}", flush=True)


def gather_facts(
    target: TargetFiles, plan: BenchPlan, commands: Mapping[Side, list[str]], origin: Mapping[str, Any]
) -> dict[str, Any]:
    """Return facts for the report. Variables of the servers' environment may be secrets and are left out."""
    return {
        **origin,
        "target": target.path,
        "sampling": dict(plan.sampling),
        "turns": plan.turns,
        "conversations": {name: len(first) for name, first in plan.conversations.items()},
        "servers": {side: public(shlex.join(command)) for side, command in commands.items()} or plan.settings.urls,
        "server_info": {},  # filled when they answer
    }


def bench_commands(launch: LaunchSettings, target: TargetFiles, draft: Draft | None) -> dict[Side, list[str]]:
    return {"plain": launch_command(launch, target, None), "head": launch_command(launch, target, draft)}


def find_notes(loads: Sequence[MeasuredLoad], facts: Mapping[str, Any], plan: BenchPlan) -> dict[str, str]:
    """Return what makes the numbers less comparable than they look."""
    found = {}
    if not all(load.result.cache_flushed for load in loads):
        found["prefix cache"] = "a server refused to empty it: times to first token profit from earlier requests"
    ends = [answer.finish_reason for load in loads for answer in load.result.complete]
    if 2 * (cut := ends.count("length")) > len(ends):
        found["short answers"] = (
            f"{cut} of {len(ends)} were cut at max_new_tokens={plan.sampling['max_new_tokens']}: with short answers a "
            f"busy server spends much of its time starting requests; set max_new_tokens to the length of yours"
        )
    most_requests = plan.settings.requests_per_place * max(plan.settings.concurrency)
    for name, conversations in plan.conversations.items():
        if most_requests > len(conversations):
            found[name] = (
                "some conversations were asked again within a load: the prefix cache shortens their time to first token"
            )
    for side, information in facts["server_info"].items():
        room = information.get("max_running_requests")
        if room is not None and room < max(plan.settings.concurrency):
            found[f"{side} server"] = f"runs {room} requests at most: above that concurrency they wait in its queue"
        if information.get("disable_overlap_schedule"):
            found[f"{side} server's scheduler"] = "the overlap scheduler is off"
    return found
