"""A load: every prompt answered, so many at a time, and failures counted."""

import pytest
from fitted_head import LAYERS, NEW_TOKENS, PROMPT, TREE, small_target
from serving_fixtures import free_port, serving
from small_servers import PROMPTS, head_server, load, small_head

from eagle3.decoding.speculate import Speculator, plain_greedy


def test_every_prompt_gets_the_answer_that_the_target_gives_it() -> None:
    with serving(head_server()) as url:
        result = load(url)
    assert [list(answer.output_ids) for answer in result.answers] == [
        plain_greedy(small_target(), prompt, NEW_TOKENS) for prompt in PROMPTS
    ]
    assert not result.failed and result.cache_flushed


def test_counts_of_verifications_and_drafts_are_those_of_the_decoder() -> None:
    decoder = Speculator(small_target(), small_head(), LAYERS)
    with serving(head_server()) as url:
        answers = load(url).answers
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        made = decoder.decode(prompt, max_new_tokens=NEW_TOKENS, **TREE)
        assert (answer.verify_ct, answer.correct_drafts) == (made.verifications, sum(made.accepted))
        assert [sum(answer.histogram[depth:]) for depth in (1, 2, 3)] == made.accepted
        assert (answer.output_tokens, answer.finish_reason) == (len(made.token_ids), made.finish_reason)
    assert sum(answer.correct_drafts for answer in answers) > 0


@pytest.mark.parametrize("concurrency", [1, 4])
def test_no_more_requests_run_at_once_than_asked_for_and_no_fewer(concurrency: int) -> None:
    server = head_server()
    with serving(server) as url:
        load(url, concurrency=concurrency)
    assert server.most_running == concurrency


def test_warm_up_is_sent_before_the_cache_is_emptied_and_counts_nowhere() -> None:
    server = head_server()
    with serving(server) as url:
        result = load(url, warmup=2)
    assert len(server.received) == len(PROMPTS) + 2 * 3
    assert len(result.answers) == len(PROMPTS)
    assert server.received_at_flush == [2 * 3]


def test_a_refused_request_is_counted_and_the_others_are_measured() -> None:
    with serving(head_server()) as url:
        result = load(url, [PROMPT, [], PROMPT[:5]])
    assert [answer.error for answer in result.answers] == [None, "HTTP 400 Bad Request: input_ids is empty", None]
    assert len(result.complete) == 2 and len(result.failed) == 1


def test_a_server_that_is_not_there_fails_each_request_with_a_reason() -> None:
    result = load(f"http://127.0.0.1:{free_port()}")
    assert len(result.failed) == len(PROMPTS) and not result.cache_flushed
    assert all(answer.error and answer.error.startswith("ClientConnectorError") for answer in result.failed)
