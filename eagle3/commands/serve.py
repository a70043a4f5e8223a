"""Runs serve.py: one function for each action."""

import json
import logging
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from eagle3.adapters.quiet import quiet_libraries
from eagle3.answers.build import build_chat
from eagle3.commands.sweep import build_trackers, export_job, sweep_jobs, track
from eagle3.decoding.speculate import warn_of_doubts
from eagle3.engine.command import Draft
from eagle3.errors import InputError, require_packages
from eagle3.head.eagle3 import EAGLE3
from eagle3.head_files.files import MAKE_HEAD, HeadFiles, read_files, read_without_weights
from eagle3.head_files.finding import Finding, findings_table, require_no_errors
from eagle3.head_files.format import read_kind
from eagle3.head_files.servers import require_server
from eagle3.home import pasted
from eagle3.hydra_run import given_keys, output_dir
from eagle3.progress import duration
from eagle3.provenance import result_facts
from eagle3.serving.bench.loads import BenchPlan
from eagle3.serving.bench.run import bench, prompt_sets
from eagle3.serving.check.accept_length import Measurer
from eagle3.serving.check.checks import check_head, write_checked
from eagle3.serving.check.origin import require_fits, warn_of_precision
from eagle3.serving.check.prompts import (
    file_conversations,
    longest_prompt,
    prompt_source,
    with_history,
)
from eagle3.serving.compare.heads import head_folders, require_comparable
from eagle3.serving.compare.run import compare, head_facts
from eagle3.serving.compare.sweep import compare_sweep
from eagle3.serving.head import export
from eagle3.serving.publish.folder import WRITTEN, publish, require_exported
from eagle3.serving.server.launch import launch
from eagle3.serving.show.page import require_page, show
from eagle3.serving.tune.run import tune
from eagle3.settings.precomputing import TargetSettings
from eagle3.settings.serving import (
    BenchRun,
    CheckRun,
    Common,
    CompareRun,
    DecodeRun,
    Decoding,
    Drafting,
    ExportRun,
    LaunchRun,
    PublishRun,
    ShowRun,
    TuneRun,
)
from eagle3.storage.files import write_json
from eagle3.storage.lock import hold
from eagle3.target.files import TargetFiles, read_target_files
from eagle3.target.identity import recorded_settings
from eagle3.target.model import NotLoadable, load_target

log = logging.getLogger(__name__)
MEASURED = ("compare", "bench", "tune")  # actions that write their results into the folder of the run
BENCH_LIBRARIES = ("scipy",)  # what bench and tune need of the extra `bench`


def serve(run: Common) -> None:
    quiet_libraries()
    started = time.monotonic()
    with hold(output_dir()) if run.action in MEASURED and not getattr(run, "dry_run", False) else nullcontext():
        DO[run.action](run)
    if run.action != "launch":  # which ends with its server
        log.info("%s", end_line(run, time.monotonic() - started))


def end_line(run: Common, seconds: float) -> str:
    """Say where the result is, how long it took, and the command that continues with it."""
    written = {
        "export": run.head if isinstance(run, DecodeRun) else None,
        "show": run.out if isinstance(run, ShowRun) else None,
        "compare": f"{output_dir()}/compare.md",
        "bench": f"{output_dir()}/report.md",
        "tune": f"{output_dir()}/tune.md",
        "publish": run.out if isinstance(run, PublishRun) else None,
    }.get(run.action, f"action={run.action}")
    following = None
    if isinstance(run, DecodeRun):
        head, target = pasted(run.head), pasted(run.target.path or "TARGET")
        decode = f"python serve.py action=decode target.path={target} head={head} prompts.path=FILE.jsonl"
        launch = f"python serve.py action=launch target.path={target} head={head} dry_run=true"
        following = {"export": decode, "check": decode, "decode": launch}.get(run.action)
    return f"{written}: {duration(seconds)}" + (f"; next: {following}" if following else "")


