"""action=watch against a real HTTP server that says what SGLang and vLLM say at /metrics and /server_info."""

import json
import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from exported_head import FINGERPRINT, measured, record_of
from prometheus_client.parser import text_string_to_metric_families
from scripts import run_script

from eagle3.errors import InputError
from eagle3.head.draft_head import DraftHead
from eagle3.serving.head.format import save_head
from eagle3.serving.head.record import write_record
from eagle3.serving.watch.output import earlier
from eagle3.serving.watch.run import watch
from eagle3.serving.watch.settings import WatchSettings, baseline_of

LABELS = 'engine_type="unified",model_name="meta-llama/Llama-3.1-8B-Instruct",moe_ep_rank="0",pp_rank="0",tp_rank="0"'
SETTINGS = WatchSettings(url=None, every_s=0.01, for_s=None, baseline=3.0, drop=0.1, window=3, timeout_s=5.0)
GARBAGE = "<html>a proxy's {page\n"
Answer = int | str | dict[str, Any]  # a status, a text, or JSON


def sglang(length: float | None, *, tokens: float = 7.5e6, running: int = 5) -> str:
    """As SGLang 0.5.17 writes it with --enable-metrics, buckets left out."""
    gauge = "" if length is None else f"sglang:spec_accept_length{{{LABELS}}} {length}\n"
    return f"""# HELP sglang:num_running_reqs The number of running requests.
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{{{LABELS}}} {running:.1f}
# HELP sglang:gen_throughput The generation throughput (token/s).
# TYPE sglang:gen_throughput gauge
sglang:gen_throughput{{{LABELS}}} 1843.25
# HELP sglang:spec_accept_length Mean acceptance length of speculative decoding.
# TYPE sglang:spec_accept_length gauge
{gauge}# HELP sglang:generation_tokens_total Number of generation tokens processed.
# TYPE sglang:generation_tokens_total counter
sglang:generation_tokens_total{{is_streaming="false",{LABELS}}} {tokens}
"""


def vllm(drafts: float, accepted: float, tokens: float) -> str:
    """As vLLM 0.33.0 writes it, with a creation time beside each counter."""
    labels = 'engine="0",model_name="meta-llama/Llama-3.1-8B-Instruct"'
    counters = {"spec_decode_num_drafts": drafts, "spec_decode_num_accepted_tokens": accepted}
    lines = [f"# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{{{labels}}} 2.0"]
    for name, value in (counters | {"generation_tokens": tokens}).items():
        lines += [f"# TYPE vllm:{name}_total counter", f"vllm:{name}_total{{{labels}}} {value}"]
        lines += [f"# TYPE vllm:{name}_created gauge", f"vllm:{name}_created{{{labels}}} 1.7636e+09"]
    return "\n".join(lines) + "\n"


class Handler(BaseHTTPRequestHandler):
    """Gives /metrics the next answer of the server's list, the last one again and again."""

    server: Any

    def do_GET(self) -> None:
        answers = self.server.answers if self.path == "/metrics" else self.server.info
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        status, text = (answer, "") if isinstance(answer, int) else (200, answer)
        content = (text if isinstance(text, str) else json.dumps(text)).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *words: Any) -> None:
        """Say nothing."""


