"""The report of a bench run; what it says of speed means nothing here."""

import pytest
from fitted_head import LAYERS, TREE, small_target
from small_servers import FACTS, NEW_TOKENS, SETS, small_head

from eagle3.decoding.speculate import Speculator
from eagle3.engine.timed import ServedAnswer
from eagle3.serving.bench.loads import RESULTS, MeasuredLoad, read_results
from eagle3.serving.bench.report import verdict, write_bench_report
from eagle3.serving.bench.stats import Cell, Interval, SpeedUp
from eagle3.serving.server.load import LoadResult
from eagle3.storage.files import read_json


def test_the_report_has_the_decoders_accept_length_and_a_verdict_for_each_set(measured, tmp_path):
    said = write_bench_report(read_results(measured[0] / RESULTS), FACTS, tmp_path)
    assert [line.split(":")[0] for line in said.splitlines()] == ["chat", "code"]
    cells = read_json(tmp_path / "results.json", made_by="this test")["cells"]
    [cell] = [cell for cell in cells if (cell["prompt_set"], cell["concurrency"]) == ("chat", 1)]
    decoder = Speculator(small_target(), small_head(), LAYERS)
    made = [decoder.decode(turn.ids, max_new_tokens=NEW_TOKENS, **TREE) for turn in SETS["chat"]]
    verifications = sum(one.verifications for one in made)
    per_depth = [sum(one.accepted[depth] for one in made) / verifications for depth in range(3)]
    assert cell["sides"]["head"]["per_depth"] == pytest.approx([share for share in per_depth if share])
    assert cell["sides"]["head"]["accept_length"] == pytest.approx(1 + sum(per_depth))
    assert cell["sides"]["plain"]["accept_length"] is None
    assert [cell["sides"][side]["same_answers"] for side in ("plain", "head")] == [1.0, 1.0]
    report = (tmp_path / "report.md").read_text()
    for part in (
        said.splitlines()[0], "## code", "| 2 | head |", "| 100% |", "accepted at depth",
        "\ncommand: serve.py action=bench\n", "- a GPU",
    ):  # fmt: skip
        assert part in report
    widths = {line.count("|") for line in report.splitlines() if line.startswith(("| concurrency |", "| 1 |", "| 2 |"))}
    assert len(widths) == 1


def test_where_speculation_does_not_pay_the_verdict_says_who_looks_for_what_does():
    paying, not_paying = (SpeedUp(Interval(value, value - 0.1, value + 0.1), None) for value in (1.5, 1.05))
    found = [Cell("chat", 1, {}, {"head": paying}), Cell("chat", 32, {}, {"head": not_paying})]
    assert verdict(found[:1]) == "speculation pays at every concurrency measured, 1 to 1"
    assert verdict(found) == (
        "speculation stops paying at concurrency 32, speed-up 1.05 [0.95, 1.15]; action=tune tune.concurrency=32 "
        "looks for settings that pay there, tune.loads for the load from which none does"
    )


def test_failures_and_one_sided_results_are_shown_as_such(tmp_path):
    failing = LoadResult([ServedAnswer(error="HTTP 500")], 1.0, 1.0, 0.0, cache_flushed=False, ended={"no room": 2})
    loads = [MeasuredLoad("head", "chat", 4, 0, repeat, failing) for repeat in (0, 1)]
    said = write_bench_report(loads, FACTS, tmp_path)
    assert said == "chat: plain target and head were not both measured"
    report = (tmp_path / "report.md").read_text()
    assert "Failed at concurrency 4: head: 2 times HTTP 500" in report
    assert "Ended before their last turn at concurrency 4: head: 4 times no room" in report
    assert "| 4 | head | - |" in report
