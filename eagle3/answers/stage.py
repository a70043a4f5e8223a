"""The answers stage: prompts.jsonl → answers.jsonl, by workers or imported; resumes prompt by prompt."""

import logging
from pathlib import Path

from eagle3.answers.chat import Chat
from eagle3.answers.imported import ImportedAnswers, imported_rows
from eagle3.answers.store import AnswerStore, Counts, MadeWith
from eagle3.errors import InputError
from eagle3.target.facts import context_of
from eagle3.target.model import Target
from eagle3.target.stored import StoredTarget
from eagle3.workers.meter import Meter
from eagle3.workers.task import Build, Workers, take_from

log = logging.getLogger(__name__)

WRITTEN_TOGETHER = 1024  # imported prompts; of others the answerer decides


def answer_prompts(
    *,
    target: Target | StoredTarget,
    made_with: MadeWith,
    workers: Workers,
    build: Build,
    ahead: int,
    out_dir: str | Path,
) -> Counts:
    """Answer the prompts in `out_dir`/prompts that have no answer yet, by tasks of answerer.Answering."""
    store = _open_store(target, made_with, out_dir)
    if not store.pending:
        return store.close()
    items = ((prompt["id"], prompt) for prompt in store.pending_prompts())
    with Meter(store.pending, desc="answers", unit="prompt", of="answer tokens") as progress:
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
) -> Counts:
    """Keep the answers that the prompts in `out_dir`/prompts came with."""
    made_with = MadeWith(answers=answers.name, chat=chat.settings, sampling=None, seed=None, on_length=None)
    store = _open_store(target, made_with, out_dir)
    context = context_of(target.text_config)
    with Meter(store.pending, desc="answers", unit="prompt", of="answer tokens") as progress:
        take = take_from(store.pending_prompts())
        while prompts := take(WRITTEN_TOGETHER):
            rows = [
                imported_rows(prompt, chat, answers, max_prompt_tokens=max_prompt_tokens, context=context)
                for prompt in prompts
            ]
            store.append(rows)
            progress.add(ended=len(prompts))
    return store.close()


def prompt_limit(context: int | None, max_new_tokens: int, max_prompt_tokens: int | None) -> int | None:
    """Return the most tokens of a prompt that leave room for its answer in the target's context."""
    if context is None:
        return max_prompt_tokens
    if max_new_tokens >= context:
        raise InputError(
            f"sampling.max_new_tokens={max_new_tokens} leaves no room for a prompt in the target's context of "
            f"{context} tokens; choose less"
        )
    room = context - max_new_tokens
    return room if max_prompt_tokens is None else min(room, max_prompt_tokens)


def _open_store(target: Target | StoredTarget, made_with: MadeWith, out_dir: str | Path) -> AnswerStore:
    store = AnswerStore(Path(out_dir), target.identity.with_template(made_with.chat["template_hash"]), made_with)
    if not store.pending:
        log.info("%s is up to date", store.answers)
    return store