def export_head(run: ExportRun) -> None:
    prompt_source(run.prompts)  # what is wrong there is said before a file is written
    head = Path(run.head)
    prepare_findings(run.findings, head)
    export.require_replaceable(head)
    trained = export.read_trained(export.find_checkpoint(run=run.run, checkpoint=run.checkpoint))
    longest_prompt(trained.target_config, max_new_tokens=run.max_new_tokens, steps=run.steps)
    measurer = partial(exports_measurer, run, trained)
    write_checked(trained, head, build_draft(run, None), measurer=measurer, conclude=partial(conclude, run=run))


def prepare_findings(findings: str | None, replaced: Path | None = None) -> None:
    """Make the folder of the file of findings, before the checks. InputError for a folder in its place, and for a file
    in the head that is `replaced`."""
    if findings is None:
        return
    path = Path(findings).resolve()
    if replaced is not None and replaced.resolve() in path.parents:
        raise InputError(
            f"findings={findings} is in head={replaced}, which the export replaces; give a file next to that folder"
        )
    if path.is_dir():
        raise InputError(f"findings={findings} is a folder; give a file, e.g. findings={findings}/findings.json")
    path.parent.mkdir(parents=True, exist_ok=True)


def exports_measurer(run: ExportRun, trained: export.TrainedHead) -> Measurer | str:
    """Return a measurer, or why there is none: the target of the training is gone."""
    target = recorded_settings(run.target, trained.record.origin.target)
    try:
        read_target_files(**vars(target))
    except InputError as absent:
        if run.target.path is not None:
            raise
        return f"{absent} (target.path is the one recorded at training)"
    try:
        return make_measurer(run, target)
    except NotLoadable as reason:  # only SGLang reads it, as it has for answers and features
        return str(reason)


def check(run: CheckRun) -> None:
    prepare_findings(run.findings)
    files = read_files(run.head)
    conclude(check_head(files, make_measurer(run, run.target)), run)


def decode(run: DecodeRun) -> None:
    files = read_files(run.head)
    measurer = make_measurer(run, run.target, files)
    warn_of_precision(files, measurer.target.identity)
    warn_of_doubts(measurer.target, files)
    print(json.dumps(asdict(measurer.measured(files, measurer.prompts(None), lossless=True))))


def show_rounds(run: ShowRun) -> None:
    require_page(run.out)
    files = read_files(run.head)
    show(make_measurer(run, run.target, files), files, run.out, origin=result_facts())


def compare_heads(run: CompareRun) -> None:
    loggers = build_trackers(run)
    jobs = sweep_jobs(run)
    source = prompt_source(run.prompts)
    assert source is not None
    files = read_target_files(**vars(run.target))
    heads = {job.name: job.head for job in jobs.finished} if jobs else head_folders(run.heads or [])
    for job in jobs.finished if jobs else ():
        export_job(job, run.compare)
    require_comparable(heads.values(), files, run.compare)
    room = longest_prompt(files.text_config, max_new_tokens=run.max_new_tokens, steps=run.compare.most_steps)
    chat = build_chat(run.chat, files)
    found = file_conversations(chat, source, turns=run.prompts.turns, limit=run.limit, max_length=room)
    target = replace(load_target(**vars(run.target)), stop_ids=chat.stop_ids)
    batches = {"batch_size": run.compare.batch_size, "batch_tokens": run.compare.batch_tokens}
    prompts = with_history(target, found, max_new_tokens=run.max_new_tokens, **batches)
    report: dict[str, Any] = {"origin": result_facts(), "folder": output_dir()}
    if jobs:
        rows = compare_sweep(run, jobs, target, prompts, **report)
    else:
        rows = compare(run, heads, target, prompts, **report)
    track(loggers, run, rows)


def launch_server(run: LaunchRun) -> None:
    launch(run.launch, read_target(run), draft(run), dry_run=run.dry_run, folder=output_dir())


