"""The benchmark from loads to report, with servers that really decode; what it says of speed means nothing here."""

import json
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from fitted_head import LAYERS, NEW_TOKENS, PROMPT, TREE, fitted_head, small_target
from lightning.pytorch.loggers import WandbLogger
from protocol_server import ProtocolServer, plain, speculative
from serving_fixtures import bench_settings, free_port, launch_settings, serving, sglang_site

from eagle3.answers.chat import Chat
from eagle3.decoding.speculate import Speculator
from eagle3.errors import InputError
from eagle3.serving.bench.loads import RESULTS, Measurement, Plan, Side, append, measure_running, read_results
from eagle3.serving.bench.plots import PICTURES
from eagle3.serving.bench.report import log_to_wandb, verdict, write_report
from eagle3.serving.bench.run import bench_commands, benchmark, known_before, notes, prompt_sets, require_room
from eagle3.serving.bench.stats import Cell, Interval, SpeedUp
from eagle3.serving.server.client import Answer
from eagle3.serving.server.command import LaunchSettings
from eagle3.serving.server.load import LoadResult
from eagle3.storage import read_json
from eagle3.target.files import TargetFiles, read_target_files
from eagle3.training.loggers import close

SETS = {"chat": [PROMPT, PROMPT[:9], PROMPT[:7]], "code": [PROMPT[:5]]}
GREEDY = {"temperature": 0.0, "max_new_tokens": NEW_TOKENS}
FACTS = {"command": "serve.py action=bench", "machine": {"gpus": ["a GPU"]}}


def plan(**changes: Any) -> Plan:
    return Plan(bench_settings(concurrency=[1, 2], requests_per_place=2, repeats=2, warmup=0, **changes), SETS, GREEDY)


@cache
def head() -> Any:
    return fitted_head(small_target(), PROMPT)


def plain_server() -> ProtocolServer:
    return ProtocolServer(plain(small_target()), {"max_running_requests": 64})


def head_server() -> ProtocolServer:
    arguments = {"speculative_algorithm": "EAGLE3", "max_running_requests": 1, "disable_overlap_schedule": True}
    return ProtocolServer(speculative(small_target(), head(), LAYERS, **TREE), arguments)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[Side, Any]]:
    """A folder with the results of both servers, and what they say of themselves."""
    folder, information = tmp_path_factory.mktemp("bench"), {}
    with serving(plain_server()) as plain_url, serving(head_server()) as head_url:
        measure_running(plan(plain_url=plain_url, head_url=f"{head_url}/"), folder, information)
    return folder, information


def test_every_load_is_measured_on_both_servers_in_every_repeat(measured: tuple[Path, dict]) -> None:
    found = read_results(measured[0] / RESULTS)
    keys = Counter((item.side, item.prompt_set, item.concurrency, item.repeat) for item in found)
    assert len(keys) == 2 * 2 * 2 * 2 and set(keys.values()) == {1}
    assert all(not item.result.failed for item in found)


def test_the_two_servers_take_turns_in_coming_first(measured: tuple[Path, dict]) -> None:
    sides = [item.side for item in read_results(measured[0] / RESULTS)]
    assert sides == ["plain", "head"] * 4 + ["head", "plain"] * 4


def test_a_load_asks_every_prompt_and_fills_its_places(measured: tuple[Path, dict]) -> None:
    assert len(plan().requests("chat", 1)) == 3  # every prompt
    assert plan().requests("chat", 2) == [*SETS["chat"], SETS["chat"][0]]  # two for each place
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


def test_the_reported_accept_length_is_the_decoders(measured: tuple[Path, dict], tmp_path: Path) -> None:
    write_report(read_results(measured[0] / RESULTS), FACTS, tmp_path)
    cells = read_json(tmp_path / "results.json", made_by="this test")["cells"]
    [cell] = [cell for cell in cells if (cell["prompt_set"], cell["concurrency"]) == ("chat", 1)]
    decoder = Speculator(small_target(), head(), LAYERS)
    made = [decoder.decode(prompt, max_new_tokens=NEW_TOKENS, **TREE) for prompt in SETS["chat"]]
    verifications = sum(one.verifications for one in made)
    per_depth = [sum(one.accepted[depth] for one in made) / verifications for depth in range(3)]
    assert cell["sides"]["head"]["per_depth"] == pytest.approx([share for share in per_depth if share])
    assert cell["sides"]["head"]["accept_length"] == pytest.approx(1 + sum(per_depth))
    assert cell["sides"]["plain"]["accept_length"] is None
    assert [cell["sides"][side]["same_answers"] for side in ("plain", "head")] == [1.0, 1.0]


