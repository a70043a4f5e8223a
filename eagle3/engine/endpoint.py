"""A running server and how it is asked for answers: token ids in, token ids with their finish reason out.

Two protocols: SGLang's native /generate, and the OpenAI completions of servers that return token ids (vLLM's).
"""

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import Any, Protocol

import aiohttp

from eagle3.engine.client import message_of, without_tokens
from eagle3.engine.process import KEY, key_header
from eagle3.errors import InputError


@dataclass(frozen=True)
class Request:
    """One answer that is wanted. `temperature` 0 is greedy, `top_k` 0 all; `stop_ids` end the answer and stay in it."""

    prompt_ids: list[int]
    seed: int
    temperature: float
    top_p: float
    top_k: int
    max_new_tokens: int
    stop_ids: Set[int] = field(default_factory=frozenset)


@dataclass(frozen=True)
class Completion:
    """`token_ids` holds the stop token when `finish_reason` is "stop"; otherwise it is "length"."""

    token_ids: list[int]
    finish_reason: str


class ServerFailed(Exception):
    """The server is down, busy, slow or broken: another one, or the same later, may answer."""


class RequestRefused(Exception):
    """The server works and does not answer this request: no other would."""


class Endpoint(Protocol):
    """A server at `url`. Errors are those of this module, with a message that holds no text of a conversation."""

    url: str

    async def complete(self, session: aiohttp.ClientSession, request: Request) -> Completion: ...

    async def describe(self, session: aiohttp.ClientSession) -> dict[str, Any]:
        """Return `model`, the server's name for its model, and `settings`, what else it reports about itself."""

    async def text_ids(self, session: aiohttp.ClientSession, text: str) -> list[int]:
        """Return the token ids of a text, with the special tokens that its tokenizer adds by default."""

    async def chat_ids(
        self, session: aiohttp.ClientSession, messages: list[dict[str, str]], template_kwargs: Mapping[str, Any]
    ) -> list[int]:
        """Return the token ids of the prompt that the server's chat template makes of the messages."""


