"""Runs serve.py's valid config: one function for each action."""

import json
import logging
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from eagle3 import cli
from eagle3.answers.build import chat_of
from eagle3.engine.draft import Draft
from eagle3.errors import InputError, require_packages
from eagle3.head_files.files import MAKE_HEAD, read_files, read_without_weights
from eagle3.head_files.finding import Finding, findings_table, has_errors, require_no_errors
from eagle3.progress import duration
from eagle3.serving.check.accept_length import Measurer
from eagle3.serving.check.checks import check_export, check_head
from eagle3.serving.check.origin import warn_of_precision
from eagle3.serving.check.prompts import file_prompts, longest_prompt, prompt_source
from eagle3.serving.compare.heads import head_folders, require_comparable
from eagle3.serving.compare.run import compare
from eagle3.serving.head import export
from eagle3.serving.head.card import write_card
from eagle3.serving.server.launch import launch
from eagle3.serving.show.page import show
from eagle3.settings.engine import LaunchSettings
from eagle3.settings.serving import (
    AnswerSettings,
    BenchSettings,
    CompareSettings,
    Decoding,
    TokenSampling,
    TuneSettings,
)
from eagle3.storage.files import write_json
from eagle3.storage.lock import hold
from eagle3.storage.replace import replacing
from eagle3.target.files import TargetFiles, read_target_files
from eagle3.target.model import NotLoadable, load_target

log = logging.getLogger(__name__)
MEASURED = ("compare", "bench", "tune")  # actions that write their results into the folder of the run
BENCH_LIBRARIES = ("scipy",)  # what bench and tune need of the extra `bench`


def serve(config: DictConfig) -> None:
    cli.quiet_libraries()
    started = time.monotonic()
    with hold(cli.output_dir()) if config.action in MEASURED and not config.get("dry_run") else nullcontext():
        DO[config.action](config)
    if config.action != "launch":  # which ends with its server
        log.info("%s", end_line(config, time.monotonic() - started))


def end_line(config: DictConfig, seconds: float) -> str:
    """Say where the result is, how long it took, and the command that continues with it."""
    head, target = config.get("head"), config.target.path or "TARGET"
    written = {
        "export": head,
        "show": config.get("out"),
        "compare": f"{cli.output_dir()}/compare.md",
        "bench": f"{cli.output_dir()}/report.md",
        "tune": f"{cli.output_dir()}/tune.md",
    }.get(config.action, f"action={config.action}")
    following = {
        "export": f"python serve.py action=decode target.path={target} head={head} prompts.path=FILE.jsonl",
        "check": f"python serve.py action=decode target.path={target} head={head} prompts.path=FILE.jsonl",
        "decode": f"python serve.py action=launch target.path={target} head={head} dry_run=true",
    }.get(config.action)
    return f"{written}: {duration(seconds)}" + (f"; next: {following}" if following else "")


def export_head(config: DictConfig) -> None:
    how = cli.settings(Decoding, config)  # what is wrong there, and of the prompts, is said before a file is written
    prompt_source(**cli.plain(config.prompts))
    head = Path(config.head)
    require_findings_apart(config.findings, head)
    export.require_replaceable(head)
    trained = export.read_trained(export.find_checkpoint(run=config.run, checkpoint=config.checkpoint))
    context = trained.target_config.max_position_embeddings
    longest_prompt(context, max_new_tokens=how.max_new_tokens, steps=how.steps)
    with replacing(head) as new:  # what is there stays until this head is checked
        measurer = exports_measurer(config, trained)
        export.write_head(trained, new, versions=cli.provenance())
        findings = check_export(trained, new, measurer)
        write_card(read_files(new), trained.settings, draft_of(config))
        if has_errors(findings):
            log.warning("head=%s is not written, and what was there is left alone", head)
        conclude(findings, config)


def require_findings_apart(findings: str | None, head: Path) -> None:
    """Raise InputError for a file of findings that an export would replace."""
    if findings is not None and head.resolve() in Path(findings).resolve().parents:
        raise InputError(
            f"findings={findings} is in head={head}, which the export replaces; give a file next to that folder"
        )


def exports_measurer(config: DictConfig, trained: export.TrainedHead) -> Measurer | str:
    """Return a measurer, or why there is none: the target of the training is gone."""
    target = export.target_settings(cli.plain(config.target), trained)
    try:
        read_target_files(**target)
    except InputError as absent:
        if config.target.path is not None:
            raise
        return f"{absent} (target.path is the one recorded at training)"
    try:
        return make_measurer(config, target)
    except NotLoadable as reason:  # only SGLang reads it, as it has for answers and features
        return str(reason)


def check(config: DictConfig) -> None:
    files = read_files(config.head)
    conclude(check_head(files, make_measurer(config, cli.plain(config.target))), config)


def decode(config: DictConfig) -> None:
    measurer = make_measurer(config, cli.plain(config.target))
    warn_of_precision(read_without_weights(config.head), measurer.target.identity)
    print(json.dumps(asdict(measurer.measured(Path(config.head), measurer.prompts(None), lossless=True))))


def show_rounds(config: DictConfig) -> None:
    show(make_measurer(config, cli.plain(config.target)), Path(config.head), config.out, origin=cli.result_facts())