def bench_servers(run: BenchRun) -> None:
    require_packages(*BENCH_LIBRARIES, extra="bench", needed_by="action=bench")
    if run.head is None and not run.bench.urls:
        raise InputError(f"head is not set; give the folder of an exported head, made by: {MAKE_HEAD}")
    target = read_target(run)
    paths = run.bench.prompts or ({"prompts": run.prompts.path} if run.prompts.path is not None else {})
    chat = build_chat(run.chat, target)
    room = longest_prompt(target.text_config, max_new_tokens=run.max_new_tokens, steps=run.steps)
    sets = prompt_sets(chat, paths, run.prompts, limit=run.limit, max_length=room)
    first = {name: found.first for name, found in sets.items()}
    sampling = run.for_server(run.max_new_tokens, chat.stop_ids)
    bench(
        run.launch,
        target,
        draft(run),
        BenchPlan(run.bench, first, run.prompts.turns, sampling | dict(run.bench.sampling or {})),
        origin=result_facts() | ({"heads": {Path(run.head).name: head_facts(Path(run.head))}} if run.head else {}),
        folder=output_dir(),
        dry_run=run.dry_run,
    )


def tune_head(run: TuneRun) -> None:
    require_packages(*BENCH_LIBRARIES, extra="bench", needed_by="action=tune")
    launched(run.head)
    target = read_target_files(**vars(run.target))
    chat = build_chat(run.chat, target)
    room = longest_prompt(target.text_config, max_new_tokens=run.max_new_tokens, steps=max(run.tune.steps))
    [asked] = prompt_sets(chat, {"prompts": run.prompts.path}, run.prompts, limit=run.limit, max_length=room).values()
    tune(run, replace(target, stop_ids=chat.stop_ids), asked, origin=result_facts(), folder=output_dir())


def publish_head(run: PublishRun) -> None:
    export.require_replaceable(Path(run.out), setting="out", besides=WRITTEN)
    files = read_files(run.head)
    recorded = require_exported(files).origin.target
    run = replace(run, target=recorded_settings(run.target, recorded))
    publish(run, files, read_target(run))


def draft(run: LaunchRun) -> Draft | None:
    return None if run.head is None else build_draft(run, launched(run.head))


def launched(head: str) -> str:
    """Return SGLang's name of how a head drafts; InputError if no server can serve its kind."""
    if not Path(head).is_dir():
        return EAGLE3.sglang_algorithm  # launch.check says what is wrong there
    return require_server(read_kind(read_without_weights(head)), head)


def build_draft(run: LaunchRun | DecodeRun, algorithm: str | None) -> Draft:
    assert run.head is not None
    return Draft(head=run.head, algorithm=algorithm, **vars(run.only(Drafting)))


def read_target(run: LaunchRun | PublishRun) -> TargetFiles:
    """Read the target's files for an action that does not load its weights, and warn of the keys for loading them."""
    for key in ("target.dtype", "target.device", "target.attention", "target.check_health"):
        if key in given_keys():
            log.warning("%s has no effect on action=%s, which does not load the target itself", key, run.action)
    return read_target_files(**vars(run.target))


def make_measurer(run: DecodeRun, target: TargetSettings, head: HeadFiles | None = None) -> Measurer:
    """Load the target, after everything else that may be wrong: the prompts, and the `head` if it must fit."""
    source, asked = prompt_source(run.prompts), None
    files = read_target_files(**vars(target))
    if head is not None:
        require_fits(head, files, steps=run.steps, topk=run.topk)
    chat = build_chat(run.chat, files)
    room = longest_prompt(files.text_config, max_new_tokens=run.max_new_tokens, steps=run.steps)
    choice: Any = {"turns": run.prompts.turns, "limit": run.limit}
    if source is not None:
        asked = file_conversations(chat, source, max_length=room, **choice)
    return Measurer(
        target=replace(load_target(**vars(target)), stop_ids=chat.stop_ids),
        chat=chat,
        decoding=run.only(Decoding),
        asked=asked,
        **choice,
        **(vars(run.check) if isinstance(run, CheckRun) else {}),
    )


def conclude(findings: list[Finding], run: CheckRun) -> None:
    """Print and write the table; InputError if it holds an error."""
    print(findings_table(findings))
    if run.findings is not None:
        write_json(Path(run.findings), [asdict(finding) for finding in findings])
    require_no_errors(findings, run.head)


DO: dict[str, Callable[[Any], None]] = {
    "export": export_head,
    "check": check,
    "decode": decode,
    "show": show_rounds,
    "compare": compare_heads,
    "launch": launch_server,
    "bench": bench_servers,
    "tune": tune_head,
    "publish": publish_head,
}
