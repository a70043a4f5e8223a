"""A load's numbers, and real servers that are started, loaded and stopped for them."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fitted_head import PROMPT
from serving_fixtures import launch_settings, serve_run, sglang_site
from small_servers import alone
from stores import ASSETS
from timed_machine import settings

from eagle3.draft_shape import Shape
from eagle3.engine.timed import ServedAnswer
from eagle3.errors import InputError
from eagle3.serving.server.load import LoadResult, PlainAnswers
from eagle3.serving.tune import timing
from eagle3.serving.tune.timing import ServerTimer
from eagle3.target.files import read_target_files


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (ServedAnswer(error="HTTP 500"), "none of 1 answers can be timed: HTTP 500"),
        (ServedAnswer(ttft_s=0.5, latency_s=0.5, output_tokens=1), "all answers are one token long"),
    ],
)
def test_a_load_without_a_time_is_refused_with_the_reason(answer, reason, tmp_path, monkeypatch):
    server = SimpleNamespace(url="", name="server plain")
    monkeypatch.setattr(timing, "Server", lambda *given, **names: nullcontext(server))
    monkeypatch.setattr(timing, "is_reachable", lambda url: True)
    monkeypatch.setattr(
        PlainAnswers, "measure", lambda *given, **how: LoadResult([answer], 1.0, 1.0, 1.0, cache_flushed=True)
    )
    with pytest.raises(InputError, match=reason):
        server_timer(tmp_path)(None)


def server_timer(tmp_path: Path, *, fault: str = "", **changes: Any) -> ServerTimer:
    return ServerTimer(
        run=replace(
            serve_run("tune", "head=head"),
            tune=settings(requests_per_place=2, warmup=1, **changes),
            launch=launch_settings(sglang_site(tmp_path), fault=fault),
        ),
        target=read_target_files(path=str(ASSETS / "tiny")),
        conversations=[alone(PROMPT), alone(PROMPT[3:])],
        plain_answers=PlainAnswers({"max_new_tokens": 12, "temperature": 0.0}),
        log_dir=tmp_path / "logs",
    )


def test_servers_are_started_loaded_at_each_load_counted_and_stopped(tmp_path):
    timer = server_timer(tmp_path, fault="scripted", loads=[1, 2])
    plain, timed = timer(None), timer(Shape(3, 1, 4))
    assert [plain[2].requests, plain[2].accept_length, [*timed]] == [4, None, [1, 2]]
    assert timed[2].accept_length == 3.0
    assert [plain[1].same_answers, plain[2].same_answers, timed[1].same_answers] == [None, 1.0, 1.0]
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == ["3-1-4.log", "plain.log"]


def test_a_server_that_dies_midway_is_an_error_with_the_reason(tmp_path):
    with pytest.raises(InputError, match=r"server plain has ended .*exit status 9"):
        server_timer(tmp_path, fault="scripted 4")(None)
