"""What serve.py does with a config whose keys hold: one function for each action."""

import json
import logging
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from eagle3 import cli
from eagle3.answers.chat import Chat
from eagle3.engine.command import LaunchSettings
from eagle3.engine.draft import Draft
from eagle3.errors import InputError, require_packages
from eagle3.head_files.files import MAKE_HEAD, read_files
from eagle3.head_files.finding import Finding, findings_table, require_no_errors
from eagle3.serving.check.accept_length import Judge
from eagle3.serving.check.checks import check_head
from eagle3.serving.check.export import check_export
from eagle3.serving.check.prompts import file_prompts, prompt_source
from eagle3.serving.check.settings import Answering, Decoding
from eagle3.serving.compare.heads import head_folders, require_comparable
from eagle3.serving.compare.run import compare
from eagle3.serving.compare.settings import CompareSettings
from eagle3.serving.head import export
from eagle3.serving.head.card import write_card
from eagle3.serving.head.speculators import require_in_layout
from eagle3.serving.server.launch import launch
from eagle3.serving.show.page import show
from eagle3.storage.files import write_json
from eagle3.storage.lock import hold
from eagle3.target.files import TargetFiles, read_target_files
from eagle3.target.model import Target, load_target

log = logging.getLogger(__name__)
MEASURED = ("compare", "bench", "tune")  # actions that write their results into the folder of the run
# The keys, or groups of them, that have an effect on each action.
EVERY_ACTION = ("action", "target.path", "target.revision", "target.trust_remote_code", "run_dir")
DRAFTING = ("steps", "topk", "draft_tokens")
SERVED_DRAFTING = (*DRAFTING, "adaptive")
JUDGING = ("head", *DRAFTING, "max_new_tokens", "temperature", "seed", "target", "chat", "prompts", "limit")
SERVED_PROMPTS = ("head", "max_new_tokens", "temperature", "chat", "prompts", "limit")
READ_BY = {
    "export": (*JUDGING, "limits.export", "run", "checkpoint", "format", "findings", "check"),
    "check": (*JUDGING, "limits.check", "findings", "check"),
    "decode": (*JUDGING, "limits.decode"),
    "show": (*JUDGING, "limits.show", "out"),
    "compare": ("heads", "max_new_tokens", "seed", "target", "chat", "prompts", "limit", "limits.compare", "compare"),
    "launch": ("head", *SERVED_DRAFTING, "launch", "dry_run"),
    "bench": (*SERVED_DRAFTING, *SERVED_PROMPTS, "limits.bench", "launch", "dry_run", "bench", "logger"),
    "tune": (*SERVED_PROMPTS, "limits.tune", "launch", "dry_run", "tune", "seed", "target"),
}
INSTEAD = {
    "tune": {key: f", which chooses among tune.{key}: set that" for key in DRAFTING},
    "compare": {
        **{key: ", which decodes in each of compare.shapes: set that" for key in DRAFTING},
        "temperature": ", which decodes at each of compare.temperatures: set that",
        "head": ", which takes several: set heads",
    },
}
BENCH_LIBRARIES = ("aiohttp", "matplotlib", "scipy")  # what the extra `bench` brings


def serve(config: DictConfig) -> None:
    """Do what `action` names."""
    cli.quiet_libraries()
    if config.head is None and not without_head(config):
        raise InputError(f"head is not set; give the folder of an exported head, made by: {MAKE_HEAD}")
    by, read, instead = f"action={config.action}", READ_BY[config.action], INSTEAD.get(config.action, {})
    if config.action == "launch" and config.adaptive is not None:
        by, read = f"{by} adaptive={config.adaptive}", tuple(key for key in read if key not in DRAFTING)
        instead = {key: ", whose file says how many steps chains have: leave it out" for key in DRAFTING}
    cli.warn_of_unread((*EVERY_ACTION, *read), by=by, instead=instead)
    with hold(cli.output_dir()) if config.action in MEASURED and not config.dry_run else nullcontext():
        DO[config.action](config)


