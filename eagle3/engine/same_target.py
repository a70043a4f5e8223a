"""Checks that a running server serves the configured target: the same model, tokenizer and chat template."""

import json
import logging
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp

from eagle3.engine.client import RequestRefused, ServerFailed
from eagle3.engine.endpoint import Endpoint, Request
from eagle3.errors import InputError, printable
from eagle3.target.facts import layer_count
from eagle3.target.files import TargetFiles, config_hash
from eagle3.target.tensors import CheckpointTensors

log = logging.getLogger(__name__)

PLACES = 8
LISTED = 5  # models of a server, in an error
SENTENCE = "Zebras don't count 1,234 µ-ops; naïve café owners do!\n\tif x != y: return 'z'  # 日本語"


async def require_same_model(
    session: aiohttp.ClientSession, endpoint: Endpoint, target: TargetFiles, served_as: str | None
) -> None:
    """Find the target among the server's models, and ask for it by its name there.

    A folder that can be read here is identified by its files; any other name must be `served_as` or the target's."""
    names = await endpoint.model_names(session)
    for is_target in (lambda name: name in (served_as, target.path), lambda name: _is_copy(name, target)):
        if found := [name for name in names if is_target(name)]:
            endpoint.model = found[0]
            return
    served = [printable(name)[:200] for name in names]
    remedy = (
        f"if it is the same model under another name, say so with answers.served_as={served[0]}; else "
        if served
        else ""
    )
    raise InputError(
        f"{endpoint.url} serves {', '.join(served[:LISTED]) or 'no model by name'}, the target is "
        f"target.path={target.path}: {remedy}give the URL of a server of the target"
    )


async def require_same_tokens(
    session: aiohttp.ClientSession,
    endpoint: Endpoint,
    text_ids: list[int],
    prompt_ids: list[int] | None,
    template_kwargs: Mapping[str, Any],
) -> None:
    """Compare the server's ids of SENTENCE with ours, and of the prompt that asks it (None: not compared).

    A server that does not report token ids is accepted; a warning names what was not compared."""
    theirs = await _ids_or_none(endpoint.text_ids(session, SENTENCE), endpoint.url, "tokenizer")
    if theirs is not None and theirs != text_ids:
        raise InputError(f"{endpoint.url} has another tokenizer than target.path; serve the target with its own")
    if prompt_ids is None:
        return
    asked = [{"role": "user", "content": SENTENCE}]
    rendered = await _ids_or_none(endpoint.chat_ids(session, asked, template_kwargs), endpoint.url, "chat template")
    if rendered is not None and rendered != prompt_ids:
        raise InputError(
            f"{endpoint.url} renders other prompts than this run ({len(rendered)} ids instead of {len(prompt_ids)} for "
            f"one sentence), so a head would be trained for other prompts than it serves; give both the same chat "
            f"template: chat.template, chat.template_kwargs and chat.date here, --chat-template there"
        )


async def _ids_or_none(ids: Awaitable[list[int]], url: str, what: str) -> list[int] | None:
    try:
        return await ids
    except (RequestRefused, ServerFailed) as failure:
        log.warning("%s: its %s is not compared with the target's, because it does not report token ids (%s)",
                    url, what, failure)  # fmt: skip
        return None


async def require_same_weights(
    session: aiohttp.ClientSession, endpoints: Sequence[Endpoint], sentence_ids: list[int]
) -> None:
    """Compare the servers' next tokens at PLACES positions of SENTENCE: with other weights most differ, with other
    kernels only near-ties."""
    lengths = sorted({max(1, len(sentence_ids) * place // PLACES) for place in range(1, PLACES + 1)})
    requests = [Request(sentence_ids[:length]) for length in lengths]

    async def next_tokens(endpoint: Endpoint) -> list[int]:
        return [(await endpoint.complete(session, request)).token_ids[0] for request in requests]

    try:
        first, *others = [await next_tokens(endpoint) for endpoint in endpoints]
    except (ServerFailed, RequestRefused) as failure:
        log.warning("the servers' weights are not compared: one does not answer (%s)", failure)
        return
    for endpoint, tokens in zip(endpoints[1:], others, strict=True):
        different = sum(one != other for one, other in zip(first, tokens, strict=True))
        if different > len(lengths) / 2:
            raise InputError(
                f"{endpoint.url} and {endpoints[0].url} do not serve the same weights: of {len(lengths)} next tokens "
                f"they choose {different} differently; leave one out of answers.urls"
            )


def _is_copy(folder: str, target: TargetFiles) -> bool:
    """Say whether a folder has the target's config.json, and its weights where they can be read here: fine-tunes of a
    model have its config.json."""
    try:
        if config_hash(json.loads((Path(folder) / "config.json").read_bytes())) != target.identity.config_hash:
            return False
    except (OSError, ValueError):
        return False
    with suppress(InputError):  # no weights here, or in another format
        weights = CheckpointTensors(folder, None, Path(folder))
        return weights.hash(layer_count(target.text_config)) == target.identity.weights_hash
    return True
