"""From a config to answers: the stage in the driver, and the answerer in a worker."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from eagle3 import cli
from eagle3.answers.answerer import Answerer, Answering, Sampling
from eagle3.answers.chat import Chat
from eagle3.answers.stage import answer_prompts, import_answers, prompt_limit
from eagle3.answers.store import Counts, MadeWith
from eagle3.engine.endpoint import ENDPOINTS
from eagle3.engine.local_servers import for_worker
from eagle3.settings.engine import LaunchSettings
from eagle3.settings.precomputing import ServedSettings
from eagle3.target.capture import logit_transform_of
from eagle3.target.facts import context_of
from eagle3.target.files import TargetFiles
from eagle3.target.model import Target, loaded_target
from eagle3.target.stored import StoredTarget, stored_target
from eagle3.workers.build import workers_of
from eagle3.workers.task import WorkerId

AHEAD = 1024  # prompts that a worker holds, for an answerer that does not state how many it works on at once


def answer(config: DictConfig, target: StoredTarget) -> Counts:
    """Run the answers stage."""
    chat, sampling, out_dir = chat_of(config, target), config.sampling, Path(config.out_dir)
    if config.answers.name == "imported":
        answers = cli.build(config.answers, leave_out=["name"])
        limit = sampling.max_prompt_tokens
        return import_answers(target=target, chat=chat, answers=answers, max_prompt_tokens=limit, out_dir=out_dir)
    made_with = MadeWith(
        answers=config.answers.name,
        chat=chat.settings,
        sampling=asdict(sampling_of(config)),
        seed=sampling.seed,
        on_length=sampling.on_length,
    )
    servers = None
    if config.answers.name in ENDPOINTS:
        servers = 0 if config.answers.urls else config.answers.get("servers") or 1
    in_flight = config.answers.get("in_flight") or config.answers.get("window") or AHEAD
    return answer_prompts(
        target=target,
        made_with=made_with,
        workers=workers_of(config, servers=servers),
        build=partial(answering, cli.resolved(config), out_dir / "logs"),
        ahead=2 * in_flight,
        out_dir=out_dir,
    )


def sampling_of(config: DictConfig) -> Sampling:
    return Sampling(**{field.name: config.sampling[field.name] for field in fields(Sampling)})


def chat_of(config: DictConfig, target: Target | TargetFiles) -> Chat:
    return Chat(target.tokenizer, stop_ids=target.stop_ids, **cli.plain(config.chat))


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
    chat, sampling = chat_of(config, target), sampling_of(config)
    parts: dict[str, Any] = {"target": target, "sampling": sampling}
    if served:
        settings, launch = cli.settings(ServedSettings, config.answers), cli.settings(LaunchSettings, config.launch)
        parts |= {"settings": settings, "chat": chat, "folder": folder / worker.folder}
        parts["launch"] = for_worker(launch, worker)
    own = [each.name for each in fields(ServedSettings)] if served else ["name"]
    answerer: Answerer = cli.build(config.answers, leave_out=own, **parts)
    limit = prompt_limit(context_of(target.text_config), sampling.max_new_tokens, config.sampling.max_prompt_tokens)
    with answerer:
        yield Answering(
            answerer, chat, seed=config.sampling.seed, max_prompt_tokens=limit, on_length=config.sampling.on_length
        )
