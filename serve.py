"""Export a trained head as an SGLang checkpoint, check one, measure its accept length with our own decoder.

python serve.py action=export run=RUN head=HEAD
python serve.py action=check target.path=TARGET head=HEAD           # exit status 1 and a reason if something is wrong
python serve.py action=decode target.path=TARGET head=HEAD prompts.path=FILE.jsonl steps=3 limit=40   # one JSON line
"""

import json
from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig

from eagle3 import run
from eagle3.chat import Chat
from eagle3.errors import InputError
from eagle3.serving import export
from eagle3.serving.acceptance import Decoding, Judge, check_head
from eagle3.serving.check import Finding, require_no_errors, table
from eagle3.serving.checkpoint import MAKE_HEAD, read_files
from eagle3.serving.measured_prompts import prompt_source
from eagle3.target import load_target


@hydra.main(version_base="1.3", config_path="conf", config_name="serve")
@run.reported
def main(config: DictConfig) -> None:
    run.quiet_libraries()
    if config.action not in ACTIONS:
        raise InputError(f"action={config.action} is unknown; take one of: {', '.join(ACTIONS)}")
    if config.head is None:
        raise InputError(f"head is not set; give the folder of an exported head, made by: {MAKE_HEAD}")
    ACTIONS[config.action](config)


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
    conclude(export.check_export(trained, head, judge), config.head)


def check(config: DictConfig) -> None:
    files = read_files(config.head)
    conclude(check_head(files, make_judge(config, run.plain(config.target))), config.head)


def decode(config: DictConfig) -> None:
    if config.prompts.path is None:
        raise InputError("prompts.path is not set; give conversations to decode, e.g. prompts.path=FILE.jsonl")
    judge = make_judge(config, run.plain(config.target))
    print(json.dumps(judge.measured(Path(config.head), judge.prompts(None))))


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


def conclude(findings: list[Finding], head: str) -> None:
    print(table(findings))
    require_no_errors(findings, head)


ACTIONS = {"export": export_head, "check": check, "decode": decode}

if __name__ == "__main__":
    run.start(main)
