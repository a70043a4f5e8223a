"""The answerer that asks serving engines: running servers, or SGLang servers that it starts and stops."""

import asyncio
import logging
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Self

import aiohttp

from eagle3.answers.answerer import Answerer, Conversation
from eagle3.answers.chat import Chat, RefusedConversation
from eagle3.engine.client import RequestRefused, ServerBusy, ServerFailed, allow_connections, new_session
from eagle3.engine.command import Draft
from eagle3.engine.endpoint import ENDPOINTS, Endpoint, Request
from eagle3.engine.local_servers import build_servers, serving
from eagle3.engine.pool import PROBE_S, Pool
from eagle3.engine.process import Server
from eagle3.engine.same_target import SENTENCE, require_same_model, require_same_tokens, require_same_weights
from eagle3.errors import InputError
from eagle3.settings.engine import LaunchSettings
from eagle3.settings.precomputing import Sampling, ServedSettings
from eagle3.target.stored import StoredTarget
from eagle3.workers.meter import Progress
from eagle3.workers.task import Take

log = logging.getLogger(__name__)

WRITTEN_TOGETHER, WRITTEN_EVERY_S = 64, 2.0  # conversations that a kill can lose
# SGLang reads a prompt as soon as it comes, between two steps of all answers. So requests leave together: first ones
# when other conversations are written, further ones at multiples of this (benchmarks/request_timing.py).
ASKED_EVERY_S = 0.25
# SGLang would capture graphs for 58 sizes of prompts: seconds of a start, minutes where kernels are not compiled yet.
FLAGS = {"cuda-graph-backend-prefill": "disabled"}


