"""`action=tune`: from prompts to the flags to serve them with, at one load or for a server that adapts to many."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from eagle3.engine.draft import Draft
from eagle3.errors import InputError, Interrupted
from eagle3.secrets import public
from eagle3.serving.check.settings import Answering
from eagle3.serving.server.launch import prepare
from eagle3.serving.tune.evidence import decoder_gains
from eagle3.serving.tune.loads import search_loads
from eagle3.serving.tune.loads_report import loads_advice, loads_table, write_loads_report
from eagle3.serving.tune.predict import Gain, Setting
from eagle3.serving.tune.report import REPORT, advice, failures, settings_table, write_tune_report
from eagle3.serving.tune.search import search_settings
from eagle3.serving.tune.timing import ServerTimer
from eagle3.settings.engine import LaunchSettings
from eagle3.settings.serving import TuneSettings
from eagle3.target.files import TargetFiles

Gains = Mapping[Setting, Gain] | None


def tune(
    settings: TuneSettings,
    launch: LaunchSettings,
    target: TargetFiles,
    head: str,
    prompts: Sequence[list[int]],
    answering: Answering,
    *,
    target_settings: Mapping[str, Any],
    origin: Mapping[str, Any],
    folder: Path,
) -> None:
    """Search, and print the table and the flags. tune.json, tune.png, the servers' logs and with tune.loads
    adaptive.json go to `folder`.

    `target_settings` load the target for the evidence of our decoder; `origin` goes into tune.json: commit, command,
    machine, versions."""
    if settings.loads:
        settings = replace(settings, topk=[1])  # SGLang adapts chains alone
    timer = ServerTimer(
        launch=launch,
        target=target.path,
        revision=target.revision,
        head=head,
        prompts=prompts,
        concurrency=settings.concurrency,
        requests_per_place=settings.requests_per_place,
        sampling={"temperature": answering.temperature, "max_new_tokens": answering.max_new_tokens},
        warmup=settings.warmup,
        timeout_s=settings.timeout_s,
        log_dir=folder,
    )
    require_possible(settings, launch, target, head, folder)
    conditions = {
        "target": target.path,
        "head": head,
        "prompts": len(prompts),
        "launch": public(shlex.join(timer.command(None))),
        **asdict(answering),
        **asdict(settings),
    }
    facts = {**origin, "conditions": conditions}
    search = at_loads if settings.loads else at_one_load
    try:
        gains = None
        if settings.evidence == "decoder":
            gains = decoder_gains(settings, target_settings, Path(head), prompts, answering)
        print(search(settings, gains, timer, facts, folder, target=target_settings["path"], head=head))
    except KeyboardInterrupt:
        there = folder / REPORT
        known = f"what was found before is in {there}" if there.exists() else "nothing was found yet"
        raise Interrupted(f"the search is stopped; {known}") from None


def require_possible(
    settings: TuneSettings, launch: LaunchSettings, target: TargetFiles, head: str, folder: Path
) -> None:
    """Raise InputError for what would stop the search, or what the servers lack, before the decoder's minutes."""
    if (folder / REPORT).exists():
        raise InputError(f"{folder / REPORT} is of another search; name a new folder: hydra.run.dir=DIR")
    if settings.loads and not settings.timed:
        raise InputError(
            f"tune.loads={settings.loads} tune.timed=0: steps that change with the load are taken from timings alone; "
            f"set tune.timed=4"
        )
    if settings.timed:
        most = max(settings.loads or [settings.concurrency])
        launch.require_room(most, setting="tune.loads" if settings.loads else "tune.concurrency")
        prepare(launch, target, Draft(head=head, steps=1, topk=1, draft_tokens=None))


def at_one_load(
    settings: TuneSettings, gains: Gains, timer: ServerTimer, facts: Mapping[str, Any], folder: Path, **names: str
) -> str:
    """Search the best setting at tune.concurrency; return the table and the flags."""
    found = search_settings(settings, gains, timer, partial(write_tune_report, folder=folder, conditions=facts))
    said = advice(found, concurrency=settings.concurrency, **names)
    return f"{settings_table(found, rows=settings.rows)}\n{failures(found)}{said}"


def at_loads(
    settings: TuneSettings, gains: Gains, timer: ServerTimer, facts: Mapping[str, Any], folder: Path, **names: str
) -> str:
    """Search the best chain at each of tune.loads; return the table and the command."""
    found = search_loads(settings, gains, timer, partial(write_loads_report, folder=folder, conditions=facts))
    lost = "".join(f"{load} at a time: {words}" for load, state in found.items() if (words := failures(state)))
    return f"{loads_table(found)}\n{lost}{loads_advice(found, folder, **names)}"
