"""One streamed request to SGLang's native /generate: token ids in, times and counts out."""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp

from eagle3.engine.client import (
    RequestRefused,
    ServerFailed,
    answered,
    read_error_message,
    stream_lines,
    without_tokens,
)


@dataclass(frozen=True)
class ServedAnswer:
    """One answer of a server, or in `error` why there is none. Times are in seconds since the request was sent.

    `verify_ct`, `correct_drafts` and `histogram` are SGLang's counts (0 and empty without a head): verifications,
    accepted drafts, and how many verifications accepted 0, 1, 2, … drafts. The token that prefill gives costs no
    verification. `output_ids` includes the stop token, `events_s` are the times at which parts of the stream came.
    `prompt_ids` are what was sent."""

    ttft_s: float | None = None
    latency_s: float | None = None
    output_tokens: int = 0
    finish_reason: str | None = None
    verify_ct: int = 0
    correct_drafts: int = 0
    histogram: tuple[int, ...] = ()
    error: str | None = None
    prompt_ids: tuple[int, ...] = ()
    output_ids: tuple[int, ...] = ()
    events_s: tuple[float, ...] = ()

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first: (latency - time to first token) / (tokens - 1)."""
        if self.latency_s is None or self.ttft_s is None or self.output_tokens < 2:
            return None
        return (self.latency_s - self.ttft_s) / (self.output_tokens - 1)


async def generate(
    session: aiohttp.ClientSession, url: str, prompt_ids: list[int], *, sampling: Mapping[str, Any]
) -> ServedAnswer:
    """Answer one prompt; `sampling` is SGLang's `sampling_params`. Failures are returned in `error`.

    Raises InputError if the server asks for a key."""
    body = {"input_ids": prompt_ids, "sampling_params": dict(sampling), "stream": True}
    start = time.perf_counter()
    events_s, last_event = [], b"{}"
    try:
        async with answered(session, f"{url}/generate", body) as response:
            async for line in stream_lines(response):
                event = line.strip().removeprefix(b"data:").strip()
                if not event or event == b"[DONE]":
                    continue
                # Only the last event is parsed: each repeats the whole answer so far, and at high concurrency the time
                # to parse them all would count as the server's.
                events_s.append(time.perf_counter() - start)
                last_event = event
    except (ServerFailed, RequestRefused) as failure:
        return ServedAnswer(error=str(failure))
    try:
        return _answer(json.loads(last_event), events_s)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return ServedAnswer(error="the response is no event of SGLang's")


def _answer(event: dict[str, Any], events_s: list[float]) -> ServedAnswer:
    meta = event.get("meta_info") or {}
    finish = meta.get("finish_reason") or {}
    if "error" in event:
        return ServedAnswer(error=read_error_message(json.dumps(event).encode()))
    if finish.get("type") == "abort":
        return ServedAnswer(error=f"aborted: {without_tokens(finish.get('message'))}")
    if not finish:
        return ServedAnswer(error="the stream ended before the answer did")
    tokens, output_ids = meta["completion_tokens"], tuple(event.get("output_ids", ()))
    if len(output_ids) != tokens:
        return ServedAnswer(
            error="the last event lacks tokens: start the server without --incremental-streaming-output"
        )
    return ServedAnswer(
        ttft_s=events_s[0],
        latency_s=events_s[-1],
        output_tokens=tokens,
        finish_reason=finish["type"],
        verify_ct=meta.get("spec_verify_ct", 0),
        correct_drafts=meta.get("spec_num_correct_drafts", 0),
        histogram=tuple(meta.get("spec_correct_drafts_histogram", ())),
        output_ids=output_ids,
        events_s=tuple(events_s),
    )


async def flush_cache(session: aiohttp.ClientSession, url: str) -> bool:
    """Empty the server's prefix cache; return whether that worked. The server waits up to 10 s for running requests."""
    try:
        async with answered(session, f"{url}/flush_cache?timeout=10", {}):
            return True
    except (ServerFailed, RequestRefused):
        return False
