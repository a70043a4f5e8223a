"""The responses stage: prompts.jsonl → responses.jsonl, by an answerer or imported; resumes prompt by prompt."""

import logging
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from itertools import islice
from pathlib import Path

from tqdm import tqdm

from eagle3.answers.answerer import Answerer, Sampling
from eagle3.answers.chat import Chat
from eagle3.answers.dialogue import Dialogue
from eagle3.answers.imported import ImportedAnswers, imported_rows
from eagle3.answers.store import Counts, MadeWith, ResponseStore
from eagle3.errors import InputError
from eagle3.target.model import Target
from eagle3.target.stored import StoredTarget

log = logging.getLogger(__name__)

WRITTEN_TOGETHER = 1024  # imported prompts; of others the answerer decides


def answer_prompts(
    *,
    target: Target | StoredTarget,
    chat: Chat,
    answerer: Answerer | ImportedAnswers,
    sampling: Sampling,
    out_dir: str | Path,
    max_prompt_tokens: int | None,
    seed: int,
    on_length: str,
) -> Counts:
    """Answer the prompts in `out_dir`/prompts that have no answer yet, or keep the answers that they came with."""
    made_with = (
        MadeWith(answers=answerer.name, chat=chat.settings, sampling=None, seed=None, on_length=None)
        if isinstance(answerer, ImportedAnswers)
        else MadeWith(
            answers=answerer.name, chat=chat.settings, sampling=asdict(sampling), seed=seed, on_length=on_length
        )
    )
    store = ResponseStore(Path(out_dir), target.identity.with_template(chat.settings["template_hash"]), made_with)
    if not store.pending:
        log.info("%s is up to date", store.responses)
        return store.close()
    context = getattr(target.text_config, "max_position_embeddings", None)
    with tqdm(total=store.pending, unit="prompt", desc="responses", smoothing=0.05) as progress:
        if isinstance(answerer, ImportedAnswers):
            for prompts in _batched(store.pending_prompts(), WRITTEN_TOGETHER):
                store.append(
                    imported_rows(prompt, chat, answerer, max_prompt_tokens=max_prompt_tokens, context=context)
                    for prompt in prompts
                )
                progress.update(len(prompts))
        else:
            limit = _prompt_limit(context, sampling.max_new_tokens, max_prompt_tokens)
            dialogues = (
                Dialogue(prompt, chat, seed=seed, max_prompt_tokens=limit, on_length=on_length)
                for prompt in store.pending_prompts()
            )
            for finished in answerer(dialogues, progress):
                store.append((dialogue.rows, dialogue.errors) for dialogue in finished)
    return store.close()


def _prompt_limit(context: int | None, max_new_tokens: int, max_prompt_tokens: int | None) -> int | None:
    if context is None:
        return max_prompt_tokens
    if max_new_tokens >= context:
        raise InputError(
            f"responses.max_new_tokens={max_new_tokens} leaves no room for a prompt in the target's context of "
            f"{context} tokens; choose less"
        )
    room = context - max_new_tokens
    return room if max_prompt_tokens is None else min(room, max_prompt_tokens)


def _batched(items: Iterable, size: int) -> Iterator[list]:
    items = iter(items)
    while batch := list(islice(items, size)):
        yield batch
