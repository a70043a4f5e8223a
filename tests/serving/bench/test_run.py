"""action=bench: from servers to the report, which is written of whatever was measured."""

import os
import re
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fitted_head import PROMPT
from scripts import call_script
from serving_fixtures import bench_settings, launch_settings, sglang_site
from small_servers import alone, plan
from stores import ASSETS

from eagle3.engine.command import Draft
from eagle3.engine.endpoint import is_reachable
from eagle3.errors import InputError, Interrupted
from eagle3.provenance import result_facts
from eagle3.serving.bench import loads
from eagle3.serving.bench.loads import RESULTS, BenchPlan, MeasuredLoad, read_results
from eagle3.serving.bench.run import bench, bench_commands, find_notes, gather_facts, prompt_sets
from eagle3.serving.server.load import LoadResult
from eagle3.settings.engine import LaunchSettings
from eagle3.settings.serving import PromptFile
from eagle3.storage.files import read_json, sha256_file
from eagle3.target.files import TargetFiles

TINY = ASSETS / "tiny"
PROMPTS = ASSETS / "prompts" / "heldout.jsonl"
CHAIN: dict[str, Any] = {"steps": 3, "topk": 1, "draft_tokens": None}


def test_bench_starts_the_servers_one_after_the_other_and_compares_them(tmp_path, target_files, capsys):
    sampling = {"temperature": 0.0, "max_new_tokens": 16}
    settings = bench_settings(concurrency=[2], requests_per_place=2, starts=2, repeats=1)
    plan = BenchPlan(settings, {"chat": [alone(PROMPT), alone(PROMPT[:9])]}, "all", sampling)
    bench(
        launch_settings(sglang_site(tmp_path), fault="scripted", check=False),
        target_files,
        Draft(head="head", **CHAIN),
        plan,
        origin={"commit": "abc"},
        folder=tmp_path,
        dry_run=False,
    )
    results = read_json(tmp_path / "results.json", made_by="this test")
    assert results["commit"] == "abc"
    [cell] = results["cells"]
    assert [cell["sides"][side]["accept_length"] for side in ("plain", "head")] == [None, 3.0]
    assert cell["sides"]["plain"]["requests"] == cell["sides"]["head"]["requests"] == 8
    assert [*cell["speed_ups"]] == ["head"]
    assert "--speculative-num-draft-tokens 4" in results["servers"]["head"]
    assert "--speculative" not in results["servers"]["plain"]
    measured = [(0, "plain"), (0, "head"), (1, "head"), (1, "plain")]
    assert [(load.start, load.side) for load in read_results(tmp_path / RESULTS)] == measured
    logs = {f"server_{name}.log" for name in ("plain", "head", "plain_2", "head_2")}
    assert logs <= {*os.listdir(tmp_path)}
    with pytest.raises(InputError, match=r"bench\.starts=2: servers that run .* leave out bench\.head_url"):
        replace(settings, head_url="http://127.0.0.1:1")
    assert results["server_info"]["head"]["version"] == "0.5.17"
    assert re.match(r"chat: speculation (pays|stops paying) at", capsys.readouterr().out)


def test_a_bench_that_is_stopped_midway_reports_what_it_measured(tmp_path, target_files, capsys, monkeypatch):
    monkeypatch.setattr(loads, "_require_answers", lambda server, result: signal.raise_signal(signal.SIGINT))
    settings = launch_settings(sglang_site(tmp_path), fault="scripted", check=False)
    with pytest.raises(Interrupted, match=f"what was measured before is in {tmp_path}"):
        run_bench(settings, target_files, plan(), tmp_path)
    assert "chat: plain target and head were not both measured" in capsys.readouterr().out
    assert "| 1 | plain |" in (tmp_path / "report.md").read_text()
    assert not is_reachable(f"http://127.0.0.1:{settings.port}")


def test_dry_run_looks_at_the_head_prints_the_commands_and_starts_nothing(tmp_path, exported, target_files, capsys):
    settings, draft = launch_settings(tmp_path, env={"A": "b"}), Draft(head=str(exported), **CHAIN)
    rest: dict[str, Any] = {"origin": {}, "folder": tmp_path / "out"}
    bench(settings, target_files, draft, BenchPlan(bench_settings(), {}, "all", {}), dry_run=True, **rest)
    plain, drafting = capsys.readouterr().out.splitlines()
    assert plain.startswith("A=b ") and "--speculative" not in plain
    assert f"--speculative-draft-model-path {exported}" in drafting
    assert not (tmp_path / "out").exists()
    (exported / "config.json").unlink()
    with pytest.raises(InputError, match=r"config\.json does not exist; make it with: python serve\.py action=export"):
        bench(settings, target_files, draft, BenchPlan(bench_settings(), {}, "all", {}), dry_run=True, **rest)
    urls = bench_settings(plain_url="http://127.0.0.1:1", head_url="http://127.0.0.1:2")
    bench(settings, target_files, draft, BenchPlan(urls, {}, "all", {}), dry_run=True, **rest)  # which nobody starts


