"""Requests for answers: token ids in, token ids with their finish reason out.

Two protocols: SGLang's native /generate, and the OpenAI completions of servers that return token ids (vLLM's).
"""

import sys
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from eagle3.engine.client import RequestRefused, ServerFailed, ask, ask_now, responds, without_tokens
from eagle3.engine.versions import REPORTED
from eagle3.errors import InputError

# Servers take what a request leaves out from their own options or from the model's generation_config.json.
NEUTRAL = {"min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
OTHER_PROMPT = "the server answered another prompt than it was sent: it cuts prompts or adds tokens"


@dataclass(frozen=True)
class Request:
    """One requested answer, by default one greedy token.

    `temperature` 0 is greedy, `top_k` 0 all; `stop_ids` end the answer and stay in it. Token ids are below
    `vocab_size`."""

    prompt_ids: list[int]
    seed: int = 0
    temperature: float = 0
    top_p: float = 1
    top_k: int = 0
    max_new_tokens: int = 1
    stop_ids: Set[int] = field(default_factory=frozenset)
    vocab_size: int = sys.maxsize


@dataclass(frozen=True)
class Answer:
    """`token_ids` holds the stop token when `finish_reason` is "stop"; otherwise the answer was cut ("length")."""

    token_ids: list[int]
    finish_reason: str


class SGLang:
    """SGLang's native protocol. Raises the errors of client.py, whose messages quote no conversation.

    `started_here`: whether servers of this kind are started where none run."""

    started_here = True

    def __init__(self, url: str, *, model: str | None = None) -> None:
        """A server of SGLang has one model, so that `model` is for other protocols."""
        self.url = url.rstrip("/").removesuffix("/v1")
        self.model = model

    async def complete(self, session: aiohttp.ClientSession, request: Request) -> Answer:
        sampling = {
            **NEUTRAL,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "top_k": request.top_k or -1,
            "max_new_tokens": request.max_new_tokens,
            "stop_token_ids": sorted(request.stop_ids),
            "sampling_seed": request.seed,  # heeded with --enable-deterministic-inference
            "skip_special_tokens": False,
        }
        body = {"input_ids": request.prompt_ids, "sampling_params": sampling}
        token_ids, meta = await self.generate(session, body)
        if meta.get("prompt_tokens") not in (None, len(request.prompt_ids)):  # cut by --allow-auto-truncate
            raise RequestRefused(OTHER_PROMPT)
        finish = meta["finish_reason"]
        return checked(token_ids, finish["type"], finish.get("matched"), request)

    async def generate(self, session: aiohttp.ClientSession, body: dict[str, Any]) -> tuple[list[int], dict[str, Any]]:
        """Return `output_ids` and `meta_info` of a request that has not been aborted."""
        answer = await ask(session, f"{self.url}/generate", body)
        try:
            meta, token_ids = answer["meta_info"], [*answer["output_ids"]]
            kind, message = meta["finish_reason"]["type"], meta["finish_reason"].get("message")
        except (KeyError, TypeError, AttributeError):
            raise ServerFailed("the response is no answer of SGLang's") from None
        if kind == "abort":
            refused = meta["finish_reason"].get("status_code") == 400
            raise (RequestRefused if refused else ServerFailed)(f"aborted: {without_tokens(message)}")
        return token_ids, meta

    async def model_names(self, session: aiohttp.ClientSession) -> list[str]:
        information = await ask(session, f"{self.url}/server_info")
        if not isinstance(information, dict):
            raise ServerFailed("its /server_info is not SGLang's")
        model = information.get("model_path")
        return [model] if isinstance(model, str) else []

    async def text_ids(self, session: aiohttp.ClientSession, text: str) -> list[int]:
        """Return the token ids of a text, with the special tokens that its tokenizer adds by default."""
        # Not by /tokenize: until 0.5.18 it answers 500 for every tokenizer without a model_max_length.
        one = {"model": "default", "prompt": text, "max_tokens": 1, "return_token_ids": True}
        return prompt_token_ids(await ask(session, f"{self.url}/v1/completions", one))

    async def chat_ids(
        self, session: aiohttp.ClientSession, messages: list[dict[str, str]], template_kwargs: Mapping[str, Any]
    ) -> list[int]:
        """Return the token ids of the prompt that the server's chat template makes of the messages."""
        chat = {"model": "default", "messages": messages, "chat_template_kwargs": dict(template_kwargs)}
        one = {**chat, "max_tokens": 1, "return_prompt_token_ids": True}
        return prompt_token_ids(await ask(session, f"{self.url}/v1/chat/completions", one))


class OpenAICompletions:
    """Completions with `return_token_ids`; its methods do what those of SGLang do."""

    started_here = False

    def __init__(self, url: str, *, model: str) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self.model = model

    async def complete(self, session: aiohttp.ClientSession, request: Request) -> Answer:
        body = {
            **NEUTRAL,
            "model": self.model,
            "prompt": request.prompt_ids,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "top_k": request.top_k or -1,
            "max_tokens": request.max_new_tokens,
            "stop_token_ids": sorted(request.stop_ids),
            "seed": request.seed,
            "skip_special_tokens": False,
            "return_token_ids": True,
        }
        answer = await ask(session, f"{self.url}/v1/completions", body)
        try:
            [choice] = answer["choices"]
            token_ids, kind = choice.get("token_ids"), choice["finish_reason"]
            token_ids = None if token_ids is None else [*token_ids]
            prompt_tokens = (answer.get("usage") or {}).get("prompt_tokens")
        except (KeyError, TypeError, ValueError, AttributeError):
            raise ServerFailed("the response is no completion of the OpenAI protocol") from None
        if token_ids is None:
            raise InputError(
                f"{self.url} returns text and no token ids, but training needs the ids that the target chose; serve "
                f"it with vLLM 0.10.2 or later or with SGLang (answers=sglang)"
            )
        same_ids = choice.get("prompt_token_ids") in (None, request.prompt_ids)
        if not same_ids or prompt_tokens not in (None, len(request.prompt_ids)):
            raise RequestRefused(OTHER_PROMPT)
        return checked(token_ids, kind, choice.get("stop_reason"), request)

    async def model_names(self, session: aiohttp.ClientSession) -> list[str]:
        answer = await ask(session, f"{self.url}/v1/models")
        try:
            return [model["id"] for model in answer["data"] if isinstance(model["id"], str)]
        except (KeyError, TypeError):
            raise ServerFailed("its /v1/models is not of the OpenAI protocol") from None

    async def text_ids(self, session: aiohttp.ClientSession, text: str) -> list[int]:
        return await self._tokenize(session, {"prompt": text})

    async def chat_ids(
        self, session: aiohttp.ClientSession, messages: list[dict[str, str]], template_kwargs: Mapping[str, Any]
    ) -> list[int]:
        return await self._tokenize(session, {"messages": messages, "chat_template_kwargs": dict(template_kwargs)})

    async def _tokenize(self, session: aiohttp.ClientSession, body: dict[str, Any]) -> list[int]:
        answer = await ask(session, f"{self.url}/tokenize", {"model": self.model, **body})
        tokens = answer.get("tokens") if isinstance(answer, dict) else None
        if not (isinstance(tokens, list) and tokens and all(type(token) is int for token in tokens)):
            raise RequestRefused("the response has no list of token ids")
        return tokens


Endpoint = SGLang | OpenAICompletions
ENDPOINTS: dict[str, type[Endpoint]] = {"sglang": SGLang, "openai": OpenAICompletions}  # by answers.name


def prompt_token_ids(answer: Any) -> list[int]:
    """Return the ids of the prompt from an answer of SGLang's OpenAI protocol; RequestRefused if it has none."""
    try:
        return [*answer["choices"][0]["prompt_token_ids"]]
    except (KeyError, TypeError, IndexError):
        raise RequestRefused("the answer has no prompt_token_ids") from None


def checked(token_ids: list[int], kind: Any, matched: Any, request: Request) -> Answer:
    """Return the answer if it is what was requested."""
    if kind not in ("stop", "length"):
        raise ServerFailed(f"the answer ended by {kind[:50] if isinstance(kind, str) else None!r}")
    if not all(type(token) is int and 0 <= token < request.vocab_size for token in token_ids):
        raise ServerFailed("the answer holds token ids outside the target's vocabulary")
    if len(token_ids) > request.max_new_tokens:
        raise ServerFailed("the answer is longer than sampling.max_new_tokens")
    if kind == "stop" and request.stop_ids.isdisjoint(token_ids[-1:]):
        # Some servers leave out the token that ended the answer, and name it.
        if not (isinstance(matched, int) and matched in request.stop_ids):
            raise RequestRefused("its last token ends no turn of the target: check the server's stop tokens")
        token_ids.append(matched)
    if not token_ids:
        raise ServerFailed("the answer holds no token ids")
    if not request.stop_ids.isdisjoint(token_ids[:-1]):
        raise RequestRefused("the answer continues after an end of turn: the server ignores stop_token_ids or EOS")
    ended = token_ids[-1] in request.stop_ids
    if not ended and len(token_ids) < request.max_new_tokens:
        raise RequestRefused(
            f"the server cut the answer before it was as long as was asked for ({len(token_ids)} of "
            f"{request.max_new_tokens} tokens): its context or its own limit is shorter"
        )
    return Answer(token_ids, "stop" if ended else kind)


def server_information(url: str) -> dict[str, Any]:
    """Return SGLang's version and settings. InputError if no SGLang answers at `url`."""
    try:
        information = ask_now(f"{url}/server_info")
        if not isinstance(information, dict):
            raise ServerFailed("the response is not SGLang's")
    except (ServerFailed, RequestRefused) as failure:
        raise InputError(f"{url}/server_info does not answer ({failure}); name the URL of a running SGLang") from None
    return {key: information[key] for key in REPORTED if key in information}


def is_reachable(url: str) -> bool:
    return responds(f"{url}/server_info")
