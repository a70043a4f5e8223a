"""The search finds a fast setting with few timings, survives what cannot be timed, and reports what it found."""

import json
import math
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from serving_fixtures import serve_run
from timed_machine import CHAINS, CHEAP, DEAR, PLAIN_SECONDS, SETTINGS, Machine, summary, tuned

from eagle3.errors import InputError
from eagle3.serving.tune.report import settings_table, write_tune_report
from eagle3.serving.tune.schedule import schedule_lines, schedules
from eagle3.serving.tune.search import Findings, thresholds

LOADS = [1, 8, 64]
BY_LOAD = (0.0105, 0.00036, 0.0004)  # at load 1: chains of 6, at 8: of 4; at 64 none pays


@pytest.mark.parametrize("cost", [CHEAP, DEAR], ids=["cheap", "dear"])
def test_four_timings_find_a_setting_within_a_tenth_of_the_fastest(cost):
    machine = Machine(cost)
    found = tuned(machine)
    assert machine.asked[0] is None and len(machine.asked) == 1 + 4 and len(SETTINGS) == 40
    assert machine.seconds(found.best(4)) <= 1.1 * min(map(machine.seconds, SETTINGS))


def test_each_number_of_steps_is_timed_before_a_second_setting_of_the_same():
    machine = Machine(CHEAP)
    found = tuned(machine, timed=9)
    timed = [setting.steps for setting in machine.asked if setting]
    assert sorted(timed[:7]) == [*range(1, 8)] and len(timed) == 9
    best = {setting.steps: setting for setting in reversed(found.ranked())}
    assert [best[setting.steps] for setting in machine.asked[1:8] if setting] == machine.asked[1:8]


def test_without_timings_no_server_starts_and_the_ranking_is_the_result(tmp_path):
    machine = Machine(CHEAP)
    found = tuned(machine, timed=0)
    assert machine.asked == [] and found.best(4) == found.ranked()[0]
    assert "predicted from tune.assumed, not timed" in report(found, tmp_path)


def test_a_setting_that_cannot_run_is_reported_and_the_others_are_timed(tmp_path):
    first = next(iter(tuned(Machine(CHEAP)).timed))
    kept: list[int] = [0]
    found = tuned(Machine(CHEAP, broken=(first,)), kept=kept)
    assert first not in found.timed and len(found.timed) == 3 and kept == [0, 0, 0, 1, 2, 3]
    assert found.failed == {first: "server 1 has ended: out of memory"}
    assert "did not run" in report(found, tmp_path)
    with pytest.raises(InputError, match=r"none of the settings could be timed, .* out of memory"):
        tuned(Machine(CHEAP, broken=SETTINGS))
    with pytest.raises(InputError, match="out of memory"):
        tuned(Machine(CHEAP, broken=(None,)))


# --- the report ------------------------------------------------------------------------------------------------------


def report(found: Findings, folder: Path) -> str:
    return write_tune_report(found, folder, {"commit": "abc"}, target="TARGET", head="HEAD")


def test_the_report_names_the_fastest_timed_setting_and_how_to_serve_with_it(tmp_path):
    found = tuned(Machine(CHEAP))
    best, said = found.best(4), report(found, tmp_path)
    assert f"{PLAIN_SECONDS / found.timed[best][4].seconds_per_token:.2f} times the speed" in said
    assert f"--speculative-num-steps {best.steps} --speculative-eagle-topk {best.topk} " in said
    assert f"target.path=TARGET head=HEAD steps={best.steps} topk={best.topk} draft_tokens={best.draft_tokens}" in said
    assert (tmp_path / "tune.md").read_text() == said + "\n"
    read = json.loads((tmp_path / "tune.json").read_text())
    assert (read["commit"], len(read["settings"])) == ("abc", 40)
    assert read["best"]["4"] == {**best._asdict(), "speed_up": found.speed_up(best, 4)}
    [row] = [row for row in read["settings"] if (row["steps"], row["topk"], row["draft_tokens"]) == best]
    assert row["timed"]["4"]["tpot"]["median"] == found.timed[best][4].seconds_per_token


def test_the_commands_to_serve_with_have_the_window_that_was_searched_with(tmp_path):
    said = report(tuned(Machine(CHEAP), draft_window=512), tmp_path)
    assert "--speculative-draft-window-size 512" in said and said.endswith(" draft_window=512")
    by_load = tuned(Machine(BY_LOAD, loads=tuple(LOADS)), loads=LOADS, timed=20, draft_window=512)
    assert " draft_window=512 launch.max_running_requests=22" in report(by_load, tmp_path / "loads")


def test_the_table_has_the_plain_target_the_timed_settings_and_the_best_predicted_marked_as_such():
    found = tuned(Machine(CHEAP))
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in settings_table(found).splitlines()]
    assert rows[2][0] == "plain target" and "10.00 ms" in rows[2]
    assert len(rows) == 2 + 1 + 12
    predicted = [row for row in rows[3:] if row[5].startswith("~")]
    assert len(predicted) == 8 and all(row[4] == "" for row in predicted)


def test_lost_requests_are_reported(tmp_path):
    found = tuned(Machine(CHEAP))
    found.plain[4] = replace(found.plain[4], failed=3)
    assert "3 of 8 requests to the plain target at concurrency 4 failed" in report(found, tmp_path)


# --- the chain of each load, and two pools ---------------------------------------------------------------------------


