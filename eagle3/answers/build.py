"""The answers stage: prompts.jsonl → answers.jsonl, by workers or imported; resumes prompt by prompt."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from eagle3.answers.answerer import Answerer, Answering
from eagle3.answers.chat import QUESTION, Chat, RefusedConversation, common_start
from eagle3.answers.imported import ImportedAnswers, imported_rows
from eagle3.answers.store import AnswerCounts, AnswerStore, MadeWith
from eagle3.engine.endpoint import ENDPOINTS
from eagle3.engine.local_servers import for_worker
from eagle3.errors import InputError
from eagle3.prompts.reading.rendered import TargetMarkers
from eagle3.settings.precomputing import CaptureRun, ChatSettings, PrecomputeRun, Sampling, ServedSettings
from eagle3.target.capture import read_logit_transform
from eagle3.target.facts import context_length
from eagle3.target.files import TargetFiles
from eagle3.target.model import Target, loaded_target
from eagle3.target.stored import StoredTarget, stored_target
from eagle3.workers.build import build_workers
from eagle3.workers.meter import Meter
from eagle3.workers.task import Build, WorkerId, Workers, take_from

log = logging.getLogger(__name__)

WRITTEN_TOGETHER = 1024  # imported prompts; of others the answerer decides
AHEAD = 1024  # prompts that a worker holds, for an answerer that does not state how many it works on at once


def answer(
    run: PrecomputeRun, target: StoredTarget, workers: Workers, *, as_item: Callable[[dict[str, Any]], Any]
) -> AnswerCounts:
    """`as_item`: what a worker gets for a prompt (answerer.Answering), for all but imported answers."""
    chat, sampling, out_dir = build_chat(run.chat, target), run.sampling, run.folder
    if run.answered_by == "imported":
        answers = run.answers.build(leave_out=["name"])
        limit = sampling.max_prompt_tokens
        return import_answers(target=target, chat=chat, answers=answers, max_prompt_tokens=limit, out_dir=out_dir)
    return answer_prompts(
        target=target,
        made_with=answer_settings(run, chat),
        workers=workers,
        build=answer_task(run),
        ahead=prompts_ahead(run),
        max_prompt_tokens=sampling.max_prompt_tokens,
        out_dir=out_dir,
        as_item=as_item,
    )


def answer_settings(run: PrecomputeRun, chat: Chat) -> MadeWith:
    """Return what decides answers that are not imported."""
    sampling = asdict(run.sampling.only(Sampling))
    return MadeWith(
        answers=run.answered_by,
        chat=chat.settings,
        sampling=sampling,
        seed=run.sampling.seed,
        on_length=run.sampling.on_length,
    )


def answer_workers(run: PrecomputeRun) -> Workers:
    servers = None
    if run.answered_by in ENDPOINTS:
        served = run.answers.read(ServedSettings)
        servers = 0 if served.urls else served.servers or 1
    return build_workers(run, servers=servers)


def answer_task(run: PrecomputeRun) -> Build:
    return partial(answering, run, run.folder / "logs")


def prompts_ahead(run: PrecomputeRun) -> int:
    """Return how many prompts a worker holds."""
    at_once = run.answers.keys.get("in_flight", run.answers.keys.get("window", AHEAD))
    return 2 * at_once


def build_chat(settings: ChatSettings, target: Target | TargetFiles) -> Chat:
    return Chat(target.tokenizer, settings, stop_ids=target.stop_ids, rows=target.text_config.vocab_size)


def target_markers(chat: Chat) -> TargetMarkers:
    """Return what the target's template and tokenizer write between turns, to recognise rendered conversations."""
    try:  # between a question and its answer, as far as generating one and rendering one agree
        rendered = chat.render([QUESTION], add_generation_prompt=True), chat.around_answer([QUESTION])[0]
        between = common_start(*(text.partition(QUESTION["content"])[2] for text in rendered)).strip()
    except RefusedConversation:
        between = ""
    return TargetMarkers(between, frozenset(chat.tokenizer.convert_ids_to_tokens(sorted(chat.control_ids))))


def checked_target(run: CaptureRun) -> Target:
    """Load the target; one that cannot be a teacher is refused before it answers."""
    target = loaded_target(**vars(run.target))
    read_logit_transform(target)
    return target


@contextmanager
def answering(run: PrecomputeRun, folder: Path, worker: WorkerId) -> Iterator[Answering]:
    """Make the task of a worker; `folder` takes the logs of servers."""
    served = run.answered_by in ENDPOINTS
    target: Target | StoredTarget = stored_target(**vars(run.target)) if served else checked_target(run)
    chat, sampling = build_chat(run.chat, target), run.sampling.only(Sampling)
    target = replace(target, stop_ids=chat.stop_ids)
    parts: dict[str, Any] = {"target": target, "sampling": sampling}
    if served:
        settings, launch = run.answers.read(ServedSettings), for_worker(run.launch, worker)
        parts |= {"settings": settings, "chat": chat, "folder": folder / worker.folder, "launch": launch}
    own = [each.name for each in fields(ServedSettings)] if served else ["name"]
    answerer: Answerer = run.answers.build(leave_out=own, **parts)
    limit = prompt_limit(target.text_config, sampling.max_new_tokens, run.sampling.max_prompt_tokens)
    with answerer:
        yield Answering(
            answerer, chat, seed=run.sampling.seed, max_prompt_tokens=limit, on_length=run.sampling.on_length
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
    as_item: Callable[[dict[str, Any]], Any] = lambda prompt: prompt,
) -> AnswerCounts:
    """Answer the prompts in `out_dir`/prompts that have no answer yet, by tasks of answerer.Answering."""
    assert made_with.sampling is not None
    limit = prompt_limit(target.text_config, made_with.sampling["max_new_tokens"], max_prompt_tokens)
    store = _open_store(target, made_with, out_dir, limit)
    if not store.pending:
        return store.close()
    items = ((prompt["id"], as_item(prompt)) for prompt in store.pending_prompts())
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
    context = context_length(target.text_config)
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
    context = context_length(text_config)
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
