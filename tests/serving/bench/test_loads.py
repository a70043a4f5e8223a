"""Loads on two servers that really decode: each is measured as often as planned and kept, without a word of text."""

import json
from collections import Counter
from pathlib import Path

import pytest
from serving_fixtures import free_port, serving
from small_servers import SETS, head_server, plain_server, plan

from eagle3.engine.timed import ServedAnswer
from eagle3.errors import InputError
from eagle3.serving.bench.loads import RESULTS, MeasuredLoad, append, measure_running, read_results
from eagle3.serving.server.load import LoadResult, repeat_prompts


def test_every_load_is_measured_on_both_servers_in_every_repeat(measured: tuple[Path, dict]) -> None:
    found = read_results(measured[0] / RESULTS)
    keys = Counter((item.side, item.prompt_set, item.concurrency, item.repeat) for item in found)
    assert len(keys) == 2 * 2 * 2 * 2 and set(keys.values()) == {1}
    assert all(not item.result.failed for item in found)


def test_the_two_servers_take_turns_in_coming_first(measured: tuple[Path, dict]) -> None:
    sides = [item.side for item in read_results(measured[0] / RESULTS)]
    assert sides == ["plain", "head"] * 4 + ["head", "plain"] * 4


def test_a_load_asks_every_prompt_and_fills_its_places(measured: tuple[Path, dict]) -> None:
    assert repeat_prompts(SETS["chat"], at_least=2) == [*SETS["chat"]]  # every prompt
    assert repeat_prompts(SETS["chat"], at_least=4) == [*SETS["chat"], SETS["chat"][0]]  # two for each of two places
    counts = {
        (item.prompt_set, item.concurrency): len(item.result.answers) for item in read_results(measured[0] / RESULTS)
    }
    assert counts == {("chat", 1): 3, ("chat", 2): 4, ("code", 1): 2, ("code", 2): 4}


def test_results_hold_every_requests_numbers_and_nobodys_words(measured: tuple[Path, dict]) -> None:
    rows = [json.loads(line) for line in (measured[0] / RESULTS).read_text().splitlines()]
    for row in rows:
        for answer in row["result"]["answers"]:
            assert {"ttft_s", "latency_s", "output_tokens", "verify_ct", "histogram", "error"} <= set(answer)
            assert "output_ids" not in answer and "text" not in answer


def test_results_survive_a_line_that_was_cut_short(tmp_path: Path) -> None:
    one = MeasuredLoad("head", "chät", 4, 0, LoadResult([ServedAnswer(output_tokens=3, histogram=(1, 2))], 1.0, True))
    append(tmp_path / RESULTS, one)
    with (tmp_path / RESULTS).open("a") as file:
        file.write('{"side": "he')
    [read] = read_results(tmp_path / RESULTS)
    assert (read.prompt_set, read.result.answers[0].output_tokens) == ("chät", 3)
    assert list(read.result.answers[0].histogram) == [1, 2]
    assert read_results(tmp_path / "nothing.jsonl") == []


def test_a_plain_url_with_a_head_is_refused(tmp_path: Path) -> None:
    with serving(head_server()) as url, pytest.raises(InputError, match=r"bench\.plain_url=.* drafts already"):
        measure_running(plan(plain_url=url, head_url=url), tmp_path, {})


def test_a_url_where_nothing_answers_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"/server_info does not answer .*name the URL of a running SGLang"):
        measure_running(plan(head_url=f"http://127.0.0.1:{free_port()}"), tmp_path, {})


def test_a_server_that_refuses_every_request_ends_the_bench_run(tmp_path: Path) -> None:
    server = plain_server()
    server.last_event = {"error": {"message": "vocabulary"}}
    with serving(server) as url, pytest.raises(InputError, match=r"all 3 requests of a load failed \(vocabulary\)"):
        measure_running(plan(plain_url=url), tmp_path, {})
    assert len(read_results(tmp_path / RESULTS)) == 1
