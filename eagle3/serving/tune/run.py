"""`action=tune`: from prompts to the flags to serve them with."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from eagle3.engine.command import LaunchSettings
from eagle3.engine.draft import Draft
from eagle3.errors import Interrupted
from eagle3.secrets import public
from eagle3.serving.check.settings import Answering
from eagle3.serving.server.launch import prepare
from eagle3.serving.tune.evidence import decoder_gains
from eagle3.serving.tune.report import advice, failures, settings_table, write_tune_report
from eagle3.serving.tune.search import SearchState, search_settings
from eagle3.serving.tune.settings import TuneSettings
from eagle3.serving.tune.timing import ServerTimer
from eagle3.target.files import TargetFiles


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
) -> SearchState:
    """Search, and print the table and the flags. tune.json, tune.png and the servers' logs go to `folder`.

    `target_settings` load the target for the evidence of our decoder; `origin` goes into tune.json: commit, command,
    machine, versions."""
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
    if settings.timed:  # what the servers lack is said before the decoder's minutes, not after
        launch.require_room(settings.concurrency, setting="tune.concurrency")
        prepare(launch, target, Draft(head=head, steps=1, topk=1, draft_tokens=None))
    conditions = {
        "target": target.path,
        "head": head,
        "prompts": len(prompts),
        "launch": public(shlex.join(timer.command(None))),
        **asdict(answering),
        **asdict(settings),
    }
    kept: list[Path] = []

    def keep(found: SearchState) -> None:
        write_tune_report(found, folder, {**origin, "conditions": conditions})
        kept.append(folder / "tune.json")

    gains = None
    try:
        if settings.evidence == "decoder":
            gains = decoder_gains(settings, target_settings, Path(head), prompts, answering)
        found = search_settings(settings, gains, timer, keep)
    except KeyboardInterrupt:
        known = f"what was found before is in {kept[-1]}" if kept else "nothing was found yet"
        raise Interrupted(f"the search is stopped; {known}") from None
    print(settings_table(found, rows=settings.rows))
    print(failures(found), end="")
    print(advice(found, target=target_settings["path"], head=head, concurrency=settings.concurrency))
    return found