def test_where_speculation_does_not_pay_the_verdict_says_who_looks_for_what_does() -> None:
    paying, not_paying = (SpeedUp(Interval(value, value - 0.1, value + 0.1), None) for value in (1.5, 1.05))
    found = [Cell("chat", 1, {}, paying), Cell("chat", 32, {}, not_paying)]
    assert verdict("chat", found[:1]) == "chat: speculation pays at every concurrency measured, 1 to 1"
    assert verdict("chat", found) == (
        "chat: speculation stops paying at concurrency 32, speed-up 1.05 [0.95, 1.15]; "
        "action=tune tune.concurrency=32 looks for settings that pay there"
    )


def test_the_report_has_all_its_files_and_a_verdict_for_each_set(measured: tuple[Path, dict], tmp_path: Path) -> None:
    verdicts = write_report(read_results(measured[0] / RESULTS), FACTS, tmp_path)
    assert [line.split(":")[0] for line in verdicts.splitlines()] == ["chat", "code"]
    report = (tmp_path / "report.md").read_text()
    for part in (
        verdicts.splitlines()[0],
        "## code",
        "| 2 | head |",
        "| 100% |",
        "accepted at depth",
        "serve.py action=bench",
        "a GPU",
    ):
        assert part in report
    for name in PICTURES:
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    widths = {line.count("|") for line in report.splitlines() if line.startswith(("| concurrency |", "| 1 |", "| 2 |"))}
    assert len(widths) == 1


def test_failures_and_one_sided_results_are_shown_as_such(tmp_path: Path) -> None:
    failing = LoadResult([Answer(error="HTTP 500")], 1.0, cache_flushed=False)
    verdicts = write_report([Measurement("head", "chat", 4, 0, failing)], FACTS, tmp_path)
    assert verdicts == "chat: plain target and head were not both measured"
    report = (tmp_path / "report.md").read_text()
    assert "Failed at concurrency 4: head: 1 times HTTP 500" in report
    assert "| 4 | head | - |" in report


def test_what_makes_numbers_less_comparable_is_noted(measured: tuple[Path, dict]) -> None:
    results = read_results(measured[0] / RESULTS)
    found = notes(results, {"server_info": measured[1]}, plan())
    assert set(found) == {"chat", "code", "head server", "head server's scheduler"}
    unflushed = Measurement("head", "chat", 1, 0, LoadResult([], 1.0, cache_flushed=False))
    assert "prefix cache" in notes([*results, unflushed], {"server_info": {}}, plan())


def test_results_survive_a_line_that_was_cut_short(tmp_path: Path) -> None:
    one = Measurement("head", "chät", 4, 0, LoadResult([Answer(output_tokens=3, histogram=(1, 2))], 1.0, True))
    append(tmp_path / RESULTS, one)
    with (tmp_path / RESULTS).open("a") as file:
        file.write('{"side": "he')
    [read] = read_results(tmp_path / RESULTS)
    assert (read.prompt_set, read.result.answers[0].output_tokens) == ("chät", 3)
    assert list(read.result.answers[0].histogram) == [1, 2]
    assert read_results(tmp_path / "nothing.jsonl") == []


def test_wandb_gets_a_row_for_each_side_of_each_cell(measured: tuple[Path, dict], tmp_path: Path) -> None:
    results = read_results(measured[0] / RESULTS)
    write_report(results, FACTS, tmp_path)
    logger = WandbLogger(project="test", offline=True, save_dir=str(tmp_path))
    log_to_wandb(logger, results, FACTS, tmp_path)
    files = Path(logger.experiment.dir) / "media"
    close([logger], "success")
    [table] = files.glob("table/bench*.json")
    rows = json.loads(table.read_text())["data"]
    assert {tuple(row[:3]) for row in rows} == {
        (name, n, side) for name in SETS for n in (1, 2) for side in ("plain", "head")
    }
    assert len(list(files.glob("images/*.png"))) == len(PICTURES)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"concurrency": []}, r"bench\.concurrency=\[\]"),
        ({"concurrency": [0]}, r"bench\.concurrency=\[0\]"),
        ({"repeats": 0}, r"bench\.repeats=0"),
        ({"warmup": -1}, r"bench\.warmup=-1 must be 0 or more"),
        ({"sampling": {"ignore_eos": True}}, "ignore_eos"),
    ],
)
def test_a_plan_that_measures_nothing_or_nonsense_is_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        bench_settings(**wrong)