def compare_heads(config: DictConfig) -> None:
    settings = cli.settings(CompareSettings, config.compare)
    folders = head_folders(config.heads)
    source = prompt_source(**cli.plain(config.prompts))
    assert source is not None
    files = read_target_files(**cli.plain(config.target))
    require_comparable(folders, files, settings)
    context = files.text_config.max_position_embeddings
    room = longest_prompt(context, max_new_tokens=config.max_new_tokens, steps=settings.most_steps)
    chat = chat_of(config, files)
    prompts = file_prompts(chat, source, limit=config.limit, max_length=room)
    target = replace(load_target(**cli.plain(config.target)), stop_ids=chat.stop_ids)
    compare(
        settings,
        folders,
        target,
        prompts,
        max_new_tokens=config.max_new_tokens,
        seed=config.seed,
        origin=cli.result_facts(),
        folder=cli.output_dir(),
    )


def launch_server(config: DictConfig) -> None:
    ignored = [key for key in ("steps", "topk", "draft_tokens") if key in cli.given_keys()]
    if config.adaptive is not None and ignored:
        raise InputError(
            f"{ignored[0]} has no effect with adaptive={config.adaptive}, whose file says how many steps chains have; "
            f"leave it out"
        )
    settings, drafts = cli.settings(LaunchSettings, config.launch), adaptive_draft(config) or draft(config)
    launch(settings, target_of_server(config), drafts, dry_run=config.dry_run, folder=cli.output_dir())


def bench_servers(config: DictConfig) -> None:
    require_packages(*BENCH_LIBRARIES, extra="bench", needed_by="action=bench")
    from eagle3.serving.bench.loads import BenchPlan
    from eagle3.serving.bench.run import bench

    settings = cli.settings(BenchSettings, config.bench)
    if config.head is None and not settings.urls:
        raise InputError(f"head is not set; give the folder of an exported head, made by: {MAKE_HEAD}")
    target = target_of_server(config)
    paths = settings.prompts or ({"prompts": config.prompts.path} if config.prompts.path is not None else {})
    prompts = served_prompts(config, paths, target, steps=config.steps)
    sampling = cli.settings(TokenSampling, config).for_server(config.max_new_tokens)
    bench(
        cli.settings(LaunchSettings, config.launch),
        target,
        {"plain": None, "head": draft(config), "adaptive": adaptive_draft(config)},
        BenchPlan(settings, prompts, sampling | dict(settings.sampling or {})),
        origin=cli.result_facts(),
        folder=cli.output_dir(),
        dry_run=config.dry_run,
    )


def tune_head(config: DictConfig) -> None:
    require_packages(*BENCH_LIBRARIES, extra="bench", needed_by="action=tune")
    from eagle3.serving.tune.run import tune

    settings = cli.settings(TuneSettings, config.tune)
    target = read_target_files(**cli.plain(config.target))
    paths = {"prompts": config.prompts.path}
    tune(
        settings,
        cli.settings(LaunchSettings, config.launch),
        target,
        config.head,
        served_prompts(config, paths, target, steps=max(settings.steps))["prompts"],
        cli.settings(AnswerSettings, config),
        target_settings=cli.plain(config.target),
        origin=cli.result_facts(),
        folder=cli.output_dir(),
    )


def served_prompts(
    config: DictConfig, paths: Mapping[str, str], target: TargetFiles, *, steps: int
) -> dict[str, list[list[int]]]:
    """Return token ids of the conversations at each path, as far as they leave room for answer and drafts."""
    from eagle3.serving.bench.run import prompt_sets  # with the libraries of the extra `bench`

    context = target.text_config.max_position_embeddings
    room = longest_prompt(context, max_new_tokens=config.max_new_tokens, steps=steps)
    return prompt_sets(chat_of(config, target), paths, split=config.prompts.split, limit=config.limit, max_length=room)


def draft(config: DictConfig) -> Draft | None:
    return None if config.head is None else draft_of(config)


def adaptive_draft(config: DictConfig) -> Draft | None:
    if config.adaptive is None:
        return None
    if config.head is None:
        raise InputError(f"adaptive={config.adaptive} says how a head drafts; set head, or leave out adaptive")
    return replace(draft_of(config), adaptive=config.adaptive)


def draft_of(config: DictConfig) -> Draft:
    return Draft(
        head=config.head,
        steps=config.steps,
        topk=config.topk,
        draft_tokens=config.draft_tokens,
        window=config.draft_window,
    )


def target_of_server(config: DictConfig) -> TargetFiles:
    """Read the target's files; a server loads its weights, so keys for loading it here are warned of."""
    for key in ("target.dtype", "target.device", "target.attention", "target.check_health"):
        if key in cli.given_keys():
            log.warning("%s has no effect on action=%s, for which a server loads the target", key, config.action)
    return read_target_files(**cli.plain(config.target))


def make_measurer(config: DictConfig, target_settings: dict[str, Any]) -> Measurer:
    how, source = cli.settings(Decoding, config), prompt_source(**cli.plain(config.prompts))
    target = load_target(**target_settings)
    chat = chat_of(config, target)
    return Measurer(
        target=replace(target, stop_ids=chat.stop_ids),
        chat=chat,
        decoding=how,
        source=source,
        limit=config.limit,
        **(cli.plain(config.check) if "check" in config else {}),
    )


def conclude(findings: list[Finding], config: DictConfig) -> None:
    """Print and write the table; InputError if it holds an error."""
    print(findings_table(findings))
    if config.findings is not None:
        write_json(Path(config.findings), [asdict(finding) for finding in findings])
    require_no_errors(findings, config.head)


DO = {
    "export": export_head,
    "check": check,
    "decode": decode,
    "show": show_rounds,
    "compare": compare_heads,
    "launch": launch_server,
    "bench": bench_servers,
    "tune": tune_head,
}
