"""What a search found: the table, the flags to use, tune.json and the picture."""

import json
from dataclasses import replace
from pathlib import Path

from timed_machine import CHEAP, DEAR, PLAIN_SECONDS, SETTINGS, Machine, tuned

from eagle3.serving.tune.predict import VerificationCost
from eagle3.serving.tune.report import advice, failures, settings_table, write_tune_report


def test_the_advice_names_the_flags_of_the_fastest_timed_setting() -> None:
    found = tuned(Machine(CHEAP))
    best = min(found.timed, key=lambda setting: found.timed[setting].seconds_per_token)
    said = advice(found, target="TARGET", head="HEAD", concurrency=4)
    assert f"{PLAIN_SECONDS / found.timed[best].seconds_per_token:.2f} times the speed" in said
    assert f"--speculative-num-steps {best.steps} --speculative-eagle-topk {best.topk} " in said
    assert f"target.path=TARGET head=HEAD steps={best.steps} topk={best.topk} draft_tokens={best.draft_tokens}" in said


def test_a_setting_that_is_predicted_to_be_better_than_all_timed_ones_is_named() -> None:
    machine = Machine(VerificationCost(fixed=0.012, draft_token=0.0008, step=0.0006))
    said = advice(tuned(machine, timed=1), target="TARGET", head="HEAD", concurrency=4)
    better = [*tuned(machine, timed=2).timed][1]
    assert said.splitlines()[-1].startswith(f"{better.flags} was not timed; 1.50 is predicted: raise tune.timed")
    all_timed = tuned(Machine(CHEAP), timed=len(SETTINGS))
    assert "raise tune.timed" not in advice(all_timed, target="TARGET", head="HEAD", concurrency=4)


def test_when_no_setting_beats_the_plain_target_the_advice_says_so() -> None:
    said = advice(tuned(Machine(DEAR)), target="TARGET", head="HEAD", concurrency=4)
    assert said.startswith("no setting beats the plain target at concurrency 4")


def test_the_table_shows_the_plain_target_all_timed_and_the_best_predicted_settings() -> None:
    machine = Machine(CHEAP)
    found = tuned(machine)
    lines = settings_table(found, rows=6).splitlines()
    assert lines[2].split() == ["plain", "target", "10.000", "100", "1.00"]
    rows = [tuple(map(int, line.split()[:3])) for line in lines if line.split()[0].isdigit()]
    assert len(rows) == 6 and set(found.timed) <= set(rows)
    assert len(settings_table(found, rows=1).splitlines()) == 3 + len(found.timed)


def test_without_timings_the_report_says_that_it_only_predicts() -> None:
    found = tuned(Machine(CHEAP), timed=0)
    assert "time per token [1: plain]" in settings_table(found, rows=3)
    assert "predicted from tune.assumed, not timed" in advice(found, target="TARGET", head="HEAD", concurrency=4)


def test_a_setting_that_did_not_run_is_shown_as_such() -> None:
    first = next(iter(tuned(Machine(CHEAP)).timed))
    assert "did not run" in settings_table(tuned(Machine(CHEAP, broken=(first,))), rows=1)


def test_requests_that_failed_are_shown() -> None:
    found = tuned(Machine(CHEAP))
    assert failures(found) == ""
    setting = next(iter(found.timed))
    found.timed[setting] = replace(found.timed[setting], failed=3)
    assert failures(found) == f"3 of 8 requests to {setting.flags} failed\n"


def test_the_report_is_kept_after_each_timing_and_holds_every_setting(tmp_path: Path) -> None:
    kept: list[int] = [-1]
    found = tuned(Machine(CHEAP), kept=kept)
    assert kept == [-1, 0, *range(len(found.timed) + 1)]  # the second one once the plain target is timed
    write_tune_report(found, tmp_path, {"conditions": {"concurrency": 4}})
    report = json.loads((tmp_path / "tune.json").read_text())
    assert report["conditions"] == {"concurrency": 4}
    assert len(report["settings"]) == len(SETTINGS)
    assert sum(row["timed"] is not None for row in report["settings"]) == len(found.timed)
    assert report["best"]["flags"] == found.best()[0].flags
    assert (tmp_path / "tune.png").stat().st_size > 10_000