@pytest.fixture
def serving() -> Iterator[Callable[..., str]]:
    """Starts a server of these answers and gives its address."""
    servers = []

    def start(*answers: Answer, info: Answer = 404) -> str:
        server: Any = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.answers, server.info = [*answers], [info]
        threading.Thread(target=server.serve_forever, args=(0.01,)).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_address[1]}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def watched(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Callable[..., tuple[list[Any], str]]:
    """Watches for so many looks; gives the readings and the log."""

    def run(url: str, looks: int, **changes: Any) -> tuple[list[Any], str]:
        caplog.set_level(logging.INFO)
        settings = replace(SETTINGS, url=url, for_s=60.0, **changes)
        taken = 0

        def count(self: Any) -> float:
            nonlocal taken
            taken += 1
            return 1e9 if taken == looks else 0.001  # the last wait ends the watch

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("eagle3.serving.watch.run.Watcher.wait_s", count)
            watch(settings, "heads/first", folder=tmp_path / "watch")
        return earlier(tmp_path / "watch/watch.jsonl"), caplog.text

    return run


def gauges(folder: Path) -> dict[str, float]:
    families = text_string_to_metric_families((folder / "watch.prom").read_text())
    return {sample.name: sample.value for family in families for sample in family.samples}


def test_a_fall_is_said_once_with_the_command_and_so_is_recovery(
    serving: Callable, watched: Callable, tmp_path: Path
) -> None:
    lengths = [3.1, 3.0, 2.9, 2.0, 2.0, 2.1, 2.2, 3.3, 3.3, 3.3]
    readings, said = watched(serving(*map(sglang, lengths)), len(lengths))
    assert [reading.accept_length for reading in readings] == lengths
    assert {(reading.throughput, reading.running) for reading in readings} == {(1843.25, 5.0)}
    assert said.count("adapt the head to today's traffic: python train.py data.path=DIR/features") == 1
    assert "accept length 2.633 over 3 readings, below 2.700" in said and "init_from=heads/first" in said
    assert said.count("has recovered") == 1
    found = gauges(tmp_path / "watch")
    assert (found["eagle3_accept_length"], found["eagle3_acceptance_fallen"], found["eagle3_server_up"]) == (3.3, 0, 1)


def test_the_page_shows_the_fall_and_asks_nothing_of_the_network(
    serving: Callable, watched: Callable, tmp_path: Path
) -> None:
    watched(serving(*map(sglang, [3.0, 2.0, 2.0])), 3)
    page = (tmp_path / "watch/watch.html").read_text()
    assert "Acceptance has fallen" in page and "init_from=heads/first" in page
    assert page.count("<polyline") == 2 and "<script" not in page and "http" not in page.split("<style>")[1]
    assert gauges(tmp_path / "watch")["eagle3_acceptance_fallen"] == 1


def test_a_server_that_is_gone_busy_or_replaced_is_waited_for(
    serving: Callable, watched: Callable, tmp_path: Path
) -> None:
    readings, said = watched(serving(sglang(3.0), 503, 503, GARBAGE, sglang(3.2, tokens=7.6e6)), 5)
    assert [reading.accept_length for reading in readings] == [3.0, None, None, None, 3.2]
    assert "HTTP 503" in readings[1].error and "no Prometheus text" in readings[3].error
    assert said.count("; waiting for it") == 1 and said.count("answers again") == 1
    assert "Traceback" not in said and (tmp_path / "watch/watch.html").exists()


def test_a_closed_port_is_waited_for(watched: Callable) -> None:
    readings, _ = watched("http://127.0.0.1:9", 2)
    assert all("no answer from http://127.0.0.1:9/metrics" in reading.error for reading in readings)


def test_the_wait_grows_from_failure_to_failure(tmp_path: Path) -> None:
    from eagle3.serving.watch.run import Watcher

    watcher = Watcher(replace(SETTINGS, every_s=15.0), "", Any, Any)  # type: ignore[arg-type]
    waits = []
    for watcher.failures in (0, 1, 2, 50):
        waits.append(watcher.wait_s())
    assert waits == [15.0, 30.0, 60.0, 300.0]


def test_a_restart_begins_the_window_anew(serving: Callable, watched: Callable) -> None:
    texts = [sglang(2.0, tokens=500), sglang(2.0, tokens=900), sglang(2.0, tokens=10), sglang(2.0, tokens=20)]
    _, said = watched(serving(*texts), 4)
    assert "was restarted" in said and "adapt the head" not in said


def test_counters_of_vllm_are_read_between_looks_and_across_a_restart(serving: Callable, watched: Callable) -> None:
    texts = [vllm(100, 200, 300), vllm(200, 350, 550), vllm(200, 350, 550), vllm(10, 5, 15), vllm(20, 20, 40)]
    readings, said = watched(serving(*texts), 5)
    assert [reading.accept_length for reading in readings] == [None, 2.5, None, None, 2.5]
    assert readings[1].throughput > 0 and said.count("was restarted") == 1


def test_an_idle_server_is_no_evidence(serving: Callable, watched: Callable) -> None:
    readings, said = watched(serving(sglang(2.0, running=0)), 6)
    assert [reading.accept_length for reading in readings] == [2.0, *[None] * 5]
    assert "adapt the head" not in said


def test_without_metrics_the_mean_since_the_start_is_taken_and_said(serving: Callable, watched: Callable) -> None:
    info = {"speculative_algorithm": "EAGLE3", "internal_states": [{"avg_spec_accept_length": 2.75}]}
    readings, said = watched(serving(404, info=info), 1)
    assert readings[0].accept_length == 2.75 and "start it with --enable-metrics" in said


def test_before_the_first_draft_there_is_no_accept_length(serving: Callable, watched: Callable) -> None:
    readings, _ = watched(serving(sglang(None), info={"speculative_algorithm": "EAGLE3", "internal_states": [{}]}), 1)
    assert (readings[0].accept_length, readings[0].running) == (None, 5.0)


@pytest.mark.parametrize(
    ("metrics", "info", "message"),
    [
        (404, 404, "neither /metrics nor /server_info is there; give the address of SGLang or vLLM"),
        (sglang(None), {"speculative_algorithm": None, "internal_states": [{}]}, "SGLang runs without a head"),
        ("# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running 1\n", 404, "vLLM runs without a head"),
        (401, 404, "asks for a key"),
    ],
)
def test_a_server_that_tells_no_accept_length_is_refused(
    metrics: Answer, info: Answer, message: str, serving: Callable, watched: Callable
) -> None:
    with pytest.raises(InputError, match=message) as refused:
        watched(serving(metrics, info=info), 1)
    assert str(refused.value).startswith("watch.url")


def test_a_watch_goes_on_with_what_was_written_even_where_a_kill_cut_a_line(
    serving: Callable, watched: Callable, tmp_path: Path
) -> None:
    watched(serving(sglang(3.0)), 2)
    lines = tmp_path / "watch/watch.jsonl"
    lines.write_bytes(lines.read_bytes() + b'{"time": 1.0, "acc')
    readings, said = watched(serving(sglang(2.9)), 1)
    assert [reading.accept_length for reading in readings] == [3.0, 3.0, 2.9]
    assert "watch.jsonl: 1 lines cannot be read and are left out" in said


def test_the_baseline_is_what_the_head_was_measured_to_accept(
    make_head: Callable[..., DraftHead], tmp_path: Path
) -> None:
    head = make_head().float()
    save_head(tmp_path, head, [2, 4, 5], "float32")
    unset = replace(SETTINGS, baseline=None)
    with pytest.raises(InputError, match=r"watch\.baseline is not set and head=.* has no accept length"):
        baseline_of(unset, str(tmp_path))
    write_record(tmp_path, replace(record_of(head, FINGERPRINT), accept_length=measured()))
    assert baseline_of(unset, str(tmp_path)) == 2.0
    assert baseline_of(SETTINGS, str(tmp_path)) == 3.0
    with pytest.raises(InputError, match=r"watch\.baseline is not set and no head is given"):
        baseline_of(unset, None)
    with pytest.raises(InputError, match=r"watch\.url is not set; give the running server"):
        watch(SETTINGS, None, folder=tmp_path / "watch")


def test_the_command_watches_and_ends(serving: Callable, tmp_path: Path) -> None:
    url = serving(sglang(2.0))
    done = run_script(
        "serve", "action=watch", f"watch.url={url}", "watch.baseline=3",
        "watch.window=2", "watch.every_s=0.1", "watch.for_s=0.5", "hydra.run.dir=watched", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "adapt the head to today's traffic" in done.stdout + done.stderr
    assert {"watch.jsonl", "watch.prom", "watch.html"} <= {path.name for path in (tmp_path / "watched").iterdir()}
