"""A load: every prompt answered, so many at a time, failures counted, and answers compared with the plain server's."""

import asyncio
from typing import Any

import pytest
from aiohttp import web
from exported_head import tiny_chat, tiny_target
from fitted_head import LAYERS, PROMPT, TREE, small_target
from protocol_server import ProtocolServer, plain
from serving_fixtures import free_port, serving
from small_servers import GREEDY, NEW_TOKENS, PROMPTS, head_server, load, small_head

from eagle3.decoding.speculate import Speculator, plain_greedy
from eagle3.engine.timed import ServedAnswer
from eagle3.serving.check.turns import Turn, first_turn
from eagle3.serving.server.load import Agreement, LoadResult, PlainAnswers, measure_load, tokens_until


def test_answers_and_counts_are_those_of_the_decoder():
    decoder = Speculator(small_target(), small_head(), LAYERS)
    with serving(head_server()) as url:
        result = load(url)
    assert not result.failed and result.cache_flushed
    for prompt, answer in zip(PROMPTS, result.answers, strict=True):
        made = decoder.decode(prompt, max_new_tokens=NEW_TOKENS, **TREE)
        assert list(answer.output_ids) == made.token_ids
        assert (answer.verify_ct, answer.correct_drafts) == (made.verifications, sum(made.accepted))
        assert [sum(answer.histogram[depth:]) for depth in (1, 2, 3)] == made.accepted
        assert (answer.output_tokens, answer.finish_reason) == (len(made.token_ids), made.finish_reason)
    assert sum(answer.correct_drafts for answer in result.answers) > 0


@pytest.mark.parametrize("concurrency", [1, 4])
def test_no_more_requests_run_at_once_than_asked_for_and_no_fewer(concurrency):
    server = head_server()
    with serving(server) as url:
        load(url, concurrency=concurrency)
    assert server.most_running == concurrency


def test_warm_up_is_sent_before_the_cache_is_emptied_and_counts_nowhere():
    server = head_server()
    with serving(server) as url:
        result = load(url, warmup=2)
    assert len(server.received) == len(PROMPTS) + 2 * 3
    assert len(result.answers) == len(PROMPTS)
    assert server.received_at_flush == [2 * 3]


def test_failed_requests_are_counted_with_their_reason_and_the_others_are_measured():
    with serving(head_server()) as url:
        result = load(url, [PROMPT, [], PROMPT[:5]])
    assert [answer.error for answer in result.answers] == [None, "HTTP 400 Bad Request: input_ids is empty", None]
    assert len(result.complete) == 2 and len(result.failed) == 1
    result = load(f"http://127.0.0.1:{free_port()}")  # where no server is
    assert len(result.failed) == len(PROMPTS) and not result.cache_flushed
    assert all(answer.error and answer.error.startswith("ClientConnectorError") for answer in result.failed)


def test_each_event_of_a_stream_brings_the_same_part_of_the_answer():
    answer = ServedAnswer(output_tokens=10, events_s=(0.5, 0.7, 1.5, 2.2, 2.5))
    assert [tokens_until(seconds, answer) for seconds in (0.4, 0.5, 2.0, 2.5, 9)] == [0, 2, 6, 10, 10]
    assert tokens_until(9, ServedAnswer(error="HTTP 500")) == 0


def test_the_end_of_a_load_when_places_are_idle_counts_for_no_rate(monkeypatch):
    async def late_third(session: Any, url: str, prompt_ids: list[int], *, sampling: Any) -> ServedAnswer:
        if prompt_ids == [1]:
            await third_sent.wait()
        if prompt_ids == [2]:  # is sent when the first is answered, and has no token when the second is
            third_sent.set()
            await asyncio.sleep(0.01)
        return ServedAnswer(output_tokens=10, events_s=(60.0,) if prompt_ids == [2] else (0.0,))

    third_sent = asyncio.Event()
    monkeypatch.setattr("eagle3.serving.server.load.generate", late_third)
    result = load(f"http://127.0.0.1:{free_port()}", [[0], [1], [2]], concurrency=2)
    assert [answer.output_tokens for answer in result.complete] == [10, 10, 10]
    assert result.full_tokens == 20 and 0 < result.full_seconds < result.seconds


# --- conversations ---------------------------------------------------------------------------------------------------

