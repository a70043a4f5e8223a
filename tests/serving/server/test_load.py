"""The client and the load: times, counts and failures of many requests against a server that really decodes."""

import asyncio
from functools import cache
from typing import Any

import pytest
from fitted_head import LAYERS, NEW_TOKENS, PROMPT, TREE, fitted_head, small_target
from protocol_server import ProtocolServer, plain, speculative
from serving_fixtures import free_port, serving

from eagle3.decoding.speculate import Speculator, plain_greedy
from eagle3.errors import InputError
from eagle3.serving.server.client import Answer, generate, new_session
from eagle3.serving.server.load import LoadResult, measure_load

PROMPTS = [PROMPT[:length] for length in range(5, 13)]
GREEDY = {"temperature": 0.0, "max_new_tokens": NEW_TOKENS}


@cache
def head() -> Any:
    return fitted_head(small_target(), PROMPT)


def with_head() -> ProtocolServer:
    return ProtocolServer(speculative(small_target(), head(), LAYERS, **TREE), {})


def load(url: str, prompts: list[list[int]] = PROMPTS, **changes: Any) -> LoadResult:
    settings = {"concurrency": 3, "sampling": GREEDY, "warmup": 0, "timeout_s": 30, "progress": None}
    return measure_load(url, prompts, **settings | changes)


def test_every_prompt_gets_the_answer_that_the_target_gives_it() -> None:
    with serving(with_head()) as url:
        result = load(url)
    assert [list(answer.output_ids) for answer in result.answers] == [
        plain_greedy(small_target(), prompt, NEW_TOKENS) for prompt in PROMPTS
    ]
    assert not result.failed and result.cache_flushed


def test_counts_of_verifications_and_drafts_are_those_of_the_decoder() -> None:
    decoder = Speculator(small_target(), head(), LAYERS)
    with serving(with_head()) as url:
        answers = load(url).answers
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        made = decoder.decode(prompt, max_new_tokens=NEW_TOKENS, **TREE)
        assert (answer.verify_ct, answer.correct_drafts) == (made.verifications, sum(made.accepted))
        assert [sum(answer.histogram[depth:]) for depth in (1, 2, 3)] == made.accepted
        assert (answer.output_tokens, answer.finish_reason) == (len(made.token_ids), made.finish_reason)
    assert sum(answer.correct_drafts for answer in answers) > 0


def test_times_are_those_of_the_first_and_the_last_token() -> None:
    with serving(ProtocolServer(plain(small_target()), {})) as url:
        [answer] = load(url, [PROMPT]).answers
    assert answer.ttft_s is not None and answer.latency_s is not None and answer.tpot_s is not None
    assert 0 < answer.ttft_s < answer.latency_s
    assert answer.tpot_s >= 0.0005  # the server waits so long behind each token
    assert answer.tpot_s * (answer.output_tokens - 1) == pytest.approx(answer.latency_s - answer.ttft_s)


def test_an_answer_of_one_token_has_no_time_per_token_and_no_verification() -> None:
    with serving(with_head()) as url:
        [answer] = load(url, [PROMPT], sampling=GREEDY | {"max_new_tokens": 1}).answers
    assert (answer.output_tokens, answer.tpot_s, answer.verify_ct, answer.error) == (1, None, 0, None)


@pytest.mark.parametrize("concurrency", [1, 4])
def test_no_more_requests_run_at_once_than_asked_for_and_no_fewer(concurrency: int) -> None:
    server = with_head()
    with serving(server) as url:
        load(url, concurrency=concurrency)
    assert server.most_running == concurrency


def test_warm_up_is_sent_before_the_cache_is_emptied_and_counts_nowhere() -> None:
    server = with_head()
    with serving(server) as url:
        result = load(url, warmup=2)
    assert len(server.received) == len(PROMPTS) + 2 * 3
    assert len(result.answers) == len(PROMPTS)
    assert server.received_at_flush == [2 * 3]


def test_the_end_of_a_turn_is_respected_and_sampling_is_passed_on() -> None:
    server, sampling = with_head(), GREEDY | {"temperature": 0.7, "top_p": 0.9}
    with serving(server) as url:
        load(url, [PROMPT], sampling=sampling)
    assert [body["sampling_params"] for body in server.received] == [sampling]
    assert "ignore_eos" not in str(server.received)


def test_a_refused_request_is_counted_and_the_others_are_measured() -> None:
    with serving(with_head()) as url:
        result = load(url, [PROMPT, [], PROMPT[:5]])
    assert [answer.error for answer in result.answers] == [None, "HTTP 400 Bad Request: input_ids is empty", None]
    assert len(result.complete) == 2 and len(result.failed) == 1


def test_a_server_that_is_not_there_fails_each_request_with_a_reason() -> None:
    result = load(f"http://127.0.0.1:{free_port()}")
    assert len(result.failed) == len(PROMPTS) and not result.cache_flushed
    assert all(answer.error and answer.error.startswith("ClientConnectorError") for answer in result.failed)


@pytest.mark.parametrize(
    ("event", "error"),
    [
        ({"error": {"message": "too long: [4, 5, 6]"}}, "too long:"),
        ({"meta_info": {"finish_reason": {"type": "abort", "message": "no room"}}}, "aborted: no room"),
        ({"output_ids": [4], "meta_info": {"completion_tokens": 1, "finish_reason": None}}, "ended before"),
        ({"output_ids": [4], "meta_info": {"completion_tokens": 2, "finish_reason": {"type": "stop"}}}, "incremental"),
        ("no object", "no event of SGLang"),
        ({"meta_info": {"finish_reason": {"type": "stop"}}}, "no event of SGLang"),
    ],
)
def test_what_is_no_whole_answer_is_an_error_that_quotes_no_token(event: Any, error: str) -> None:
    server = with_head()
    server.last_event = event
    with serving(server) as url:
        [answer] = load(url, [PROMPT]).answers
    assert answer.error is not None and error in answer.error and "[4" not in answer.error
    assert answer.output_tokens == 0


def test_a_request_without_an_answer_is_given_up_after_the_time_limit() -> None:
    async def ask(url: str) -> Answer:
        async with new_session(timeout_s=0.05) as session:
            return await generate(session, url, PROMPT, sampling=GREEDY)

    server = with_head()
    server.delay_s = 5
    with serving(server) as url:
        assert asyncio.run(ask(url)).error == "no answer within 0.05 s"


@pytest.mark.parametrize(("prompts", "concurrency"), [([], 1), ([PROMPT], 0)])
def test_an_empty_load_is_refused(prompts: list[list[int]], concurrency: int) -> None:
    with pytest.raises(InputError, match="both start at 1"):
        load("http://127.0.0.1:1", prompts, concurrency=concurrency)