@pytest.mark.parametrize("room", [None, 1])
def test_a_server_that_would_queue_requests_is_refused(tmp_path: Path, room: int | None) -> None:
    with pytest.raises(InputError, match=r"set launch\.max_running_requests=2"):
        require_room(launch_settings(tmp_path, max_running_requests=room), plan())


def test_a_plain_url_with_a_head_is_refused(tmp_path: Path) -> None:
    with serving(head_server()) as url, pytest.raises(InputError, match=r"bench\.plain_url=.* drafts already"):
        measure_running(plan(plain_url=url, head_url=url), tmp_path, {})


def test_a_url_where_nothing_answers_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"/server_info does not answer .*name the URL of a running SGLang"):
        measure_running(plan(head_url=f"http://127.0.0.1:{free_port()}"), tmp_path, {})


@pytest.fixture
def target(tiny_path: Path) -> TargetFiles:
    return read_target_files(path=str(tiny_path), revision=None, trust_remote_code=False)


def test_a_server_that_dies_midway_leaves_its_results_and_a_report(
    tmp_path: Path, target: TargetFiles, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = launch_settings(sglang_site(tmp_path), fault="8", check=False)  # of 1 + 3 + 4 + … answers
    with pytest.raises(InputError, match=r"the plain server has ended \(exit status 9\)"):
        run_benchmark(settings, target, plan(), tmp_path)
    first, second = read_results(tmp_path / RESULTS)
    assert (first.concurrency, len(first.result.complete), len(first.result.failed)) == (1, 3, 0)
    assert second.concurrency == 2 and second.result.failed
    assert "chat: plain target and head were not both measured" in capsys.readouterr().out
    assert "ServerDisconnectedError" in (tmp_path / "report.md").read_text()


def run_benchmark(settings: LaunchSettings, target: TargetFiles, planned: Plan, folder: Path) -> None:
    benchmark(settings, target, None, planned, provenance={}, folder=folder, dry_run=False, logger=None)


def test_results_of_another_benchmark_are_not_mixed_in(tmp_path: Path, target: TargetFiles) -> None:
    (tmp_path / RESULTS).touch()
    with pytest.raises(InputError, match=r"holds the results of another benchmark; name a new folder"):
        run_benchmark(launch_settings(tmp_path), target, plan(), tmp_path)


def test_a_server_that_refuses_every_request_ends_the_benchmark(tmp_path: Path) -> None:
    server = plain_server()
    server.last_event = {"error": {"message": "vocabulary"}}
    with serving(server) as url, pytest.raises(InputError, match=r"all 3 requests of a load failed \(vocabulary\)"):
        measure_running(plan(plain_url=url), tmp_path, {})
    assert len(read_results(tmp_path / RESULTS)) == 1


def test_the_report_holds_no_variable_of_the_environment(
    tmp_path: Path, target: TargetFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["serve.py", "action=bench", "launch.env={HF_TOKEN: secret}"])
    settings = launch_settings(tmp_path, env={"HF_TOKEN": "secret"})
    facts = known_before(target, plan(), bench_commands(settings, target, None), {})
    assert "action=bench" in str(facts) and "secret" not in str(facts)


def test_prompt_sets_are_rendered_by_the_targets_template(target: TargetFiles, tmp_path: Path) -> None:
    chat = Chat(target.tokenizer, template=None, template_kwargs={}, date="2026-01-01", stop_ids=target.stop_ids)
    (tmp_path / "a.jsonl").write_text('{"prompt": "Grüße?"}\n{"prompt": "' + "long " * 500 + '"}\n')
    found = prompt_sets(chat, {"a": str(tmp_path / "a.jsonl")}, split="train", limit=None, max_length=200)
    assert found == {"a": [chat.prompt_ids([{"role": "user", "content": "Grüße?"}])]}
    with pytest.raises(InputError, match=r"try bench\.prompts="):
        prompt_sets(chat, {}, split="train", limit=None, max_length=200)
