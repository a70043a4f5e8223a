"""`action=tune`: the draft settings to serve with."""

import shlex
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from eagle3.engine.draft import Draft
from eagle3.errors import InputError, Interrupted
from eagle3.secrets import public
from eagle3.serving.check.prompts import Conversations
from eagle3.serving.server.launch import prepare
from eagle3.serving.server.load import PlainAnswers
from eagle3.serving.tune.candidates import decoder_gains
from eagle3.serving.tune.report import REPORT, write_tune_report
from eagle3.serving.tune.search import Findings, search
from eagle3.serving.tune.timing import ServerTimer
from eagle3.settings.engine import LaunchSettings
from eagle3.settings.serving import AnswerSettings, TuneSettings
from eagle3.target.files import TargetFiles


def tune(
    settings: TuneSettings,
    launch: LaunchSettings,
    target: TargetFiles,
    head: str,
    conversations: Conversations,
    answering: AnswerSettings,
    *,
    target_settings: Mapping[str, Any],
    origin: Mapping[str, Any],
    folder: Path,
) -> None:
    """Search, and print the table and the command. tune.json, tune.md, the servers' logs and with tune.loads
    adaptive.json go to `folder`.

    `target_settings` load the target for our decoder; `origin` goes into tune.json: commit, command, machine,
    versions."""
    sampling = answering.for_server(answering.max_new_tokens, target.stop_ids)
    timer = ServerTimer(
        settings=settings,
        launch=launch,
        target=target.path,
        revision=target.revision,
        head=head,
        conversations=conversations.first,
        plain_answers=PlainAnswers(sampling),
        log_dir=folder,
    )
    require_possible(settings, launch, target, head, folder)
    conditions = {
        "target": target.path,
        "head": head,
        "conversations": len(conversations.first),
        "turns": conversations.turns,
        "launch": public(shlex.join(timer.command(None))),
        **asdict(answering),
        **asdict(settings),
    }

    def keep(found: Findings) -> str:
        facts = {**origin, "conditions": conditions}
        return write_tune_report(found, folder, facts, target=target_settings["path"], head=head)

    try:
        gains = decoder_gains(settings, target_settings, Path(head), conversations, answering, target.stop_ids)
        print(keep(search(settings, gains, timer, keep)))
    except KeyboardInterrupt:
        report = folder / REPORT
        known = f"the findings so far are in {report}" if report.exists() else "nothing was found yet"
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
        launch.require_room(max(settings.all_loads), setting="tune.loads" if settings.loads else "tune.concurrency")
        prepare(launch, target, Draft(head=head, steps=1, topk=1, draft_tokens=None, window=settings.draft_window))
