"""Many requests over several servers; tests/answers/test_served.py has servers that die and come back."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

import aiohttp
import pytest

from eagle3.engine import pool as pool_module
from eagle3.engine.client import RequestRefused, ServerBusy, ServerFailed
from eagle3.engine.endpoint import Answer, Request
from eagle3.engine.pool import Pool
from eagle3.errors import InputError


class Scripted:
    """An `Endpoint` without a network, which fails as its plan says: number of the request → the error."""

    def __init__(self, url: str, plan: Any = lambda number: None) -> None:
        self.url, self.plan, self.asked, self.most, self.now = url, plan, 0, 0, 0
        self.answered: Counter[int] = Counter()

    async def complete(self, session: aiohttp.ClientSession, request: Request) -> Answer:
        self.asked += 1
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            number = self.asked
            await asyncio.sleep(0)
            if (error := self.plan(number)) is not None:
                raise error
            self.answered[request.seed] += 1
            return Answer([request.seed], "length")
        finally:
            self.now -= 1


def ask_all(endpoints: Sequence[Scripted], count: int, **settings: Any) -> list[Answer | BaseException]:
    settings = {"in_flight": 4, "attempts": 3, "give_up_s": 60, "setting": "answers", **settings}

    async def run() -> list[Answer | BaseException]:
        pool = Pool(endpoints, None, **settings)  # type: ignore[arg-type]
        requests = [Request([1], number, 0, 1, 0, 8) for number in range(count)]
        try:
            return await asyncio.gather(*map(pool.complete, requests), return_exceptions=True)
        finally:
            reports.extend(pool.report())

    reports.clear()
    return asyncio.run(run())


reports: list[str] = []


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "FIRST_PAUSE_S", 0.0)
    monkeypatch.setattr(pool_module, "LONGEST_PAUSE_S", 0.0)
    monkeypatch.setattr(pool_module, "POLL_S", 0.001)


def test_requests_are_spread_and_no_server_gets_more_than_its_places():
    servers = [Scripted("a"), Scripted("b"), Scripted("c")]
    answers = ask_all(servers, 300)
    assert [answer.token_ids for answer in answers] == [[number] for number in range(300)]  # type: ignore[union-attr]
    assert [server.most for server in servers] == [4, 4, 4]
    assert min(server.asked for server in servers) > 60 and reports == []


def test_requests_that_a_busy_server_sends_away_wait_for_it():
    busy = Scripted("a", lambda number: ServerBusy("HTTP 429") if number < 40 else None)
    answers = ask_all([busy], 50, attempts=1)
    assert all(isinstance(answer, Answer) for answer in answers)
    always = Scripted("a", lambda number: ServerBusy("HTTP 429") if number % 2 else None)  # but for a single token
    assert isinstance(ask_all([always], 1, give_up_s=2)[0], RequestRefused)


def test_a_server_gets_as_many_requests_as_it_takes():
    small = Scripted("a")
    small.plan = lambda number: ServerBusy("HTTP 429") if small.now > 5 else None
    answers = ask_all([small], 500, in_flight=64, attempts=1)
    assert all(isinstance(answer, Answer) for answer in answers)
    assert small.asked < 500 + 64 + 500 / 5  # those of the start, and one more at a time now and then


def test_a_server_that_was_full_or_down_has_all_its_places_once_it_is_back():
    down = Scripted("a", lambda number: ServerBusy("HTTP 503") if 10 < number < 200 else None)

    async def places() -> float:
        pool = Pool([down], None, in_flight=64, attempts=1, give_up_s=60, setting="answers")  # type: ignore[list-item, arg-type]
        await asyncio.gather(*(pool.complete(Request([1], number)) for number in range(100)))
        return pool.members[0].places

    assert asyncio.run(places()) == 64


def test_what_a_dying_server_had_is_answered_by_the_others_once():
    dying = Scripted("a", lambda number: ServerFailed("gone") if number > 20 else None)
    other = Scripted("b")
    answers = ask_all([dying, other], 200)
    assert all(isinstance(answer, Answer) for answer in answers)
    once = dying.answered + other.answered
    assert {once[number] for number in range(1, 200)} == {1}
    assert len(reports) == 1 and reports[0].startswith("a: 20 answers") and "times gone" in reports[0]


def test_a_server_that_failed_once_is_asked_again_while_the_others_have_places():
    once = Scripted("a", lambda number: ServerFailed("gone") if number == 3 else None)
    asyncio.run(one_after_another(once, Scripted("b")))
    assert once.asked > 20


async def one_after_another(*servers: Scripted) -> None:
    pool = Pool(servers, None, in_flight=4, attempts=3, give_up_s=60, setting="answers")  # type: ignore[arg-type]
    for number in range(50):
        await pool.complete(Request([1], number, 0, 1, 0, 8))


def test_a_server_that_fails_and_then_asks_for_a_key_ends_the_requests():
    plan = [None, ServerFailed("gone"), InputError("asks for a key")]
    failing = Scripted("a", lambda number: plan[number - 1])
    with pytest.raises(InputError, match="asks for a key"):
        asyncio.run(one_after_another(failing, Scripted("b")))
    assert failing.asked == 3


def test_a_request_that_breaks_every_server_ends_after_its_attempts():
    broken = [
        Scripted(name, lambda number: ServerFailed("illegal memory access") if number % 2 else None) for name in "ab"
    ]
    [error] = ask_all(broken, 1, attempts=2)
    assert isinstance(error, RequestRefused) and "2 attempts failed, the last with: illegal memory" in str(error)


def test_what_a_server_refuses_no_other_is_asked():
    servers = [Scripted(name, lambda number: RequestRefused("too long")) for name in "ab"]
    errors = ask_all(servers, 10)
    assert all(isinstance(error, RequestRefused) and str(error) == "too long" for error in errors)
    assert sum(server.asked for server in servers) == 10