TALK = [{"role": "user", "content": text} for text in ("Hi", "And then?", "Why?")]
LOAD: Any = {"sampling": GREEDY | {"max_new_tokens": 6}, "warmup": 0, "timeout_s": 600, "progress": None}


def questions(count: int = 3) -> Turn:
    """A conversation of so many questions, without answers."""
    return first_turn(tiny_chat(), {"messages": TALK[:count]}, "all", 999)


def test_a_turn_is_sent_with_the_servers_own_answers_to_the_turns_before_it():
    server, chat = ProtocolServer(plain(tiny_target()), {}), tiny_chat()
    with serving(server) as url:
        result = measure_load(url, [questions(), questions(2)], **LOAD, concurrency=1)
    expected = []
    for count in (3, 2):
        messages: list[dict[str, str]] = []
        for question in TALK[:count]:
            messages.append(question)
            expected.append(chat.prompt_ids(messages))
            answer = chat.answer_text(expected[-1], plain_greedy(tiny_target(), expected[-1], 6))
            messages.append({"role": "assistant", "content": answer or ""})
    assert [body["input_ids"] for body in server.received] == expected
    assert [list(answer.prompt_ids) for answer in result.answers] == expected
    assert (len(result.complete), result.ended) == (5, {})
    assert result.full_tokens == sum(answer.output_tokens for answer in result.answers)


def test_places_have_one_conversation_each_at_a_time():
    server = ProtocolServer(plain(tiny_target()), {})
    with serving(server) as url:
        measure_load(url, [questions()] * 4, **LOAD | {"warmup": 1}, concurrency=2)
    assert server.most_running == 2 and server.received_at_flush == [2]
    first = questions().ids
    sent = [body["input_ids"] == first for body in server.received[2:]]
    assert len(sent) == 12 and sent[:2] == [True, True] and not any(sent[2:4])


@pytest.mark.parametrize("given", [False, True])
def test_a_conversation_whose_request_fails_ends_and_is_counted(given):
    server = ProtocolServer(plain(tiny_target()), {})
    server.fault = lambda number: web.Response(status=500) if number == 1 else None
    messages = [TALK[0], *([{"role": "assistant", "content": "Ho"}] if given else []), TALK[1]]
    failing = first_turn(tiny_chat(), {"messages": messages}, "all", 999)
    with serving(server) as url:
        result = measure_load(url, [failing, questions(2)], **LOAD, concurrency=1)
    assert [answer.error is None for answer in result.answers] == [False, True, True]
    assert result.ended == {"the request before failed": 1}


def test_a_conversation_without_room_for_its_next_turn_ends_and_is_counted():
    narrow = first_turn(tiny_chat(), {"messages": TALK}, "all", len(questions().ids))
    with serving(ProtocolServer(plain(tiny_target()), {})) as url:
        result = measure_load(url, [narrow], **LOAD, concurrency=1)
    assert len(result.complete) == 1
    assert [*result.ended] == [
        f"empty, or longer than the target's context less the answer: {narrow.max_length} tokens"
    ]


# --- the plain server's answers --------------------------------------------------------------------------------------


def made(*answers: tuple[int, ...] | None) -> LoadResult:
    """Answers to the prompts 1, 2 and 1 again."""
    served = [
        ServedAnswer(error="HTTP 500") if ids is None else ServedAnswer(prompt_ids=(prompt,), output_ids=ids)
        for ids, prompt in zip(answers, (1, 2, 1), strict=False)
    ]
    return LoadResult(served, 1.0, 1.0, 0.0, cache_flushed=True)


def test_complete_answers_are_compared_with_the_plain_servers_first():
    known = PlainAnswers(GREEDY)
    assert known.compared(made((5,)), plain=False).agreement == Agreement(0, 0)  # nothing to compare with
    assert known.compared(made(None), plain=True).agreement == Agreement(0, 0)
    first = known.compared(made((5, 6), (7,), (5,)), plain=True)
    assert first.agreement == Agreement(0, 1)  # the first prompt, asked again
    assert known.compared(made((5, 6), (7,), (5, 6)), plain=True).agreement == Agreement(3, 3)
    assert known.compared(made((5, 6), None, (5, 7)), plain=False).agreement == Agreement(1, 2)
    sampled = PlainAnswers(GREEDY | {"temperature": 0.7})
    for _ in range(2):
        assert sampled.compared(made((5,)), plain=True).agreement == Agreement(0, 0)
