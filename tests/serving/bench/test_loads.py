"""Loads on two servers that really decode: each is measured as often as planned and kept, without a word of text."""

import json

import pytest
from serving_fixtures import free_port, serving
from small_servers import head_server, plain_server, plan

from eagle3.engine.timed import ServedAnswer
from eagle3.errors import InputError
from eagle3.serving.bench.loads import RESULTS, MeasuredLoad, measure_running, read_results
from eagle3.serving.server.load import LoadResult
from eagle3.storage.files import append_lines, json_line


def test_every_repeat_measures_every_load_on_both_servers_in_turn(measured):
    found = read_results(measured[0] / RESULTS)
    assert [(item.repeat, item.prompt_set, item.concurrency, item.side) for item in found] == [
        (repeat, prompt_set, concurrency, side)
        for repeat, sides in enumerate((("plain", "head"), ("head", "plain")))
        for prompt_set in ("chat", "code")
        for concurrency in (1, 2)
        for side in sides
    ]
    assert not any(item.result.failed for item in found)
    counts = {(item.prompt_set, item.concurrency): len(item.result.answers) for item in found}
    # Every prompt, of three and of one, and two requests for each concurrent one.
    assert counts == {("chat", 1): 3, ("chat", 2): 4, ("code", 1): 2, ("code", 2): 4}
    for row in map(json.loads, (measured[0] / RESULTS).read_text().splitlines()):
        for answer in row["result"]["answers"]:
            assert {"ttft_s", "latency_s", "output_tokens", "verify_ct", "histogram", "error"} <= set(answer)
            assert not {"output_ids", "text", "events_s"} & set(answer)


def test_results_survive_a_line_that_was_cut_short(tmp_path):
    one = MeasuredLoad(
        "head", "chät", 4, 0, 0, LoadResult([ServedAnswer(output_tokens=3, histogram=(1, 2))], 2.0, 1.0, 3.0, True)
    )
    append_lines(tmp_path / RESULTS, json_line(one.to_json()))
    with (tmp_path / RESULTS).open("a") as file:
        file.write('{"side": "he')
    assert read_results(tmp_path / RESULTS) == [one]
    assert read_results(tmp_path / "nothing.jsonl") == []


def test_servers_that_cannot_be_measured_are_named(tmp_path):
    with (
        serving(head_server()) as url,
        pytest.raises(InputError, match=r"bench\.plain_url=.* already uses a draft head"),
    ):
        measure_running(plan(plain_url=url, head_url=url), tmp_path, {})
    with pytest.raises(InputError, match=r"/server_info does not answer .*name the URL of a running SGLang"):
        measure_running(plan(head_url=f"http://127.0.0.1:{free_port()}"), tmp_path, {})
    server = plain_server()
    server.last_event = {"error": {"message": "vocabulary"}}
    with serving(server) as url, pytest.raises(InputError, match=r"all 3 requests of a load failed \(vocabulary\)"):
        measure_running(plan(plain_url=url), tmp_path, {})
    assert len(read_results(tmp_path / RESULTS)) == 1