def new_session(*, timeout_s: float) -> aiohttp.ClientSession:
    """Open a session that holds back no request, gives one up after `timeout_s`, and carries the key."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=timeout_s, sock_connect=min(30, timeout_s)),
        headers=key_header(),
    )


async def ask(session: aiohttp.ClientSession, url: str, body: dict[str, Any] | None = None) -> Any:
    """Return the JSON of an answer: POST where there is a body."""
    try:
        async with session.request("GET" if body is None else "POST", url, json=body) as response:
            if response.status == 200:
                return await response.json(content_type=None)
            said = f"HTTP {response.status} {response.reason}: {message_of(await response.read())}"
    except TimeoutError:
        raise ServerFailed(f"no answer within {session.timeout.total:g} s") from None
    except (aiohttp.ClientError, OSError) as error:
        raise ServerFailed(f"{type(error).__name__}: {error}"[:200]) from None
    except ValueError:
        raise ServerFailed("what came is no JSON") from None
    if response.status in (401, 403):
        raise InputError(f"{url} asks for a key ({said}); set {KEY} in the environment")
    if response.status in (408, 429) or response.status >= 500:
        raise ServerFailed(said)
    raise RequestRefused(said)


class SGLang:
    """SGLang's native protocol."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")

    async def complete(self, session: aiohttp.ClientSession, request: Request) -> Completion:
        sampling = {
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
        finish = meta["finish_reason"]
        return checked(token_ids, finish["type"], finish.get("matched"), request)

    async def generate(self, session: aiohttp.ClientSession, body: dict[str, Any]) -> tuple[list[int], dict[str, Any]]:
        """Return `output_ids` and `meta_info` of a request that has not been aborted."""
        answer = await ask(session, f"{self.url}/generate", body)
        try:
            meta, token_ids = answer["meta_info"], [*answer["output_ids"]]
            kind, message = meta["finish_reason"]["type"], str(meta["finish_reason"].get("message"))
        except (KeyError, TypeError, AttributeError):
            raise ServerFailed("what came is no answer of SGLang's") from None
        if kind == "abort":
            said = f"aborted: {without_tokens(message)}"
            raise RequestRefused(said) if meta["finish_reason"].get("status_code") == 400 else ServerFailed(said)
        return token_ids, meta

    async def describe(self, session: aiohttp.ClientSession) -> dict[str, Any]:
        settings = await ask(session, f"{self.url}/server_info")
        return {"model": settings.get("model_path"), "settings": settings}

    # Not by /tokenize: until 0.5.18 it answers 500 for every tokenizer without a model_max_length.
    async def text_ids(self, session: aiohttp.ClientSession, text: str) -> list[int]:
        one = {"model": "default", "prompt": text, "max_tokens": 1, "return_token_ids": True}
        return prompt_token_ids(await ask(session, f"{self.url}/v1/completions", one))

    async def chat_ids(
        self, session: aiohttp.ClientSession, messages: list[dict[str, str]], template_kwargs: Mapping[str, Any]
    ) -> list[int]:
        chat = {"model": "default", "messages": messages, "chat_template_kwargs": dict(template_kwargs)}
        one = {**chat, "max_tokens": 1, "return_prompt_token_ids": True}
        return prompt_token_ids(await ask(session, f"{self.url}/v1/chat/completions", one))


class OpenAICompletions:
    """Completions with `return_token_ids`."""

    def __init__(self, url: str, *, model: str) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self.model = model

    async def complete(self, session: aiohttp.ClientSession, request: Request) -> Completion:
        body = {
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
        except (KeyError, TypeError, ValueError, AttributeError):
            raise ServerFailed("what came is no completion of the OpenAI protocol") from None
        if token_ids is None:
            raise InputError(
                f"{self.url} returns text and no token ids, which training needs as the target said them; serve it "
                f"with vLLM 0.10.2 or later or with SGLang (answers=sglang)"
            )
        return checked([*token_ids], kind, choice.get("stop_reason"), request)

    async def describe(self, session: aiohttp.ClientSession) -> dict[str, Any]:
        models = (await ask(session, f"{self.url}/v1/models")).get("data") or [{}]
        served = [model.get("id") for model in models]
        return {"model": self.model if self.model in served else served[0], "settings": models[0]}

    async def text_ids(self, session: aiohttp.ClientSession, text: str) -> list[int]:
        return await self._tokenize(session, {"prompt": text})

    async def chat_ids(
        self, session: aiohttp.ClientSession, messages: list[dict[str, str]], template_kwargs: Mapping[str, Any]
    ) -> list[int]:
        return await self._tokenize(session, {"messages": messages, "chat_template_kwargs": dict(template_kwargs)})

    async def _tokenize(self, session: aiohttp.ClientSession, body: dict[str, Any]) -> list[int]:
        answer = await ask(session, f"{self.url}/tokenize", {"model": self.model, **body})
        if not isinstance(answer, dict) or not isinstance(answer.get("tokens"), list):
            raise RequestRefused("no list of tokens came")
        return answer["tokens"]


def prompt_token_ids(answer: Any) -> list[int]:
    """Return the ids of the prompt from an answer of SGLang's OpenAI protocol; RequestRefused if it has none."""
    try:
        return [*answer["choices"][0]["prompt_token_ids"]]
    except (KeyError, TypeError, IndexError):
        raise RequestRefused("the answer has no prompt_token_ids") from None


def checked(token_ids: list[int], kind: Any, matched: Any, request: Request) -> Completion:
    """Hold an answer against what was asked for."""
    if kind not in ("stop", "length"):
        raise ServerFailed(f"the answer ended by {str(kind)[:50]!r}")
    if not token_ids or not all(type(token) is int for token in token_ids):
        raise ServerFailed("the answer holds no token ids")
    if len(token_ids) > request.max_new_tokens:
        raise ServerFailed("the answer is longer than responses.max_new_tokens")
    if kind == "stop" and token_ids[-1] not in request.stop_ids:
        if matched not in request.stop_ids:  # some leave out the token that ended the answer, and name it
            raise RequestRefused("the answer ended at what is no end of turn of the target: look at the server's stops")
        token_ids.append(matched)
    early = next((place for place, token in enumerate(token_ids[:-1]) if token in request.stop_ids), None)
    if early is not None:
        raise RequestRefused("the answer goes on behind an end of turn: the server ignores stop_token_ids or EOS")
    return Completion(token_ids, "stop" if token_ids[-1] in request.stop_ids else kind)
