"""Several servers as one: the freest that works is asked, and one that fails is left alone for a while."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import aiohttp

from eagle3.engine.client import RequestRefused, ServerBusy, ServerFailed
from eagle3.engine.endpoint import Answer, Endpoint, Request
from eagle3.engine.process import Server
from eagle3.errors import InputError

log = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
PROBE_S = 60.0  # for one token of a server that failed
POLL_S = 0.2


Result = TypeVar("Result")
AnyEndpoint = TypeVar("AnyEndpoint", bound=Endpoint)


@dataclass(eq=False)
class Member(Generic[AnyEndpoint]):
    """One server and what became of the requests to it."""

    endpoint: AnyEndpoint
    process: Server | None
    places: float  # for requests at a time; fewer than the pool's where it has sent some away
    in_flight: int = 0
    answered: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    pause_s: float = FIRST_PAUSE_S
    works: bool = True
    returning: asyncio.Task[None] | None = None
    lost: InputError | None = None


class Pool(Generic[AnyEndpoint]):
    """Asks servers until one answers. Works inside one event loop."""

    def __init__(
        self,
        endpoints: Sequence[AnyEndpoint],
        session: aiohttp.ClientSession,
        *,
        in_flight: int,
        attempts: int,
        give_up_s: float,
        setting: str,
        processes: Sequence[Server] = (),
        check: Callable[[AnyEndpoint], Awaitable[None]] | None = None,
    ) -> None:
        """`in_flight`: requests that a server has at a time; `attempts`: of one request; `give_up_s`: without any
        server that works; `setting`: the group of these keys; `processes`: those of the servers if they were started
        here; once ended, they do not come back; `check`: of a server that failed, before it is asked again."""
        started: Sequence[Server | None] = processes or [None] * len(endpoints)
        self.members = [Member(*each, in_flight) for each in zip(endpoints, started, strict=True)]
        self.session = session
        self.in_flight, self.attempts, self.give_up_s, self.setting = in_flight, attempts, give_up_s, setting
        self.check = check
        self.waiting: dict[asyncio.Future[None], None] = {}  # for a place, the oldest first
        self.down_since: float | None = None

    @property
    def working(self) -> int:
        return sum(member.works for member in self.members)

    async def complete(self, request: Request) -> Answer:
        return await self.run(lambda endpoint: endpoint.complete(self.session, request))

    async def run(self, ask: Callable[[AnyEndpoint], Awaitable[Result]]) -> Result:
        """Return what a server answers. RequestRefused: by a server, or after `attempts`; InputError where all servers
        are gone."""
        reason, failed, busy_until = "", 0, time.monotonic() + self.give_up_s
        while failed < self.attempts:
            member = await self._take()
            try:
                result = await ask(member.endpoint)
            except ServerFailed as failure:
                reason = str(failure)
                busy = isinstance(failure, ServerBusy) and time.monotonic() < busy_until
                failed += not busy  # a busy server says nothing of this request, unless it does so for long
                if busy and member.in_flight > 1:  # it works on the others: this one waits for one of them to end
                    if not member.failures[reason]:
                        log.warning("%s: %s; gets fewer requests at a time", member.endpoint.url, reason)
                    member.failures[reason] += 1
                    member.places = member.in_flight - 1
                else:
                    self._failed(member, reason)
            else:
                member.answered += 1
                member.places = min(self.in_flight, member.places + 1 / member.places)
                member.pause_s = FIRST_PAUSE_S
                return result
            finally:
                member.in_flight -= 1
                if self.waiting:
                    place = next(iter(self.waiting))
                    del self.waiting[place]
                    place.set_result(None)
        raise RequestRefused(f"{self.attempts} attempts failed, the last with: {reason}")

    def report(self) -> list[str]:
        """Say of each server that failed how often and why."""
        return [
            f"{member.endpoint.url}: {member.answered} answers, {sum(member.failures.values())} failures ("
            + "; ".join(f"{count} times {reason}" for reason, count in member.failures.most_common(3))
            + ")"
            for member in self.members
            if member.failures
        ]

    def close(self) -> None:
        """Stop asking servers that failed."""
        for member in self.members:
            if member.returning is not None:
                member.returning.cancel()

    async def _take(self) -> Member[AnyEndpoint]:
        """Wait for a place on a server that works."""
        while True:
            for member in self.members:
                if member.returning is not None and member.returning.done():
                    member.returning.result()  # raises what is no failure of a server
            free = [member for member in self.members if member.works and member.in_flight < int(member.places)]
            if free:
                chosen = min(free, key=lambda member: (member.in_flight, member.answered))
                chosen.in_flight += 1
                return chosen
            if not self.working:
                self._require_hope()
            place = asyncio.get_running_loop().create_future()
            self.waiting[place] = None
            try:
                await asyncio.wait([place], timeout=POLL_S)
            finally:
                self.waiting.pop(place, None)

    def _failed(self, member: Member[AnyEndpoint], reason: str) -> None:
        member.failures[reason] += 1
        if member.works:  # of many requests that fail together the first decides
            log.warning("%s: %s; asked again in %.0f s", member.endpoint.url, reason, member.pause_s)
            member.works = False
            member.returning = asyncio.create_task(self._take_back(member))
        if not self.working and self.down_since is None:
            self.down_since = time.monotonic()

    async def _take_back(self, member: Member[AnyEndpoint]) -> None:
        """Wait until a server makes a token; pauses between its failures grow until it has answered a request."""
        while not member.works:
            again_at = time.monotonic() + member.pause_s
            member.pause_s = min(2 * member.pause_s, LONGEST_PAUSE_S)
            while True:
                if member.process is not None and not member.process.alive():
                    member.lost = member.process.failure()
                    log.warning("%s", member.lost)
                    return
                if (rest := again_at - time.monotonic()) <= 0:
                    break
                await asyncio.sleep(min(POLL_S, rest))
            try:
                async with asyncio.timeout(PROBE_S):
                    if self.check is not None:
                        await self.check(member.endpoint)
                    await member.endpoint.complete(self.session, Request([0]))
            except (ServerFailed, TimeoutError):
                continue
            except RequestRefused:
                pass  # it answers
            member.works, member.places, self.down_since = True, self.in_flight, None
        log.info("%s answers again", member.endpoint.url)

    def _require_hope(self) -> None:
        if all(member.lost for member in self.members):
            raise InputError(f"{self.members[0].lost}; what was made so far is kept: run the same command again")
        assert self.down_since is not None
        if time.monotonic() - self.down_since > self.give_up_s:
            raise InputError(
                f"{self.setting}.give_up_s={self.give_up_s:g}: no server answers: {'; '.join(self.report())}; the "
                f"answers so far are kept: restart the servers and run the same command again"
            )
