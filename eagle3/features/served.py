"""Extracts features inside SGLang servers, which it starts: one for each group of GPUs.

Shapes: T tokens of a text, A captured layers, H hidden size, AH = A · H, V target vocabulary.
"""

import asyncio
import logging
import math
import shutil
import threading
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from torch import Tensor

from eagle3.engine.capture import Captured, CaptureFolder, CapturingServer, with_hooks
from eagle3.engine.client import RequestRefused, new_session
from eagle3.engine.local_servers import build_servers, serving
from eagle3.engine.pool import Pool
from eagle3.engine.versions import capture_flags, find_sglang, require_capture
from eagle3.errors import InputError
from eagle3.features.capture_check import Sentinel, check_against_engine
from eagle3.features.conversation import Conversation
from eagle3.features.sample import Sample, ScaledRows, positions_with_teacher
from eagle3.features.task import Extractor
from eagle3.features.turns import find_answer_spans
from eagle3.settings.engine import LaunchSettings
from eagle3.settings.precomputing import CaptureSettings
from eagle3.target.facts import LogitTransform
from eagle3.target.stored import StoredTarget

log = logging.getLogger(__name__)

AHEAD = 8  # forward passes whose tokens are requested in advance
REQUESTS = 512  # at a time at each server: enough short prompts to fill a forward pass


@dataclass(frozen=True)
class RunningServers:
    """Servers that another process of this host has started and checked: each with its URL and the folder in memory
    that it writes into; and what they do to their logits."""

    servers: Sequence[tuple[str, str]]
    logit_transform: LogitTransform


class ServedExtractor(Extractor):
    """Samples come in the conversations' order."""

    def __init__(
        self,
        settings: CaptureSettings,
        *,
        target: StoredTarget,
        layers: list[int],
        dtype: str,
        teachers: str,
        batch_tokens: int,
        launch: LaunchSettings,
        folder: Path,
        sentinels: list[Sentinel],
        running: RunningServers | None = None,
    ) -> None:
        """`folder` takes the logs; `sentinels` are texts whose features are compared with those of the engine.
        `running`: servers to ask; None until this process has started its own."""
        self.settings, self.launch, self.folder, self.sentinels = settings, launch, folder, sentinels
        self.running = running
        self.target, self.layers, self.dtype, self.teachers = target, layers, dtype, teachers
        self.batch_tokens, self.most_bytes = batch_tokens, int(settings.memory_gb * 2**30)
        self.left_out: Counter[str] = Counter()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            running = self.running.servers if self.running else []
            servers = [CapturingServer(url, CaptureFolder(Path(folder))) for url, folder in running]
            servers = servers or self._started(stack)
            self.engines = stack.enter_context(Engines(servers, self.settings))
            if self.running is None:
                transform = check_against_engine(self.engines.ask, self.sentinels, self.target, self.layers)
                self.running = RunningServers([(each.url, str(each.folder.path)) for each in servers], transform)
            self.up = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        for line in self.engines.pool.report():
            log.warning(line)
        self.up.close()

    def logit_transform(self) -> LogitTransform:
        """Return what the engine does to its logits, as found with the sentinels."""
        assert self.running is not None
        return self.running.logit_transform

    def __call__(self, conversations: Iterator[Conversation]) -> Iterator[Sample]:
        asked: deque[tuple[int, Future[Sample | str]]] = deque()
        servers = len(self.engines.servers)
        ahead, most, places = 0, AHEAD * self.batch_tokens * servers, REQUESTS * servers
        for conversation in conversations:
            tokens = len(conversation.input_ids)
            while asked and (ahead + tokens > most or len(asked) >= places):
                ahead -= asked[0][0]
                yield from self._counted(asked.popleft()[1].result())
            asked.append((tokens, self.ask(conversation)))
            ahead += tokens
        while asked:
            yield from self._counted(asked.popleft()[1].result())

    def ask(self, conversation: Conversation) -> "Future[Sample | str]":
        return self.engines.run(self._sample(conversation))

    def _started(self, stack: ExitStack) -> list[CapturingServer]:
        """Start the servers; `stack` stops them and removes their folders in memory."""
        version = find_sglang(self.launch)
        require_capture(version)
        memory = Path(self.settings.memory)
        require_memory(memory, self.most_bytes)  # each server gets a folder there before their number is known
        folders: list[CaptureFolder] = []

        def make_flags(number: int) -> dict[str, Any]:
            folder = CaptureFolder.new(memory)
            stack.callback(folder.remove)
            folders.append(folder)
            sizes = {"batch_tokens": self.batch_tokens, "most_bytes": self.most_bytes}
            return capture_flags(version, self.layers, folder.path, dtype=self.dtype, **sizes)

        servers = build_servers(
            with_hooks(self.launch),
            self.settings.servers,
            target=self.target,
            draft=None,
            folder=self.folder,
            make_flags=make_flags,
        )
        for server, folder in zip(servers, folders, strict=True):
            server.scratch = folder.path
        require_memory(memory, self.most_bytes, len(servers))
        stack.enter_context(serving(servers))
        return [CapturingServer(server.url, each, server) for server, each in zip(servers, folders, strict=True)]

    def _counted(self, sample: Sample | str) -> Iterator[Sample]:
        if isinstance(sample, str):
            self.left_out[f"refused by the engine: {sample}"] += 1
        else:
            yield sample

    async def _sample(self, item: Conversation) -> Sample | str:
        has_teacher = positions_with_teacher(item.turns, self.teachers)
        try:
            captured, _ = await self.engines.captured(item.input_ids.tolist(), find_answer_spans(has_teacher.int()))
        except RequestRefused as refused:
            return str(refused)
        return Sample(
            id=item.id,
            input_ids=item.input_ids,
            turns=item.turns,
            aux_hidden_states=_rows(captured.aux, captured.aux_exponents),
            last_hidden_state=_rows(captured.last, captured.last_exponents),
            teacher_argmax=captured.teacher_argmax,
            has_teacher=has_teacher,
        )