class ServedAnswerer(Answerer):
    """Keeps `in_flight` requests at every server."""

    def __init__(
        self,
        settings: ServedSettings,
        *,
        target: StoredTarget,
        chat: Chat,
        sampling: Sampling,
        launch: LaunchSettings,
        folder: Path,
    ) -> None:
        """`folder` takes the logs of servers that are started here."""
        require_servers(settings)
        self.name, self.endpoint = settings.name, ENDPOINTS[settings.name]
        self.settings, self.launch, self.folder = settings, launch, folder
        self.target, self.chat, self.sampling = target, chat, sampling

    def __enter__(self) -> Self:
        """Start servers if none are given, and check that they serve the target."""
        with ExitStack() as stack:
            started = [] if self.settings.urls else self._started(stack)
            urls = self.settings.urls or [server.url for server in started]
            places = f"answers.in_flight={self.settings.in_flight} for each of {len(urls)} servers"
            allow_connections(self.settings.in_flight * len(urls), setting=places)
            self.runner = stack.enter_context(asyncio.Runner())
            session = self.runner.run(_open(self.settings.timeout_s))
            stack.callback(lambda: self.runner.run(session.close()))
            model = self.settings.served_as or self.target.path
            endpoints = [self.endpoint(url, model=model) for url in urls]
            self.runner.run(self._require_same_target(session, endpoints))
            limits = {key: getattr(self.settings, key) for key in ("in_flight", "attempts", "give_up_s")}
            check = partial(self._require_same_model, session)  # it may have started again with another model
            self.pool = Pool(endpoints, session, setting="answers", processes=started, check=check, **limits)
            self.up = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        for line in self.pool.report():
            log.warning(line)
        self.pool.close()
        self.up.close()

    def _started(self, stack: ExitStack) -> list[Server]:
        own, draft = self.settings, None
        if own.head is not None:
            draft = Draft(head=own.head, steps=own.steps, topk=own.topk, draft_tokens=own.draft_tokens)
        servers = build_servers(
            self.launch,
            own.servers,
            target=self.target,
            draft=draft,
            folder=self.folder,
            make_flags=lambda number: FLAGS,
        )
        return stack.enter_context(serving(servers))

    async def _require_same_target(self, patient: aiohttp.ClientSession, endpoints: list[Endpoint]) -> None:
        text_ids, prompt_ids = list(self.target.tokenizer(SENTENCE).input_ids), self._prompt_to_compare()
        template_kwargs = self.chat.settings["template_kwargs"]
        one_token = self._request(prompt_ids or self.chat.encode(SENTENCE), 0, replace(self.sampling, max_new_tokens=1))
        # A server that hangs says so in a minute, not after the time of the longest answer.
        async with new_session(timeout_s=min(PROBE_S, self.settings.timeout_s)) as session:
            for endpoint in endpoints:
                try:
                    await self._require_same_model(session, endpoint)
                    await require_same_tokens(session, endpoint, text_ids, prompt_ids, template_kwargs)
                    with suppress(ServerBusy):
                        if self.settings.urls:  # those started here have made a token
                            await endpoint.complete(patient, one_token)
                except (ServerFailed, RequestRefused) as failure:
                    raise InputError(
                        f"answers.urls: {endpoint.url} does not answer as answers={self.name} needs ({failure}); "
                        f"start it, choose another protocol, or leave it out"
                    ) from None
            if len(endpoints) > 1:
                await require_same_weights(session, endpoints, self.chat.encode(SENTENCE))

    def _prompt_to_compare(self) -> list[int] | None:
        if self.chat.reads_clock:
            log.info("the chat template reads the clock, and chat.date pins it here: not compared with the servers'")
        elif self.settings.urls:
            try:
                return self.chat.prompt_ids([{"role": "user", "content": SENTENCE}])
            except RefusedConversation as refusal:  # perhaps it demands a system turn
                log.warning("not compared with the servers' chat template: %s", refusal)
        return None

    async def _require_same_model(self, session: aiohttp.ClientSession, endpoint: Endpoint) -> None:
        await require_same_model(session, endpoint, self.target, self.settings.served_as)

    def __call__(self, take: Take[Conversation], progress: Progress) -> Iterator[list[Conversation]]:
        ended = asyncio.Queue[asyncio.Task[None]]()
        running: dict[asyncio.Task[None], Conversation] = {}
        places = self.settings.in_flight * len(self.pool.members)
        try:
            while True:
                for conversation in take(places - len(running), wait=not running):
                    task = self.runner.get_loop().create_task(self._answer(conversation, progress))
                    task.add_done_callback(ended.put_nowait)
                    running[task] = conversation
                if not running:
                    break
                done = self.runner.run(_some(ended, at_most=len(running)))
                for task in done:
                    task.result()
                down = len(self.pool.members) - self.pool.working
                progress.note = f"{down} of {len(self.pool.members)} servers do not answer" if down else ""
                progress.add(ended=len(done))
                yield [running.pop(task) for task in done]
        finally:
            for task in running:
                task.cancel()
            self.runner.run(_all_ended(running))

    async def _answer(self, conversation: Conversation, progress: Progress) -> None:
        while conversation.waiting:
            request = self._request(
                conversation.prompt_ids, conversation.seed, conversation.sampling, conversation.stop_ids
            )
            try:
                answer = await self.pool.complete(request)
            except RequestRefused as refused:
                conversation.fail(str(refused))
            else:
                progress.add(tokens=len(answer.token_ids))
                conversation.answer(answer)
            if conversation.waiting:
                await asyncio.sleep(-asyncio.get_running_loop().time() % ASKED_EVERY_S)  # until the next multiple

    def _request(
        self, prompt_ids: list[int], seed: int, sampling: Sampling | None, stop_ids: frozenset[int] | None = None
    ) -> Request:
        return Request(
            prompt_ids,
            seed,
            stop_ids=stop_ids or self.target.stop_ids,
            vocab_size=self.target.text_config.vocab_size,
            **asdict(sampling or self.sampling),
        )


def require_servers(settings: ServedSettings) -> None:
    """Raise InputError unless there are servers to ask, and they can have the head."""
    if not (ENDPOINTS[settings.name].started_here or settings.urls):
        raise InputError("answers.urls is empty; give running servers, e.g. answers.urls=[http://127.0.0.1:8000]")
    if settings.urls and settings.head is not None:
        raise InputError(f"answers.head={settings.head} is for servers that are started; running ones draft as they do")


async def _open(timeout_s: float) -> aiohttp.ClientSession:
    return new_session(timeout_s=timeout_s)


async def _some(ended: "asyncio.Queue[asyncio.Task[None]]", *, at_most: int) -> list[asyncio.Task[None]]:
    """Wait for many tasks, or for one and then a while: each time they are written to disk."""
    done, now = [await ended.get()], asyncio.get_running_loop().time
    end = now() + WRITTEN_EVERY_S
    with suppress(TimeoutError):
        while len(done) < min(WRITTEN_TOGETHER, at_most) and done[-1].exception() is None:
            done.append(await asyncio.wait_for(ended.get(), end - now()))
    return done


async def _all_ended(tasks: Iterable[asyncio.Task[None]]) -> None:
    await asyncio.gather(*tasks, return_exceptions=True)