def test_requests_end_where_the_answers_of_training_end_and_the_result_names_the_head(tmp_path, exported, monkeypatch):
    """Also with a token that the target does not name itself: a server knows only generation_config.json."""
    asked: list[tuple[BenchPlan, Any]] = []
    monkeypatch.setattr("eagle3.commands.serve.bench", lambda *given, **more: asked.append((given[3], more)))
    given = (f"target.path={TINY}", f"head={exported}", f"prompts.path={PROMPTS}", "chat.stop_tokens=['<|im_start|>']")
    call_script("serve", "action=bench", *given, "limit=2", output_dir=tmp_path / "out")
    [(planned, more)] = asked
    assert planned.sampling["stop_token_ids"] == [1, 2]
    weights = {"model.safetensors": sha256_file(exported / "model.safetensors")}
    assert more["origin"]["heads"] == {"head": {"path": str(exported), "sha256": weights}}


def ended(load: MeasuredLoad, reason: str) -> MeasuredLoad:
    answers = [replace(answer, finish_reason=reason) for answer in load.result.answers]
    return replace(load, result=replace(load.result, answers=answers))


def test_what_makes_numbers_less_comparable_is_noted(measured):
    results = read_results(measured[0] / RESULTS)
    found = find_notes(results, {"server_info": measured[1]}, plan())
    assert set(found) == {"chat", "code", "head server", "head server's scheduler", "short answers"}
    answers = sum(len(load.result.answers) for load in results)
    assert found["short answers"].startswith(f"{answers} of {answers} were cut at max_new_tokens=")
    half = [ended(load, "stop" if load.prompt_set == "chat" else "length") for load in results]
    assert "short answers" not in find_notes(half, {"server_info": {}}, plan())
    unflushed = MeasuredLoad("head", "chat", 1, 0, 0, LoadResult([], 1.0, 1.0, 0.0, cache_flushed=False))
    assert "prefix cache" in find_notes([*results, unflushed], {"server_info": {}}, plan())


def test_a_server_that_dies_midway_leaves_its_results_and_a_report(tmp_path, target_files, capsys):
    settings = launch_settings(sglang_site(tmp_path), fault="scripted 8", check=False)  # of 1 + 3 + 4 + … answers
    with pytest.raises(InputError, match=r"the plain server has ended \(exit status 9\)"):
        run_bench(settings, target_files, plan(), tmp_path)
    first, second = read_results(tmp_path / RESULTS)
    assert (first.concurrency, len(first.result.complete), len(first.result.failed)) == (1, 3, 0)
    assert second.concurrency == 2 and second.result.failed
    assert "chat: plain target and head were not both measured" in capsys.readouterr().out
    assert "ServerDisconnectedError" in (tmp_path / "report.md").read_text()


def run_bench(settings: LaunchSettings, target_files: TargetFiles, planned: BenchPlan, folder: Path) -> None:
    bench(settings, target_files, Draft(head="head", **CHAIN), planned, origin={}, folder=folder, dry_run=False)


def test_a_bench_that_cannot_work_is_refused_before_a_server_starts(tmp_path, target_files):
    settings = launch_settings(tmp_path, max_running_requests=1)
    with pytest.raises(InputError, match=r"=1 does not hold the highest of bench\.concurrency=2: requests would wait"):
        run_bench(settings, target_files, plan(), tmp_path)
    (tmp_path / RESULTS).touch()
    with pytest.raises(InputError, match=r"holds the results of another bench run; name a new folder"):
        run_bench(settings, target_files, plan(), tmp_path)


def test_the_report_holds_no_variable_of_the_environment(tmp_path, target_files, monkeypatch):
    monkeypatch.setattr("sys.argv", ["serve.py", "action=bench", "launch.env={HF_TOKEN: secret}"])
    settings = launch_settings(tmp_path, env={"HF_TOKEN": "secret"})
    facts = gather_facts(target_files, plan(), bench_commands(settings, target_files, None), result_facts())
    assert "action=bench" in str(facts) and "secret" not in str(facts)


def test_prompt_sets_are_rendered_by_the_targets_template(chat, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"prompt": "Grüße?"}\n{"prompt": "' + "long " * 500 + '"}\n')
    settings = PromptFile(path=None, config=None, split="train", fields={}, turns="all")
    found = prompt_sets(chat, {"a": str(tmp_path / "a.jsonl")}, settings, limit=None, max_length=200)
    assert {name: [turn.ids for turn in each.first] for name, each in found.items()} == {
        "a": [chat.prompt_ids([{"role": "user", "content": "Grüße?"}])]
    }
    with pytest.raises(InputError, match=r"try bench\.prompts="):
        prompt_sets(chat, {}, settings, limit=None, max_length=200)
