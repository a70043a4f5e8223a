"""The answers stage: prompts.jsonl → answers.jsonl, by workers or imported; resumes prompt by prompt."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from transformers import PreTrainedConfig

from eagle3 import cli
from eagle3.answers.answerer import Answerer, Answering
from eagle3.answers.chat import Chat, require_bounded_template
from eagle3.answers.imported import ImportedAnswers, imported_rows
from eagle3.answers.store import AnswerCounts, AnswerStore, MadeWith
from eagle3.engine.endpoint import ENDPOINTS
from eagle3.engine.local_servers import for_worker
from eagle3.errors import InputError
from eagle3.settings.engine import LaunchSettings
from eagle3.settings.precomputing import Sampling, ServedSettings
from eagle3.target.capture import logit_transform_of
from eagle3.target.facts import context_of
from eagle3.target.files import TargetFiles
from eagle3.target.model import Target, loaded_target
from eagle3.target.stored import StoredTarget, stored_target
from eagle3.workers.build import workers_of
from eagle3.workers.meter import Meter
from eagle3.workers.task import Build, WorkerId, Workers, take_from

log = logging.getLogger(__name__)

WRITTEN_TOGETHER = 1024  # imported prompts; of others the answerer decides
AHEAD = 1024  # prompts that a worker holds, for an answerer that does not state how many it works on at once


def answer(config: DictConfig, target: StoredTarget, workers: Workers) -> AnswerCounts:
    chat, sampling, out_dir = chat_of(config, target), config.sampling, Path(config.out_dir)
    if config.answers.name == "imported":
        answers = cli.build(config.answers, leave_out=["name"])
        limit = sampling.max_prompt_tokens
        return import_answers(target=target, chat=chat, answers=answers, max_prompt_tokens=limit, out_dir=out_dir)
    made_with = MadeWith(
        answers=config.answers.name,
        chat=chat.settings,
        sampling=asdict(cli.settings(Sampling, config.sampling)),
        seed=sampling.seed,
        on_length=sampling.on_length,
    )
    return answer_prompts(
        target=target,
        made_with=made_with,
        workers=workers,
        build=answer_task(config),
        ahead=prompts_ahead(config),
        max_prompt_tokens=sampling.max_prompt_tokens,
        out_dir=out_dir,
    )


def answer_workers(config: DictConfig) -> Workers:
    servers = None
    if config.answers.name in ENDPOINTS:
        servers = 0 if config.answers.urls else config.answers.get("servers") or 1
    return workers_of(config, servers=servers)


def answer_task(config: DictConfig) -> Build:
    return partial(answering, cli.resolved(config), Path(config.out_dir) / "logs")


def prompts_ahead(config: DictConfig) -> int:
    """Return how many prompts a worker holds."""
    return 2 * (config.answers.get("in_flight") or config.answers.get("window") or AHEAD)


def chat_of(config: DictConfig, target: Target | TargetFiles) -> Chat:
    settings = cli.plain(config.chat)
    require_bounded_template(target.tokenizer, settings)
    return Chat(target.tokenizer, stop_ids=target.stop_ids, rows=target.text_config.vocab_size, **settings)


def checked_target(config: DictConfig) -> Target:
    """Load the target; one that cannot be a teacher is refused before it answers."""
    target = loaded_target(**cli.plain(config.target))
    logit_transform_of(target)
    return target


@contextmanager
def answering(config: DictConfig, folder: Path, worker: WorkerId) -> Iterator[Answering]:
    """Make the task of a worker; `folder` takes the logs of servers."""
    served = config.answers.name in ENDPOINTS
    target: Target | StoredTarget = stored_target(**cli.plain(config.target)) if served else checked_target(config)
    chat, sampling = chat_of(config, target), cli.settings(Sampling, config.sampling)
    target = replace(target, stop_ids=chat.stop_ids)
    parts: dict[str, Any] = {"target": target, "sampling": sampling}
    if served:
        settings, launch = cli.settings(ServedSettings, config.answers), cli.settings(LaunchSettings, config.launch)
        parts |= {"settings": settings, "chat": chat, "folder": folder / worker.folder}
        parts["launch"] = for_worker(launch, worker)
    own = [each.name for each in fields(ServedSettings)] if served else ["name"]
    answerer: Answerer = cli.build(config.answers, leave_out=own, **parts)
    limit = prompt_limit(target.text_config, sampling.max_new_tokens, config.sampling.max_prompt_tokens)
    with answerer:
        yield Answering(
            answerer, chat, seed=config.sampling.seed, max_prompt_tokens=limit, on_length=config.sampling.on_length
        )


def answer_prompts(
    *,
    target: Target | StoredTarget,
    made_with: MadeWith,
    workers: Workers,
    build: Build,
    ahead: int,
    max_prompt_tokens: int | None,
    out_dir: str | Path,
) -> AnswerCounts:
    """Answer the prompts in `out_dir`/prompts that have no answer yet, by tasks of answerer.Answering."""
    assert made_with.sampling is not None
    limit = prompt_limit(target.text_config, made_with.sampling["max_new_tokens"], max_prompt_tokens)
    store = _open_store(target, made_with, out_dir, limit)
    if not store.pending:
        return store.close()
    items = ((prompt["id"], prompt) for prompt in store.pending_prompts())
    with store.telling_kept(), Meter(store.pending, desc="answers", unit="prompt", of="answer tokens") as progress:
        for finished in workers(build, items, progress, ahead=ahead, total=store.pending):
            store.append(answered for _, answered in finished)
    return store.close()


def import_answers(
    *,
    target: Target | StoredTarget,
    chat: Chat,
    answers: ImportedAnswers,
    max_prompt_tokens: int | None,
    out_dir: str | Path,
) -> AnswerCounts:
    made_with = MadeWith(answers=answers.name, chat=chat.settings, sampling=None, seed=None, on_length=None)
    store = _open_store(target, made_with, out_dir)
    context = context_of(target.text_config)
    with store.telling_kept(), Meter(store.pending, desc="answers", unit="prompt", of="answer tokens") as progress:
        take = take_from(store.pending_prompts())
        while prompts := take(WRITTEN_TOGETHER):
            rows = [
                imported_rows(prompt, chat, answers, max_prompt_tokens=max_prompt_tokens, context=context)
                for prompt in prompts
            ]
            store.append(rows)
            progress.add(ended=len(prompts))
    return store.close()


def prompt_limit(text_config: PreTrainedConfig, max_new_tokens: int, max_prompt_tokens: int | None) -> int | None:
    """Return the most tokens of a prompt that leave room for its answer in the target's context."""
    context = context_of(text_config)
    if context is None:
        return max_prompt_tokens
    if max_new_tokens >= context:
        raise InputError(
            f"sampling.max_new_tokens={max_new_tokens} leaves no room for a prompt in the target's context of "
            f"{context} tokens; choose less"
        )
    room = context - max_new_tokens
    return room if max_prompt_tokens is None else min(room, max_prompt_tokens)


def _open_store(
    target: Target | StoredTarget, made_with: MadeWith, out_dir: str | Path, limit: int | None = None
) -> AnswerStore:
    identity = target.identity.with_template(made_with.chat["template_hash"])
    store = AnswerStore(Path(out_dir), identity, made_with, prompt_limit=limit)
    if not store.pending:
        log.info("%s is up to date", store.answers)
    elif store.kept:
        log.info("%s: kept %d of %d prompts", store.folder, store.kept, store.prompt_count)
    return store
