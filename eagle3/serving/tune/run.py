"""`action=tune`: the draft settings to serve with."""

import shlex
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from eagle3.engine.command import Draft
from eagle3.errors import InputError, Interrupted
from eagle3.secrets import public
from eagle3.serving.check.prompts import Conversations
from eagle3.serving.server.launch import prepare
from eagle3.serving.server.load import PlainAnswers
from eagle3.serving.tune.candidates import decoder_gains
from eagle3.serving.tune.report import REPORT, write_tune_report
from eagle3.serving.tune.search import Findings, search
from eagle3.serving.tune.timing import ServerTimer
from eagle3.settings.serving import AnswerSettings, TuneRun
from eagle3.target.files import TargetFiles


def tune(
    run: TuneRun, target: TargetFiles, conversations: Conversations, *, origin: Mapping[str, Any], folder: Path
) -> None:
    """Search, and print the table and the command. tune.json, tune.md, and the servers' logs go to `folder`.
    `origin` goes into tune.json: commit, command, machine, versions."""
    timer = ServerTimer(
        run=run,
        target=target,
        conversations=conversations.first,
        plain_answers=PlainAnswers(run.for_server(run.max_new_tokens, target.stop_ids)),
        log_dir=folder,
    )
    require_possible(run, target, folder)
    conditions = {
        "target": target.path,
        "head": run.head,
        "conversations": len(conversations.first),
        "turns": conversations.turns,
        "launch": public(shlex.join(timer.command(None))),
        **asdict(run.only(AnswerSettings)),
        **asdict(run.tune),
    }

    def keep(found: Findings) -> str:
        facts = {**origin, "conditions": conditions}
        return write_tune_report(found, folder, facts, target=target.path, head=run.head)

    try:
        gains = decoder_gains(run, conversations, target.stop_ids)
        print(keep(search(run.tune, gains, timer, keep)))
    except KeyboardInterrupt:
        report = folder / REPORT
        known = f"the findings so far are in {report}" if report.exists() else "nothing was found yet"
        raise Interrupted(f"the search is stopped; {known}") from None


def require_possible(run: TuneRun, target: TargetFiles, folder: Path) -> None:
    """Raise InputError for what would stop the search, or what the servers lack, before the decoder's minutes."""
    settings = run.tune
    if (folder / REPORT).exists():
        raise InputError(f"{folder / REPORT} is of another search; name a new folder: hydra.run.dir=DIR")
    if settings.loads and not settings.timed:
        raise InputError(
            f"tune.loads={settings.loads} tune.timed=0: the steps of each load come from timings only; set tune.timed=4"
        )
    if settings.timed:
        key = "tune.loads" if settings.loads else "tune.concurrency"
        run.launch.require_room(max(settings.all_loads), setting=key)
        draft = Draft(head=run.head, steps=1, topk=1, draft_tokens=None, draft_window=settings.draft_window)
        prepare(run.launch, target, draft)
