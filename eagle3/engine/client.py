"""One request to SGLang's native /generate: token ids in, times and counts out."""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp

from eagle3.engine.process import key_header

LONGEST_LINE = 16 * 2**20  # bytes: each event repeats the whole answer so far
CUT = "the stream ended before the answer did"


@dataclass(frozen=True)
class ServedAnswer:
    """One answer of a server, or in `error` why there is none. Times are in seconds since the request was sent.

    `verify_ct`, `correct_drafts` and `histogram` are SGLang's counts (0 and empty without a head): verifications,
    accepted drafts, and how many verifications accepted 0, 1, 2, … drafts. The token that prefill gives costs no
    verification. `output_ids` holds the stop token."""

    ttft_s: float | None = None
    latency_s: float | None = None
    output_tokens: int = 0
    finish_reason: str | None = None
    verify_ct: int = 0
    correct_drafts: int = 0
    histogram: tuple[int, ...] = ()
    error: str | None = None
    output_ids: tuple[int, ...] = ()

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first: (latency - time to first token) / (tokens - 1)."""
        if self.latency_s is None or self.ttft_s is None or self.output_tokens < 2:
            return None
        return (self.latency_s - self.ttft_s) / (self.output_tokens - 1)


def new_session(*, timeout_s: float) -> aiohttp.ClientSession:
    """Open a session that holds back no request (limit 0) and gives one up after `timeout_s`."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=timeout_s),
        read_bufsize=LONGEST_LINE,
        headers=key_header(),
    )


async def generate(
    session: aiohttp.ClientSession, url: str, prompt_ids: list[int], *, sampling: Mapping[str, Any]
) -> ServedAnswer:
    """Answer one prompt; `sampling` as SGLang's `sampling_params`. What goes wrong is in `error`, never raised."""
    body = {"input_ids": prompt_ids, "sampling_params": dict(sampling), "stream": True}
    try:
        return await _streamed(session, f"{url}/generate", body)
    except TimeoutError:
        return ServedAnswer(error=f"no answer within {session.timeout.total} s")
    except (aiohttp.ClientError, OSError) as error:
        return ServedAnswer(error=f"{type(error).__name__}: {error}"[:200])
    except (ValueError, TypeError, KeyError, AttributeError):
        return ServedAnswer(error="what came is no event of SGLang's")


async def flush_cache(session: aiohttp.ClientSession, url: str) -> bool:
    """Empty the server's prefix cache and say whether it did. The server waits for what still runs, up to 10 s."""
    try:
        async with session.post(f"{url}/flush_cache", params={"timeout": 10}) as response:
            return response.status == 200
    except (TimeoutError, aiohttp.ClientError, OSError):
        return False


async def _streamed(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> ServedAnswer:
    start = time.perf_counter()
    ttft_s, latency_s, last_event = None, 0.0, b""
    async with session.post(url, json=body) as response:
        if response.status != 200:
            return ServedAnswer(error=f"HTTP {response.status} {response.reason}: {message_of(await response.read())}")
        async for line in response.content:
            event = line.strip().removeprefix(b"data:").strip()
            if not event or event == b"[DONE]":
                continue
            # Only the last event is parsed: each repeats the whole answer so far, and the time that takes at high
            # concurrency would count as the server's.
            latency_s, last_event = time.perf_counter() - start, event
            ttft_s = latency_s if ttft_s is None else ttft_s
    return _answer(json.loads(last_event) if last_event else {}, ttft_s, latency_s)


def _answer(event: dict[str, Any], ttft_s: float | None, latency_s: float) -> ServedAnswer:
    meta = event.get("meta_info") or {}
    finish = meta.get("finish_reason") or {}
    if "error" in event:
        return ServedAnswer(error=message_of(json.dumps(event).encode()))
    if finish.get("type") == "abort":
        return ServedAnswer(error=f"aborted: {without_tokens(str(finish.get('message')))}")
    if not finish:
        return ServedAnswer(error=CUT)
    tokens, output_ids = meta["completion_tokens"], tuple(event.get("output_ids", ()))
    if len(output_ids) != tokens:
        return ServedAnswer(
            error="the last event lacks tokens: start the server without --incremental-streaming-output"
        )
    return ServedAnswer(
        ttft_s=ttft_s,
        latency_s=latency_s,
        output_tokens=tokens,
        finish_reason=finish["type"],
        verify_ct=meta.get("spec_verify_ct", 0),
        correct_drafts=meta.get("spec_num_correct_drafts", 0),
        histogram=tuple(meta.get("spec_correct_drafts_histogram", ())),
        output_ids=output_ids,
    )


def message_of(content: bytes) -> str:
    """Read an error body of SGLang: {"error": {"message"}} or {"message"}."""
    try:
        body = json.loads(content)
        body = body.get("error", body)
        return without_tokens(str(body["message"]))
    except (ValueError, TypeError, KeyError, AttributeError):
        return "no reason given"


def without_tokens(message: str) -> str:
    """Cut a message at its first list: validation errors quote the request, which is somebody's text."""
    return message.partition("[")[0][:200].strip() or "no reason given"
