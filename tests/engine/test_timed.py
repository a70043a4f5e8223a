"""One request: its times and counts, and what is no whole answer."""

import pytest
from fitted_head import PROMPT
from serving_fixtures import serving
from small_servers import GREEDY, head_server, load, plain_server

from eagle3.engine import client


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
def test_what_is_no_whole_answer_is_an_error_that_quotes_no_token(event, error):
    server = head_server()
    server.last_event = event
    with serving(server) as url:
        [answer] = load(url, [PROMPT]).answers
    assert answer.error is not None and error in answer.error and "[4" not in answer.error
    assert answer.output_tokens == 0


def test_a_line_of_a_stream_has_a_bounded_size(monkeypatch):
    monkeypatch.setattr(client, "LONGEST_LINE", 2**16)
    server = head_server()
    server.last_event = {"text": "long" * 2**20}
    with serving(server) as url:
        [answer] = load(url, [PROMPT]).answers
    assert answer.error == "a line of the reply is longer than 65536 bytes"


def test_times_are_those_of_the_first_and_the_last_token():
    with serving(plain_server()) as url:
        [answer] = load(url, [PROMPT]).answers
    assert answer.ttft_s is not None and answer.latency_s is not None and answer.tpot_s is not None
    assert 0 < answer.ttft_s < answer.latency_s
    assert answer.tpot_s >= 0.0005  # the server waits so long behind each token
    assert answer.tpot_s * (answer.output_tokens - 1) == pytest.approx(answer.latency_s - answer.ttft_s)


def test_an_answer_of_one_token_has_no_time_per_token_and_no_verification():
    with serving(head_server()) as url:
        [answer] = load(url, [PROMPT], sampling=GREEDY | {"max_new_tokens": 1}).answers
    assert (answer.output_tokens, answer.tpot_s, answer.verify_ct, answer.error) == (1, None, 0, None)


def test_the_end_of_a_turn_is_respected_and_sampling_is_passed_on():
    server, sampling = head_server(), GREEDY | {"temperature": 0.7, "top_p": 0.9}
    with serving(server) as url:
        load(url, [PROMPT], sampling=sampling)
    assert [body["sampling_params"] for body in server.received] == [sampling]
    assert "ignore_eos" not in str(server.received)