def _rows(values: Tensor, exponents: Tensor | None) -> Tensor | ScaledRows:
    return values if exponents is None else ScaledRows(values, exponents)


def require_memory(folder: Path, most_bytes: int, servers: int = 1) -> None:
    """Raise InputError if the folder cannot hold `most_bytes` of states in transit for each of these servers, and for
    each server of all workers on this machine: every server has a folder in it."""
    try:
        usage = shutil.disk_usage(folder)
    except OSError as error:
        raise InputError(f"features.engine.memory={folder}: {error.strerror}; give a folder in memory") from None
    all_servers = max(servers, len(list(folder.glob("eagle3-*"))))  # each has a CaptureFolder
    each = 0.99 * most_bytes  # other programs may keep a few files there
    if usage.free < servers * each or usage.total < all_servers * each:
        free, most = usage.free / 2**30, most_bytes / 2**30
        raise InputError(
            f"features.engine.memory={folder} has {free:.1f} GB free, features.engine.memory_gb is {most:g} for each "
            f"server on this machine ({all_servers}); lower that, or give the container more (docker run "
            f"--shm-size={math.ceil(all_servers * most)}g)"
        )


class Engines:
    """Asks the servers from its own thread and event loop, so that writing samples does not delay requests."""

    def __init__(self, servers: list[CapturingServer], settings: CaptureSettings) -> None:
        self.servers, self.settings = servers, settings
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.watching: list[asyncio.Task[None]] = []

    def __enter__(self) -> Self:
        self.thread.start()
        self.session = self.run(self._open()).result()
        self.pool = Pool(
            self.servers,
            self.session,
            in_flight=REQUESTS,
            attempts=self.settings.attempts,
            give_up_s=self.settings.give_up_s,
            setting="features.engine",
            processes=[server.process for server in self.servers if server.process],
        )
        return self

    def __exit__(self, *_: object) -> None:
        self.run(self._end()).result()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()

    def ask(
        self, input_ids: list[int], teachers: list[tuple[int, int]], options: Mapping[str, Any] | None = None
    ) -> "Future[tuple[Captured, dict[str, Any]]]":
        """Begin to capture one prompt, with more `options` of /generate."""
        return self.run(self.captured(input_ids, teachers, options))

    async def captured(
        self, input_ids: list[int], teachers: list[tuple[int, int]], options: Mapping[str, Any] | None = None
    ) -> tuple[Captured, dict[str, Any]]:
        """Return a prompt's states and its `meta_info`; raises RequestRefused, or InputError with the reason why no
        more rows will come."""
        capture = self.pool.run(lambda server: server.capture(self.session, input_ids, teachers, options or {}))
        task: asyncio.Future[Any] = asyncio.ensure_future(capture)
        done, _ = await asyncio.wait([task, *self.watching], return_when=asyncio.FIRST_COMPLETED)
        if task in done:
            return task.result()
        task.cancel()
        return next(iter(done)).result()

    def run(self, work: Any) -> Any:
        """Begin a coroutine in the thread of requests, and return its `Future`."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    async def _open(self) -> Any:
        self.watching = [asyncio.ensure_future(server.folder.watch()) for server in self.servers]
        return new_session(timeout_s=self.settings.timeout_s)

    async def _end(self) -> None:
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        with suppress(Exception):
            await asyncio.gather(*tasks, return_exceptions=True)
        await self.session.close()