def test_where_the_plain_target_is_faster_at_high_loads_the_advice_is_two_pools(tmp_path):
    machine = Machine(BY_LOAD, loads=tuple(LOADS))
    found = tuned(machine, loads=LOADS, timed=20)
    assert sorted(machine.asked[1:]) == CHAINS  # type: ignore[type-var]
    assert found.steps() == {1: 6, 8: 4, 64: 0} and found.plain_from() == 23  # halfway by ratio
    chain = max(CHAINS, key=lambda chain: 1 / (machine.seconds(chain, 1) * machine.seconds(chain, 8)))
    mean = PLAIN_SECONDS / math.sqrt(machine.seconds(chain, 1) * machine.seconds(chain, 8))
    said = report(found, tmp_path)
    assert "fastest: 1 at a time: 6 steps, 8 at a time: 4 steps, 64 at a time: no steps" in said
    assert "two pools of servers, with the head below 23 running requests, without it from there on:" in said
    assert f"the {chain} has the highest mean speed-up (geometric) at 1, 8 at a time: {mean:.2f}" in said
    assert "times the plain target's speed" not in said
    with_head, without = (shlex.split(line)[2:] for line in said.splitlines() if "action=launch" in line)
    run = serve_run("launch", *with_head[1:])
    assert (run.head, run.shape, run.launch.max_running_requests) == ("HEAD", chain, 22)
    assert without == ["action=launch", "target.path=TARGET"]
    read = json.loads((tmp_path / "tune.json").read_text())
    assert (read["steps"], read["plain_from"]) == ({"1": 6, "8": 4, "64": 0}, 23)


def test_where_a_chain_pays_at_the_highest_load_the_advice_is_one_pool(tmp_path):
    found = tuned(Machine(CHEAP, loads=(1, 8)), loads=[1, 8], timed=20)
    said = report(found, tmp_path)
    assert found.plain_from() is None and "one pool of servers, with the head:" in said
    [command] = [line for line in said.splitlines() if "action=launch" in line]
    assert f"steps={found.best(1, 8).steps} " in command and "max_running_requests" not in command


def test_a_load_between_two_that_pay_is_named_and_does_not_end_the_pool_with_the_head(tmp_path):
    found = tuned(Machine(BY_LOAD, loads=(1, 2, 8, 64)), loads=[1, 2, 8, 64], timed=20)
    found.plain[2] = summary(0.001, 2, None)
    said = report(found, tmp_path)
    assert found.steps()[2] == 0 and found.plain_from() == 23
    slower = found.speed_up(found.best(1, 2, 8), 2)
    assert f"at 2 at a time it has only {slower:.2f} times the plain target's speed" in said
    assert said.count("at a time it has only") == 1


def test_the_steps_of_each_load_are_told_to_three_servers(tmp_path):
    said = report(tuned(Machine(BY_LOAD, loads=tuple(LOADS)), loads=LOADS, timed=20), tmp_path)
    told = json.loads((tmp_path / "tune.json").read_text())["schedules"]
    assert told["SGLang"] == {str(load): {"candidate_steps": [steps]} for load, steps in {1: 6, 3: 4, 23: 0}.items()}
    assert told["vLLM"] == {
        "method": "eagle3", "model": "HEAD", "num_speculative_tokens": 6,
        "num_speculative_tokens_per_batch_size": [[1, 2, 6], [3, 22, 4], [23, 64, 0]],
    }  # fmt: skip
    [vllm] = [line.partition(": ")[2] for line in said.splitlines() if line.startswith("  vLLM: ")]
    flag, value = shlex.split(vllm)
    assert (flag, json.loads(value)) == ("--speculative-config", told["vLLM"])
    [tensorrt_llm] = [line.partition(": ")[2] for line in said.splitlines() if line.startswith("  TensorRT-LLM, ")]
    assert yaml.safe_load(tensorrt_llm)["speculative_config"] == {
        "decoding_type": "Eagle3", "speculative_model": "HEAD", "max_draft_len": 6,
        "draft_len_schedule": {2: 6, 22: 4, 64: 0},
    }  # fmt: skip
    [sglang] = [line.partition(": ")[2] for line in said.splitlines() if line.startswith("  SGLang, file for ")]
    assert json.loads(sglang) == told["SGLang"]


def test_what_tensorrt_llm_cannot_be_told_is_said():
    told = schedules({1: 3, 3: 6}, 64, "HEAD")
    assert told["TensorRT-LLM"] is None and told["vLLM"] is not None
    *_, last = schedule_lines(told)
    assert last == "TensorRT-LLM: cannot be told, its draft_len_schedule must begin with the longest chain"


def test_a_chain_begins_halfway_between_the_loads_that_differ():
    assert thresholds({1: 6, 2: 6, 4: 6, 8: 4, 32: 4, 64: 0}) == {1: 6, 6: 4, 46: 0}
    assert thresholds({1: 5, 2: 3}) == {1: 5, 2: 3} and thresholds({4: 2, 8: 2}) == {4: 2}


def test_where_nothing_pays_the_advice_is_the_plain_target(tmp_path):
    slow = (0.05, 0.01, 0.01)
    assert "no setting beats the plain target at concurrency 4" in report(tuned(Machine(slow)), tmp_path)
    by_load = tuned(Machine(slow, loads=tuple(LOADS)), loads=LOADS)
    assert "no chain beats the plain target" in report(by_load, tmp_path)
    assert "schedules" not in json.loads((tmp_path / "tune.json").read_text())
