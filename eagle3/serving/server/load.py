"""One measured load: many prompts sent to one server, `concurrency` at a time, and their answers compared."""

import asyncio
import math
import time
from bisect import bisect_right
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle, islice
from typing import Any

from eagle3.engine.client import new_session
from eagle3.engine.timed import ServedAnswer, flush_cache, generate
from eagle3.progress import Bar
from eagle3.settings.serving import BenchSettings, TuneSettings


@dataclass(frozen=True)
class Agreement:
    """Counts of answers compared with the plain server's, and of those that were the same (see PlainAnswers)."""

    same: int
    compared: int


@dataclass(frozen=True)
class LoadResult:
    """Answers in the order of their prompts; `seconds` are from the first request sent to the last answer complete.

    `full_seconds` are from the first request sent until the first place finds no other to send: up to then,
    `concurrency` requests run. `full_tokens` are the output tokens of that time. `cache_flushed` says whether the
    server emptied its prefix cache before."""

    answers: list[ServedAnswer]
    seconds: float
    full_seconds: float
    full_tokens: float
    cache_flushed: bool
    agreement: Agreement = Agreement(0, 0)

    @property
    def complete(self) -> list[ServedAnswer]:
        return [answer for answer in self.answers if answer.error is None]

    @property
    def failed(self) -> list[ServedAnswer]:
        return [answer for answer in self.answers if answer.error is not None]


def measure_load(
    url: str,
    prompts: Sequence[list[int]],
    *,
    concurrency: int,
    sampling: Mapping[str, Any],
    warmup: int,
    timeout_s: float,
    progress: str | None,
) -> LoadResult:
    """Answer each prompt once, `concurrency` at a time: a new request is sent when one is complete.

    It first sends `warmup` uncounted requests for each concurrent one, and empties the prefix cache, so that no
    measurement profits from an earlier one. `sampling` is SGLang's `sampling_params`; EOS ends an answer.
    `progress` names the bar (None: no bar). Raises InputError if the server asks for a key."""

    async def measure() -> LoadResult:
        async with new_session(timeout_s=timeout_s) as session:

            async def ask(prompt_ids: list[int]) -> ServedAnswer:
                return await generate(session, url, prompt_ids, sampling=sampling)

            warming = list(islice(cycle(prompts), warmup * concurrency))
            await _concurrently(ask, warming, concurrency, progress=None)
            cache_flushed = await flush_cache(session, url)
            start = time.perf_counter()
            answers, sent, idle = await _concurrently(ask, prompts, concurrency, progress=progress)
            seconds = time.perf_counter() - start
            tokens = sum(tokens_until(idle - since, answer) for answer, since in zip(answers, sent, strict=True))
            return LoadResult(answers, seconds, idle - start, tokens, cache_flushed)

    return asyncio.run(measure())


async def _concurrently(
    ask: Callable[[list[int]], Awaitable[ServedAnswer]],
    prompts: Sequence[list[int]],
    concurrency: int,
    *,
    progress: str | None,
) -> tuple[list[ServedAnswer], list[float], float]:
    """Return the answers, the times at which their requests were sent, and the time at which a place became idle."""
    answers: dict[int, ServedAnswer] = {}
    sent, idle = [0.0] * len(prompts), math.inf
    queue = iter(enumerate(prompts))
    with Bar(total=len(prompts), desc=progress, unit="answer", disable=progress is None) as bar:

        async def place() -> None:
            nonlocal idle
            for number, prompt_ids in queue:  # one queue for all places
                sent[number] = time.perf_counter()
                answers[number] = await ask(prompt_ids)
                bar.update()
            idle = min(idle, time.perf_counter())

        await asyncio.gather(*(place() for _ in range(min(concurrency, len(prompts)))))
    return [answers[number] for number in range(len(prompts))], sent, idle


def tokens_until(seconds: float, answer: ServedAnswer) -> float:
    """Return how many tokens of an answer had come so many seconds after its request, each event with the same part."""
    if not answer.events_s:  # it failed
        return 0.0
    return answer.output_tokens * bisect_right(answer.events_s, seconds) / len(answer.events_s)


@dataclass(frozen=True)
class PlainAnswers:
    """The plain server's first answer to each prompt, kept in memory alone: it may be a user's text.

    A head may change when tokens come, never which. In bf16 it does now and then: batches of other shapes are computed
    by other kernels, and near-ties flip. How often shows where the plain server answers a prompt again."""

    sampling: Mapping[str, Any]
    first: dict[tuple[int, ...], tuple[int, ...]] = field(default_factory=dict)

    def compared(self, result: LoadResult, prompts: Sequence[list[int]], *, plain: bool) -> LoadResult:
        """Add how many complete answers equal the known ones, token for token.

        `plain`: the answers are the plain server's own and become known. Sampled answers are not compared: they may
        differ."""
        if self.sampling["temperature"] != 0:
            return result
        same = compared = 0
        for prompt, answer in zip(prompts, result.answers, strict=True):
            if answer.error is not None:
                continue
            known = self.first.get(tuple(prompt))
            if known is not None:
                compared, same = compared + 1, same + (answer.output_ids == known)
            elif plain:
                self.first[tuple(prompt)] = answer.output_ids
        return replace(result, agreement=Agreement(same, compared))

    def measure(
        self,
        url: str,
        prompts: Sequence[list[int]],
        concurrency: int,
        settings: BenchSettings | TuneSettings,
        *,
        plain: bool,
        progress: str,
    ) -> LoadResult:
        """Send each prompt to a server, then each again in turn where places would otherwise be empty most of the
        time, and compare the answers."""
        number = max(len(prompts), settings.requests_per_place * concurrency)
        requests = list(islice(cycle(prompts), number))
        result = measure_load(
            url,
            requests,
            concurrency=concurrency,
            sampling=self.sampling,
            warmup=settings.warmup,
            timeout_s=settings.timeout_s,
            progress=progress,
        )
        return self.compared(result, requests, plain=plain)
