"""One measured load: many prompts sent to one server, `concurrency` of them at a time."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

from eagle3.engine.client import new_session
from eagle3.engine.timed import ServedAnswer, flush_cache, generate
from eagle3.errors import InputError
from eagle3.progress import Bar


@dataclass(frozen=True)
class Agreement:
    """How many answers were compared with the plain server's, and how many were the same."""

    same: int
    compared: int


@dataclass(frozen=True)
class LoadResult:
    """Answers in the order of their prompts; `seconds` are from the first request sent to the last answer complete.

    `cache_flushed` says whether the server emptied its prefix cache before. For `agreement` see same_answers.py."""

    answers: list[ServedAnswer]
    seconds: float
    cache_flushed: bool
    agreement: Agreement = Agreement(0, 0)

    @property
    def complete(self) -> list[ServedAnswer]:
        return [answer for answer in self.answers if answer.error is None]

    @property
    def failed(self) -> list[ServedAnswer]:
        return [answer for answer in self.answers if answer.error is not None]


def repeat_prompts(prompts: Sequence[list[int]], *, at_least: int) -> list[list[int]]:
    """Return every prompt once, and again in turn until there are `at_least` so many."""
    return list(islice(cycle(prompts), max(len(prompts), at_least)))


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

    Before that, `warmup` requests for each place, which count nowhere, and an empty prefix cache, so that no
    measurement profits from the one before. `sampling` as SGLang's `sampling_params`; EOS ends an answer.
    `progress` names the bar (None: no bar)."""
    if not prompts or concurrency < 1:
        raise InputError(f"a load of {len(prompts)} prompts at concurrency {concurrency}: both start at 1")

    async def measure() -> LoadResult:
        async with new_session(timeout_s=timeout_s) as session:

            async def ask(prompt_ids: list[int]) -> ServedAnswer:
                return await generate(session, url, prompt_ids, sampling=sampling)

            warming = list(islice(cycle(prompts), warmup * concurrency))
            await _in_places(ask, warming, concurrency, progress=None)
            cache_flushed = await flush_cache(session, url)
            start = time.perf_counter()
            answers = await _in_places(ask, prompts, concurrency, progress=progress)
            return LoadResult(answers, time.perf_counter() - start, cache_flushed)

    return asyncio.run(measure())


async def _in_places(
    ask: Callable[[list[int]], Awaitable[ServedAnswer]],
    prompts: Sequence[list[int]],
    concurrency: int,
    *,
    progress: str | None,
) -> list[ServedAnswer]:
    answers: dict[int, ServedAnswer] = {}
    queue = iter(enumerate(prompts))
    with Bar(total=len(prompts), desc=progress, unit="answer", disable=progress is None) as bar:

        async def place() -> None:
            for number, prompt_ids in queue:  # one queue for all places
                answers[number] = await ask(prompt_ids)
                bar.update()

        await asyncio.gather(*(place() for _ in range(concurrency)))
    return [answers[number] for number in range(len(prompts))]