def without_head(config: DictConfig) -> bool:
    """Say whether the plain target is launched, running servers are measured, or `heads` are compared."""
    running = config.bench.plain_url or config.bench.head_url or config.bench.adaptive_url
    return config.action in ("launch", "compare") or (config.action == "bench" and running is not None)


def export_head(config: DictConfig) -> None:
    how = decoding(config)  # what is wrong there, and of the prompts, is said before a file is written
    prompt_source(**cli.plain(config.prompts))
    head = Path(config.head)
    trained = export.read_trained(export.find_checkpoint(run=config.run, checkpoint=config.checkpoint))
    how.longest_prompt(trained.target_config.max_position_embeddings, steps=how.steps)
    for_vllm = config.format == "speculators"
    if for_vllm:
        require_in_layout(trained.record.kind, draft_of(config))
    export.export_head(trained, head, versions=cli.provenance(), speculative_tokens=config.steps if for_vllm else None)
    target = export.target_settings(cli.plain(config.target), trained)
    judge: Judge | str
    try:
        target_files(target)
    except InputError as absent:
        if config.target.path is not None:
            raise
        judge = f"{absent} (target.path is the one recorded at training)"
    else:
        judge = make_judge(config, target)
    findings = check_export(trained, head, judge)
    write_card(read_files(head), trained.settings, draft_of(config))
    conclude(findings, config)


def check(config: DictConfig) -> None:
    files = read_files(config.head)
    conclude(check_head(files, make_judge(config, cli.plain(config.target))), config)


def decode(config: DictConfig) -> None:
    require_prompts(config)
    judge = make_judge(config, cli.plain(config.target))
    print(json.dumps(asdict(judge.measured(Path(config.head), judge.prompts(None)))))


def show_rounds(config: DictConfig) -> None:
    require_prompts(config)
    show(make_judge(config, cli.plain(config.target)), Path(config.head), config.out, origin=cli.result_facts())


def require_prompts(config: DictConfig) -> None:
    if config.prompts.path is None:
        raise InputError("prompts.path is not set; give conversations to decode, e.g. prompts.path=FILE.jsonl")


def compare_heads(config: DictConfig) -> None:
    settings, answers = CompareSettings(**cli.plain(config.compare)), answering(config)
    folders = head_folders(config.heads)
    require_prompts(config)
    source = prompt_source(**cli.plain(config.prompts))
    assert source is not None
    files = target_files(cli.plain(config.target))
    require_comparable(folders, files, settings)
    room = answers.longest_prompt(files.text_config.max_position_embeddings, steps=settings.most_steps)
    prompts = file_prompts(make_chat(config, files), source, limit=config.limit, max_length=room)
    target = load_target(**cli.plain(config.target))
    compare(
        settings,
        folders,
        target,
        prompts,
        max_new_tokens=answers.max_new_tokens,
        seed=answers.seed,
        origin=cli.result_facts(),
        folder=cli.output_dir(),
    )


def launch_server(config: DictConfig) -> None:
    settings, drafts = LaunchSettings(**cli.plain(config.launch)), adaptive_draft(config) or draft(config)
    launch(settings, target_files(cli.plain(config.target)), drafts, dry_run=config.dry_run, folder=cli.output_dir())


