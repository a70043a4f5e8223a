"""From a config to who answers, in the process that does it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from eagle3 import cli
from eagle3.answers.answerer import Answerer, Sampling
from eagle3.answers.chat import Chat
from eagle3.answers.stage import prompt_limit
from eagle3.answers.work import Answering
from eagle3.engine.command import LaunchSettings
from eagle3.engine.own import for_place
from eagle3.errors import require_packages
from eagle3.target.capture import logit_transform_of
from eagle3.target.facts import context_of
from eagle3.target.model import Target, loaded_target
from eagle3.target.stored import StoredTarget, stored_target
from eagle3.workers.task import Place

SERVED = ("sglang", "openai")  # answers of a serving engine


def sampling_of(config: DictConfig) -> Sampling:
    return Sampling(**{field.name: config.responses[field.name] for field in fields(Sampling)})


def chat_of(config: DictConfig, target: Target | StoredTarget) -> Chat:
    return Chat(target.tokenizer, stop_ids=target.stop_ids, **cli.plain(config.chat))


def checked_target(config: DictConfig) -> Target:
    """Load the target; one that cannot be a teacher is refused before it answers."""
    target = loaded_target(**cli.plain(config.target))
    logit_transform_of(target)
    return target


@contextmanager
def answering(config: DictConfig, folder: Path, place: Place) -> Iterator[Answering]:
    """Make the task of a worker; `folder` takes the logs of servers."""
    target: Target | StoredTarget
    served = config.answers.name in SERVED
    target = stored_target(**cli.plain(config.target)) if served else checked_target(config)
    chat, sampling = chat_of(config, target), sampling_of(config)
    parts: dict[str, Any] = {"target": target, "sampling": sampling}
    if served:
        require_packages("aiohttp", extra="engine", needed_by=f"answers={config.answers.name}")
        launch = for_place(LaunchSettings(**cli.plain(config.launch)), place)
        parts |= {"name": config.answers.name, "chat": chat, "launch": launch, "folder": folder / place.folder}
    answerer: Answerer = cli.build(config.answers, leave_out=["name"], **parts)
    limit = prompt_limit(context_of(target.text_config), sampling.max_new_tokens, config.responses.max_prompt_tokens)
    with Answering(
        answerer, chat, seed=config.responses.seed, max_prompt_tokens=limit, on_length=config.responses.on_length
    ) as task:
        yield task
