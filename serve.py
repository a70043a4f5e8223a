"""Export a trained head as an SGLang checkpoint; check one, decode with it, serve it, measure and tune the server.

python serve.py action=export run=RUN head=HEAD
python serve.py action=check target.path=TARGET head=HEAD           # exit status 1 and a reason if something is wrong
python serve.py action=decode target.path=TARGET head=HEAD prompts.path=FILE.jsonl steps=3 limit=40   # one JSON line
python serve.py action=launch target.path=TARGET head=HEAD steps=3             # SGLang; dry_run=true prints the command
python serve.py action=bench target.path=TARGET head=HEAD steps=3 'bench.prompts={chat: FILE.jsonl}'   # a report
python serve.py action=tune target.path=TARGET head=HEAD prompts.path=FILE.jsonl tune.concurrency=8   # flags to use
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig

from eagle3 import run
from eagle3.chat import Chat
from eagle3.errors import InputError
from eagle3.serving import export
from eagle3.serving.acceptance import Decoding, Judge
from eagle3.serving.bench import BenchSettings, Plan
from eagle3.serving.benchmark import benchmark, prompt_sets
from eagle3.serving.check import Finding, require_no_errors, table
from eagle3.serving.command import Draft, LaunchSettings
from eagle3.serving.doctor import check_head
from eagle3.serving.evidence import Answering, TuneSettings
from eagle3.serving.head_files import MAKE_HEAD, read_files
from eagle3.serving.launch import launch
from eagle3.serving.measured_prompts import prompt_source
from eagle3.serving.tune import tune
from eagle3.storage import write_json
from eagle3.target import load_target
from eagle3.target_files import TargetFiles, read_target_files


@hydra.main(version_base="1.3", config_path="conf", config_name="serve")
@run.reported
def main(config: DictConfig) -> None:
    run.quiet_libraries()
    if config.action not in ACTIONS:
        raise InputError(f"action={config.action} is unknown; take one of: {', '.join(ACTIONS)}")
    if config.head is None and not without_head(config):
        raise InputError(f"head is not set; give the folder of an exported head, made by: {MAKE_HEAD}")
    ACTIONS[config.action](config)


def without_head(config: DictConfig) -> bool:
    """Whether the plain target is launched, or servers that run already are measured."""
    measured = config.bench.plain_url or config.bench.head_url
    return config.action == "launch" or (config.action == "bench" and measured is not None)


def export_head(config: DictConfig) -> None:
    head = Path(config.head)
    trained = export.read_trained(export.find_checkpoint(run=config.run, checkpoint=config.checkpoint))
    export.export_head(trained, head, versions=run.provenance())
    judge: Judge | str
    try:
        judge = make_judge(config, export.target_settings(run.plain(config.target), trained))
    except InputError as reason:
        if config.target.path is not None:
            raise
        judge = f"{reason} (target.path is the one recorded at training)"
    conclude(export.check_export(trained, head, judge), config)


def check(config: DictConfig) -> None:
    files = read_files(config.head)
    conclude(check_head(files, make_judge(config, run.plain(config.target))), config)


def decode(config: DictConfig) -> None:
    if config.prompts.path is None:
        raise InputError("prompts.path is not set; give conversations to decode, e.g. prompts.path=FILE.jsonl")
    judge = make_judge(config, run.plain(config.target))
    print(json.dumps(judge.measured(Path(config.head), judge.prompts(None))))


def launch_server(config: DictConfig) -> None:
    settings, target = LaunchSettings(**run.plain(config.launch)), target_files(config)
    launch(settings, target, draft(config), dry_run=config.dry_run, folder=run.output_dir())


def bench(config: DictConfig) -> None:
    settings, target = BenchSettings(**run.plain(config.bench)), target_files(config)
    chat = Chat(target.tokenizer, stop_ids=target.stop_ids, **run.plain(config.chat))
    paths = settings.prompts or ({"prompts": config.prompts.path} if config.prompts.path is not None else {})
    room = target.text_config.max_position_embeddings - config.max_new_tokens - config.steps - 1
    prompts = prompt_sets(chat, paths, split=config.prompts.split, limit=settings.limit, max_length=room)
    sampling = {"temperature": config.temperature, "max_new_tokens": config.max_new_tokens}
    benchmark(
        LaunchSettings(**run.plain(config.launch)),
        target,
        draft(config),
        Plan(settings, prompts, sampling | dict(settings.sampling or {})),
        provenance=run.provenance(),
        folder=run.output_dir(),
        dry_run=config.dry_run,
        logger=run.build(config.logger.wandb) if "logger" in config else None,
    )


def tune_head(config: DictConfig) -> None:
    if config.prompts.path is None:
        raise InputError("prompts.path is not set; give conversations like those you serve: prompts.path=FILE.jsonl")
    settings, target = TuneSettings(**run.plain(config.tune)), target_files(config)
    chat = Chat(target.tokenizer, stop_ids=target.stop_ids, **run.plain(config.chat))
    room = target.text_config.max_position_embeddings - config.max_new_tokens - max(settings.steps) - 1
    own = {"prompts": config.prompts.path}
    tune(
        settings,
        LaunchSettings(**run.plain(config.launch)),
        target,
        config.head,
        prompt_sets(chat, own, split=config.prompts.split, limit=settings.limit, max_length=room)["prompts"],
        Answering(**{key: config[key] for key in Answering.__dataclass_fields__}),
        target_settings=run.plain(config.target),
        folder=run.output_dir(),
    )


def draft(config: DictConfig) -> Draft | None:
    if config.head is None:
        return None
    return Draft(head=config.head, steps=config.steps, topk=config.topk, draft_tokens=config.draft_tokens)


def target_files(config: DictConfig) -> TargetFiles:
    return read_target_files(**{key: config.target[key] for key in ("path", "revision", "trust_remote_code")})


def make_judge(config: DictConfig, target_settings: dict[str, Any]) -> Judge:
    source = prompt_source(**run.plain(config.prompts))
    target = load_target(**target_settings)
    return Judge(
        target=target,
        chat=Chat(target.tokenizer, stop_ids=target.stop_ids, **run.plain(config.chat)),
        decoding=Decoding(**{key: config[key] for key in Decoding.__dataclass_fields__}),
        source=source,
        limit=config.limit,
        **run.plain(config.check),
    )


def conclude(findings: list[Finding], config: DictConfig) -> None:
    print(table(findings))
    if config.findings is not None:
        write_json(Path(config.findings), [asdict(finding) for finding in findings])
    require_no_errors(findings, config.head)


ACTIONS = {
    "export": export_head,
    "check": check,
    "decode": decode,
    "launch": launch_server,
    "bench": bench,
    "tune": tune_head,
}

if __name__ == "__main__":
    run.start(main)
