"""One measured load: many conversations with one server, `concurrency` at a time, and its answers compared."""

import asyncio
import math
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import cycle, islice
from typing import Any

from eagle3.answers.chat import RefusedConversation
from eagle3.engine.client import new_session
from eagle3.engine.timed import ServedAnswer, flush_cache, generate
from eagle3.progress import Bar
from eagle3.serving.check.turns import Turn
from eagle3.settings.serving import BenchSettings, TuneSettings

Talk = list[tuple[float, ServedAnswer]]  # of a conversation: when each turn was sent, and its answer
FAILED = "the request before failed"


@dataclass(frozen=True)
class Agreement:
    """Counts of answers compared with the plain server's, and of those that were the same (see PlainAnswers)."""

    same: int
    compared: int


@dataclass(frozen=True)
class LoadResult:
    """Answers in the order of conversations and turns; `seconds` are from the first request sent to the last answer
    complete.

    `full_seconds` are from the first request sent until the first place finds no other to send: up to then,
    `concurrency` requests run. `full_tokens` are the output tokens of that time. `cache_flushed` says whether the
    server emptied its prefix cache before. `ended` counts, by reason, conversations that ended before their last
    turn."""

    answers: list[ServedAnswer]
    seconds: float
    full_seconds: float
    full_tokens: float
    cache_flushed: bool
    agreement: Agreement = Agreement(0, 0)
    ended: dict[str, int] = field(default_factory=dict)

    @property
    def complete(self) -> list[ServedAnswer]:
        return [answer for answer in self.answers if answer.error is None]

    @property
    def failed(self) -> list[ServedAnswer]:
        return [answer for answer in self.answers if answer.error is not None]


def measure_load(
    url: str,
    conversations: Sequence[Turn],
    *,
    concurrency: int,
    sampling: Mapping[str, Any],
    warmup: int,
    timeout_s: float,
    progress: str | None,
) -> LoadResult:
    """Have each conversation once, `concurrency` at a time: its next turn is sent when the answer is complete.

    It first sends `warmup` uncounted requests for each concurrent one, and empties the prefix cache, so that no
    measurement profits from an earlier one. `sampling` is SGLang's `sampling_params`; EOS ends an answer.
    `progress` names the bar (None: no bar). Raises InputError if the server asks for a key."""

    async def measure() -> LoadResult:
        async with new_session(timeout_s=timeout_s) as session:

            async def ask(prompt_ids: list[int]) -> ServedAnswer:
                answer = await generate(session, url, prompt_ids, sampling=sampling)
                return replace(answer, prompt_ids=tuple(prompt_ids))

            async def warm_up(turn: Turn, talk: Talk) -> None:
                await ask(turn.ids)

            warming = list(islice(cycle(conversations), warmup * concurrency))
            await _concurrently(warm_up, warming, concurrency, progress=None)
            cache_flushed = await flush_cache(session, url)
            ended: Counter[str] = Counter()
            start = time.perf_counter()
            talks, idle = await _concurrently(partial(_talk, ask, ended), conversations, concurrency, progress=progress)
            seconds = time.perf_counter() - start
            answers = [answer for talk in talks for _, answer in talk]
            tokens = sum(tokens_until(idle - since, answer) for talk in talks for since, answer in talk)
            return LoadResult(answers, seconds, idle - start, tokens, cache_flushed, ended=dict(ended))

    return asyncio.run(measure())


async def _talk(
    ask: Callable[[list[int]], Awaitable[ServedAnswer]], ended: Counter[str], first: Turn, talk: Talk
) -> None:
    """Have one conversation; `ended` counts why it had to end before its last turn."""
    turn = first
    while True:
        since = time.perf_counter()
        answer = await ask(turn.ids)
        talk.append((since, answer))
        if turn.is_last:
            return
        if answer.error is not None:
            ended[FAILED] += 1
            return
        try:
            turn = await asyncio.to_thread(turn.following, answer.output_ids)  # other streams' times are taken here
        except RefusedConversation as refused:
            ended[str(refused)] += 1
            return


async def _concurrently(
    have: Callable[[Turn, Talk], Awaitable[None]],
    conversations: Sequence[Turn],
    concurrency: int,
    *,
    progress: str | None,
) -> tuple[list[Talk], float]:
    """Return what each conversation was, and the time at which a place became idle."""
    talks: list[Talk] = [[] for _ in conversations]
    idle = math.inf
    queue = iter(zip(conversations, talks, strict=True))
    with Bar(total=len(conversations), desc=progress, unit="conversation", disable=progress is None) as bar:

        async def place() -> None:
            nonlocal idle
            for turn, talk in queue:  # one queue for all places
                await have(turn, talk)
                bar.update()
            idle = min(idle, time.perf_counter())

        await asyncio.gather(*(place() for _ in range(min(concurrency, len(conversations)))))
    return talks, idle


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

    def compared(self, result: LoadResult, *, plain: bool) -> LoadResult:
        """Add how many complete answers equal the known ones, token for token.

        `plain`: the answers are the plain server's own and become known. Sampled answers are not compared: they may
        differ."""
        if self.sampling["temperature"] != 0:
            return result
        same = compared = 0
        for answer in result.complete:
            known = self.first.get(answer.prompt_ids)
            if known is not None:
                compared, same = compared + 1, same + (answer.output_ids == known)
            elif plain:
                self.first[answer.prompt_ids] = answer.output_ids
        return replace(result, agreement=Agreement(same, compared))

    def measure(
        self,
        url: str,
        conversations: Sequence[Turn],
        concurrency: int,
        settings: BenchSettings | TuneSettings,
        *,
        plain: bool,
        progress: str,
    ) -> LoadResult:
        """Have each conversation with a server, then each again in turn where places would otherwise be empty most of
        the time, and compare the answers."""
        number = max(len(conversations), settings.requests_per_place * concurrency)
        result = measure_load(
            url,
            list(islice(cycle(conversations), number)),
            concurrency=concurrency,
            sampling=self.sampling,
            warmup=settings.warmup,
            timeout_s=settings.timeout_s,
            progress=progress,
        )
        return self.compared(result, plain=plain)