def bench_servers(config: DictConfig) -> None:
    require_packages(*BENCH_LIBRARIES, extra="bench", needed_by="action=bench")
    from eagle3.serving.bench.loads import BenchPlan
    from eagle3.serving.bench.run import bench
    from eagle3.serving.bench.settings import BenchSettings

    wandb = config.logger.get("wandb") if "logger" in config else None
    if "logger" in config and wandb is None:
        raise InputError(
            f"logger={'+'.join(config.logger)}: action=bench reports to W&B alone; take logger=wandb, or none"
        )
    settings, answers = BenchSettings(**cli.plain(config.bench)), answering(config)
    target = target_files(cli.plain(config.target))
    paths = settings.prompts or ({"prompts": config.prompts.path} if config.prompts.path is not None else {})
    prompts = served_prompts(config, paths, target, answers, steps=config.steps)
    sampling = {"temperature": answers.temperature, "max_new_tokens": answers.max_new_tokens}
    bench(
        LaunchSettings(**cli.plain(config.launch)),
        target,
        {"plain": None, "head": draft(config), "adaptive": adaptive_draft(config)},
        BenchPlan(settings, prompts, sampling | dict(settings.sampling or {})),
        origin=cli.result_facts(),
        folder=cli.output_dir(),
        dry_run=config.dry_run,
        logger=cli.build(wandb) if wandb else None,
    )


def tune_head(config: DictConfig) -> None:
    require_packages(*BENCH_LIBRARIES, extra="bench", needed_by="action=tune")
    from eagle3.serving.tune.run import tune
    from eagle3.serving.tune.settings import TuneSettings

    if config.prompts.path is None:
        raise InputError("prompts.path is not set; give conversations like those you serve: prompts.path=FILE.jsonl")
    if config.dry_run:
        raise InputError(
            "dry_run=true: which servers tune starts depends on what it measures; set tune.timed=0 to start none"
        )
    settings, answers = TuneSettings(**cli.plain(config.tune)), answering(config)
    target = target_files(cli.plain(config.target))
    paths = {"prompts": config.prompts.path}
    tune(
        settings,
        LaunchSettings(**cli.plain(config.launch)),
        target,
        config.head,
        served_prompts(config, paths, target, answers, steps=max(settings.steps))["prompts"],
        answers,
        target_settings=cli.plain(config.target),
        origin=cli.result_facts(),
        folder=cli.output_dir(),
    )


def served_prompts(
    config: DictConfig, paths: Mapping[str, str], target: TargetFiles, answers: Answering, *, steps: int
) -> dict[str, list[list[int]]]:
    """Return token ids of the conversations at each path, as far as they leave room for answer and drafts."""
    from eagle3.serving.bench.run import prompt_sets  # with the libraries of the extra `bench`

    room = answers.longest_prompt(target.text_config.max_position_embeddings, steps=steps)
    return prompt_sets(
        make_chat(config, target), paths, split=config.prompts.split, limit=config.limit, max_length=room
    )


def make_chat(config: DictConfig, target: TargetFiles | Target) -> Chat:
    return Chat(target.tokenizer, stop_ids=target.stop_ids, **cli.plain(config.chat))


def draft(config: DictConfig) -> Draft | None:
    return None if config.head is None else draft_of(config)


def adaptive_draft(config: DictConfig) -> Draft | None:
    if config.adaptive is None:
        return None
    if config.head is None:
        raise InputError(f"adaptive={config.adaptive} says how a head drafts; set head, or leave out adaptive")
    return replace(draft_of(config), adaptive=config.adaptive)


def draft_of(config: DictConfig) -> Draft:
    return Draft(head=config.head, steps=config.steps, topk=config.topk, draft_tokens=config.draft_tokens)


def answering(config: DictConfig) -> Answering:
    return Answering(**{key: config[key] for key in Answering.__dataclass_fields__})


def decoding(config: DictConfig) -> Decoding:
    return Decoding(**{key: config[key] for key in Decoding.__dataclass_fields__})


def target_files(settings: dict[str, Any]) -> TargetFiles:
    return read_target_files(**{key: settings[key] for key in ("path", "revision", "trust_remote_code")})


def make_judge(config: DictConfig, target_settings: dict[str, Any]) -> Judge:
    how, source = decoding(config), prompt_source(**cli.plain(config.prompts))
    target = load_target(**target_settings)
    return Judge(
        target=target,
        chat=make_chat(config, target),
        decoding=how,
        source=source,
        limit=config.limit,
        **cli.plain(config.check),
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
