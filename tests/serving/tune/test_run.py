"""The search finds the fastest setting with few timings, survives what cannot be timed, and says what to serve with."""

import json
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
from exported_head import tiny_target
from fitted_head import LAYERS, PROMPT, fitted_head
from hydra import compose, initialize_config_dir
from serving_fixtures import launch_settings, sglang_site
from stores import ASSETS, ROOT

import eagle3.serving.tune.run
from eagle3 import cli
from eagle3.decoding.speculate import measure
from eagle3.errors import InputError, Interrupted
from eagle3.serving.check.settings import Answering
from eagle3.serving.head.format import save_head
from eagle3.serving.server.client import Answer
from eagle3.serving.server.load import LoadResult
from eagle3.serving.tune.evidence import TuneSettings
from eagle3.serving.tune.predict import FittedCost, Gain, RoundCost, Setting, all_settings
from eagle3.serving.tune.report import advice, failures, table, write_report
from eagle3.serving.tune.run import tune
from eagle3.serving.tune.search import Search, search
from eagle3.serving.tune.timing import ServerTimer, Timed, timed
from eagle3.target.files import TargetFiles, read_target_files
from serve import tune_head

SETTINGS = all_settings(steps=[*range(1, 8)], topk=[1, 2, 4], draft_tokens=[4, 8, 16, 32, 64], draft_vocab_size=64)
PLAIN_SECONDS = 0.010
CHEAP_ROUNDS = RoundCost(fixed=0.012, draft_token=0.0001, step=0.0006)
DEAR_ROUNDS = RoundCost(fixed=0.03, draft_token=0.001, step=0.006)


def gain(setting: Setting) -> Gain:
    """A head whose drafts are right, one after the other, 7 times in 10, and more often with more of them."""
    right = 0.7 + 0.02 * (setting.topk - 1) * min(setting.draft_tokens / 16, 2)
    length = sum(right**depth for depth in range(setting.steps + 1))
    return Gain(length, 0.98 * length)


class Machine:
    """Times settings by a cost of rounds that the search does not know, and remembers which."""

    def __init__(self, cost: RoundCost, *, broken: tuple[Setting, ...] = ()) -> None:
        self.cost, self.broken = cost, broken
        self.asked: list[Setting | None] = []

    def seconds(self, setting: Setting) -> float:
        return self.cost.seconds(setting) / gain(setting).tokens

    def __call__(self, setting: Setting | None) -> Timed:
        self.asked.append(setting)
        if setting in self.broken:
            raise InputError("server 1 has ended: out of memory")
        seconds = self.seconds(setting) if setting else PLAIN_SECONDS
        per_depth = [0.7**depth for depth in range(1, setting.steps + 1)] if setting else []  # of a chain
        return Timed(
            seconds, 1 / seconds, gain(setting) if setting else None, per_depth, same_answers=None, requests=8, failed=0
        )


def settings(**changes: Any) -> TuneSettings:
    given = {
        "concurrency": 4, "steps": [1, 2, 7], "topk": [1], "draft_tokens": [], "evidence": "decoder",
        "batch_size": 1, "timed": 4, "warmup": 0, "timeout_s": 9.0, "requests_per_place": 1,
        "assumed": {"compute_bound_tokens": 200, "step": 0.1}, "rows": 6,
    }  # fmt: skip
    return TuneSettings(**given | changes)


def tuned(machine: Machine, *, gains: Any = "all", kept: list[int] | None = None, **changes: Any) -> Search:
    gains = {setting: gain(setting) for setting in SETTINGS} if gains == "all" else gains
    return search(settings(**changes), gains, machine, lambda found: (kept or []).append(len(found.timed)))


@pytest.mark.parametrize("cost", [CHEAP_ROUNDS, DEAR_ROUNDS], ids=["cheap rounds", "dear rounds"])
def test_the_fastest_of_all_settings_is_found_with_the_plain_target_and_four_timings(cost: RoundCost) -> None:
    machine = Machine(cost)
    found = tuned(machine)
    fastest = min(machine.seconds(setting) for setting in SETTINGS)
    assert machine.asked[0] is None and len(machine.asked) <= 1 + 4
    assert len(SETTINGS) == 40 and found.best()[1] <= 1.03 * fastest


def test_over_many_machines_what_is_found_is_near_the_fastest_and_doubt_has_a_part_in_it(monkeypatch) -> None:
    def average_loss() -> float:
        draw, losses = random.Random(0), []
        for _ in range(60):
            parts = (draw.uniform(0.9, 3), 10 ** draw.uniform(-2.7, -1), 10 ** draw.uniform(-1.7, 0))
            machine = Machine(RoundCost(*(PLAIN_SECONDS * part for part in parts)))
            fastest = min(machine.seconds(setting) for setting in SETTINGS)
            losses.append(tuned(machine).best()[1] / fastest - 1)
        return sum(losses) / len(losses)

    loss = average_loss()
    assert loss < 0.02
    monkeypatch.setattr(FittedCost, "doubt", lambda cost, setting: 0.0)
    assert loss < average_loss()


def test_a_timing_changes_what_is_timed_next() -> None:
    first, second = (tuned(Machine(cost)).timed for cost in (CHEAP_ROUNDS, DEAR_ROUNDS))
    assert next(iter(first)) == next(iter(second)) and [*first][1:] != [*second][1:]


def test_no_setting_is_timed_twice_even_when_more_are_asked_for_than_there_are() -> None:
    machine = Machine(CHEAP_ROUNDS)
    found = tuned(machine, timed=50)
    assert sorted(machine.asked[1:]) == sorted(found.timed) == SETTINGS  # type: ignore[type-var]


def test_without_timings_no_server_is_asked_and_times_are_in_units_of_the_plain_target() -> None:
    machine = Machine(CHEAP_ROUNDS)
    found = tuned(machine, timed=0)
    assert machine.asked == [] and found.plain is None
    setting, seconds = found.best()
    assert found.speed_up(seconds) == pytest.approx(gain(setting).tokens / found.assumed.seconds(setting))
    assert "time per token [1: plain]" in table(found, rows=3)
    assert "predicted from tune.assumed, not timed" in advice(found, target="TARGET", head="HEAD", concurrency=4)


def test_what_a_server_counts_with_the_longest_chain_predicts_the_others() -> None:
    machine = Machine(CHEAP_ROUNDS)
    found = tuned(machine, gains=None, timed=2)
    assert machine.asked[:2] == [None, Setting(7, 1, 8)]
    assert [*found.gains] == [(1, 1, 2), (2, 1, 3), (7, 1, 8)]
    for chain, predicted in found.gains.items():
        assert predicted.accept_length == pytest.approx(gain(chain).accept_length, rel=0.02)


def test_a_setting_that_cannot_run_is_noted_and_the_others_are_timed() -> None:
    first = next(iter(tuned(Machine(CHEAP_ROUNDS)).timed))
    machine = Machine(CHEAP_ROUNDS, broken=(first,))
    found = tuned(machine)
    assert first not in found.timed and found.timed
    assert "did not run" in table(found, rows=1)
    assert found.failed == {first: "server 1 has ended: out of memory"}
    with pytest.raises(InputError, match=r"none of the settings could be timed, .* out of memory"):
        tuned(Machine(CHEAP_ROUNDS, broken=tuple(SETTINGS)))


def test_a_plain_target_that_cannot_run_ends_the_search() -> None:
    with pytest.raises(InputError, match="out of memory"):
        tuned(Machine(CHEAP_ROUNDS, broken=(None,)))  # type: ignore[arg-type]


def test_the_advice_names_the_flags_of_the_fastest_timed_setting() -> None:
    found = tuned(Machine(CHEAP_ROUNDS))
    best = min(found.timed, key=lambda setting: found.timed[setting].seconds_per_token)
    said = advice(found, target="TARGET", head="HEAD", concurrency=4)
    assert f"{PLAIN_SECONDS / found.timed[best].seconds_per_token:.2f} times the speed" in said
    assert f"--speculative-num-steps {best.steps} --speculative-eagle-topk {best.topk} " in said
    assert f"target.path=TARGET head=HEAD steps={best.steps} topk={best.topk} draft_tokens={best.draft_tokens}" in said


def test_a_setting_that_is_predicted_to_be_better_than_all_timed_ones_is_named() -> None:
    machine = Machine(RoundCost(fixed=0.012, draft_token=0.0008, step=0.0006))
    said = advice(tuned(machine, timed=1), target="TARGET", head="HEAD", concurrency=4)
    better = [*tuned(machine, timed=2).timed][1]
    assert said.splitlines()[-1].startswith(f"{better.flags} was not timed; 1.50 is predicted: raise tune.timed")
    all_timed = tuned(Machine(CHEAP_ROUNDS), timed=len(SETTINGS))
    assert "raise tune.timed" not in advice(all_timed, target="TARGET", head="HEAD", concurrency=4)


def test_when_no_setting_beats_the_plain_target_the_advice_says_so() -> None:
    said = advice(tuned(Machine(DEAR_ROUNDS)), target="TARGET", head="HEAD", concurrency=4)
    assert said.startswith("no setting beats the plain target at concurrency 4")


def test_the_table_shows_the_plain_target_all_timed_and_the_best_predicted_settings() -> None:
    machine = Machine(CHEAP_ROUNDS)
    found = tuned(machine)
    lines = table(found, rows=6).splitlines()
    assert lines[2].split() == ["plain", "target", "10.000", "100", "1.00"]
    rows = [tuple(map(int, line.split()[:3])) for line in lines if line.split()[0].isdigit()]
    assert len(rows) == 6 and set(found.timed) <= set(rows)
    assert len(table(found, rows=1).splitlines()) == 3 + len(found.timed)


def test_requests_that_failed_are_shown() -> None:
    found = tuned(Machine(CHEAP_ROUNDS))
    assert failures(found) == ""
    setting = next(iter(found.timed))
    found.timed[setting] = replace(found.timed[setting], failed=3)
    assert failures(found) == f"3 of 8 requests to {setting.flags} failed\n"


def test_the_report_is_kept_after_each_timing_and_holds_every_setting(tmp_path: Path) -> None:
    kept: list[int] = [-1]
    found = tuned(Machine(CHEAP_ROUNDS), kept=kept)
    assert kept == [-1, 0, *range(len(found.timed) + 1)]  # the second one once the plain target is timed
    write_report(found, tmp_path, {"conditions": {"concurrency": 4}})
    report = json.loads((tmp_path / "tune.json").read_text())
    assert report["conditions"] == {"concurrency": 4}
    assert len(report["settings"]) == len(SETTINGS)
    assert sum(row["timed"] is not None for row in report["settings"]) == len(found.timed)
    assert report["best"]["flags"] == found.best()[0].flags
    assert (tmp_path / "tune.png").stat().st_size > 10_000


# --- a load's numbers ------------------------------------------------------------------------------------------------


def test_a_timing_is_the_median_over_answers_and_the_servers_own_counts() -> None:
    answers = [
        Answer(ttft_s=1.0, latency_s=3.0, output_tokens=5, verify_ct=3, correct_drafts=2, histogram=(1, 2)),  # 0.5 s
        Answer(ttft_s=0.5, latency_s=1.0, output_tokens=6, verify_ct=2, correct_drafts=3, histogram=(0, 1, 1)),  # 0.1 s
        Answer(ttft_s=0.5, latency_s=0.9, output_tokens=3, verify_ct=1, correct_drafts=2, histogram=(0, 0, 1)),  # 0.2 s
        Answer(ttft_s=0.5, latency_s=0.5, output_tokens=1),
        Answer(error="HTTP 500"),
    ]
    found = timed(LoadResult(answers, seconds=5.0, cache_flushed=True))
    assert found.seconds_per_token == pytest.approx(0.2)
    assert found.tokens_per_second == 3.0
    assert found.gain == Gain(accept_length=1 + 7 / 6, tokens=11 / 6)
    assert found.per_depth == [5 / 6, 2 / 6]
    assert (found.requests, found.failed) == (5, 1)
    assert found.round_seconds == pytest.approx(0.2 * 11 / 6)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (Answer(error="HTTP 500"), "none of 1 answers can be timed: HTTP 500"),
        (Answer(ttft_s=0.5, latency_s=0.5, output_tokens=1), "all answers are one token long"),
    ],
)
def test_a_load_without_a_time_is_refused_with_the_reason(answer: Answer, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        timed(LoadResult([answer], seconds=1.0, cache_flushed=True))


# --- real servers ----------------------------------------------------------------------------------------------------


def server_timer(tmp_path: Path, *, fault: str = "", **launch: Any) -> ServerTimer:
    return ServerTimer(
        launch=launch_settings(sglang_site(tmp_path), fault=fault, **launch),
        target=str(ASSETS / "tiny"),
        revision=None,
        head=str(tmp_path / "head"),
        prompts=[PROMPT, PROMPT[3:]],
        concurrency=2,
        requests_per_place=2,
        sampling={"max_new_tokens": 12, "temperature": 0.0},
        warmup=1,
        timeout_s=60,
        log_dir=tmp_path / "logs",
    )


def test_servers_are_started_loaded_counted_and_stopped(tmp_path: Path) -> None:
    target, timer = tiny_target(), server_timer(tmp_path)
    head = fitted_head(target, PROMPT)
    save_head(tmp_path / "head", head, LAYERS, "float32")
    found = search(settings(steps=[1, 3], timed=1, concurrency=2), None, timer, lambda found: None)
    ours = measure(
        target, head, LAYERS, timer.prompts, steps=3, topk=1, draft_tokens=None, max_new_tokens=12, temperature=0.0,
        seed=0, progress=None,
    )  # fmt: skip
    assert found.plain is not None and found.plain.requests == 4 and found.plain.gain is None
    assert [*found.timed] == [Setting(3, 1, 4)] and [*found.gains] == [Setting(1, 1, 2), Setting(3, 1, 4)]
    assert ours.accept_length > 1
    assert [found.plain.same_answers, found.timed[Setting(3, 1, 4)].same_answers] == [1.0, 1.0]
    assert found.gains[Setting(3, 1, 4)].accept_length == pytest.approx(ours.accept_length)
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == ["3-1-4.log", "plain.log"]


@pytest.mark.parametrize(
    ("fault", "message"),
    [("start", "server plain has ended .* Not enough memory"), ("4", "server plain has ended .*exit status 9")],
    ids=["at its start", "midway"],
)
def test_a_server_that_dies_is_an_error_with_the_reason(tmp_path: Path, fault: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        server_timer(tmp_path, fault=fault)(None)


def test_a_server_that_would_queue_the_requests_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"launch\.max_running_requests=1 is less than tune\.concurrency=2"):
        server_timer(tmp_path, max_running_requests=1).require_room()
    server_timer(tmp_path, max_running_requests=2).require_room()


# --- the command -----------------------------------------------------------------------------------------------------


def serve(*overrides: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "serve.py"), "action=tune", "hydra.run.dir=out", *overrides]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True)


def test_the_command_without_timings_replays_every_setting_on_the_users_prompts(
    tiny_path: Path, tmp_path: Path
) -> None:
    target = tiny_target()
    save_head(tmp_path / "head", fitted_head(target, PROMPT), LAYERS, "float32")
    (tmp_path / "chats.jsonl").write_text('{"prompt": "Hi"}\n{"prompt": "Grüße, 你好"}\n{"prompt": "left out"}\n')
    done = serve(
        f"target.path={tiny_path}", "head=head", "prompts.path=chats.jsonl", "max_new_tokens=8", "tune.timed=0",
        "limit=2", "tune.steps=[1,3]", "tune.topk=[1,2]", "tune.draft_tokens=[4]", "steps=2",
        cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "steps has no effect on action=tune, which chooses among tune.steps" in done.stderr
    report = json.loads((tmp_path / "out" / "tune.json").read_text())
    assert {(row["steps"], row["topk"], row["draft_tokens"]) for row in report["settings"]} == {
        (1, 1, 2), (3, 1, 4), (3, 2, 4),
    }  # fmt: skip
    assert (report["conditions"]["prompts"], report["plain"]) == (2, None)
    assert len([line for line in done.stdout.splitlines() if line.strip()[:1].isdigit()]) >= 3
    assert "Grüße" not in done.stdout + done.stderr + (tmp_path / "out" / "tune.json").read_text()


@pytest.mark.parametrize("stopped", ["decoder_gains", "the plain target"])
def test_stopped_midway_the_message_says_what_is_there(
    stopped: str, target_files: TargetFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*given: Any) -> NoReturn:
        raise KeyboardInterrupt

    known = {setting: gain(setting) for setting in SETTINGS}
    monkeypatch.setattr(eagle3.serving.tune.run, "prepare", lambda *given: None)
    monkeypatch.setattr(ServerTimer, "__call__", stop)
    monkeypatch.setattr(
        eagle3.serving.tune.run, "decoder_gains", stop if stopped == "decoder_gains" else lambda *_: known
    )
    there = stopped != "decoder_gains"
    words = r"what was found before is in .*tune\.json" if there else "nothing was found yet"
    with pytest.raises(Interrupted, match=words):
        tune_with(target_files, tmp_path)
    assert (tmp_path / "out" / "tune.json").exists() is there


def test_servers_without_room_are_refused_before_the_decoders_minutes(
    target_files: TargetFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eagle3.serving.tune.run, "decoder_gains", lambda *given: pytest.fail("came first"))
    with pytest.raises(InputError, match=r"launch\.max_running_requests=1 is less than tune\.concurrency=4"):
        tune_with(target_files, tmp_path, max_running_requests=1)


@pytest.fixture
def target_files() -> TargetFiles:
    return read_target_files(path=str(ASSETS / "tiny"), revision=None, trust_remote_code=False)


def tune_with(target_files: TargetFiles, folder: Path, **launch: Any) -> None:
    answering = Answering(max_new_tokens=8, temperature=0.0, seed=0)
    tune(
        settings(), launch_settings(folder, check=False, **launch), target_files, "head", [PROMPT], answering,
        target_settings={"path": target_files.path}, folder=folder / "out",
    )  # fmt: skip


def test_without_prompts_the_key_is_named() -> None:
    with initialize_config_dir(cli.CONF, version_base="1.3"):
        config = compose("serve", overrides=["action=tune", "head=head"])
    with pytest.raises(InputError, match=r"prompts\.path is not set; give conversations"):
        tune_head(config)


def test_a_dry_run_is_refused_because_what_is_measured_decides_the_commands() -> None:
    with initialize_config_dir(cli.CONF, version_base="1.3"):
        config = compose("serve", overrides=["action=tune", "head=head", "prompts.path=chats.jsonl", "dry_run=true"])
    with pytest.raises(InputError, match=r"dry_run=true: .* set tune\.timed=0"):
        tune_head(config)


# --- config ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"evidence": "luck"}, r"tune\.evidence=luck is unknown; take one of: decoder, server"),
        ({"evidence": "server", "timed": 0}, r"times at least the longest chain; set tune\.timed=1"),
        ({"concurrency": 0}, r"tune\.concurrency=0 must be 1 or more"),
        ({"batch_size": 0}, r"tune\.batch_size=0 must be 1 or more"),
        ({"timed": -1}, r"tune\.timed=-1 must be 0 or more"),
        ({"requests_per_place": -1}, r"tune\.requests_per_place=-1 must be 0 or more"),
        ({"steps": 3}, r"tune\.steps=3 must be a list of numbers from 1 up, e\.g\. tune\.steps=\[4,8\]"),
        ({"steps": [0]}, r"tune\.steps=\[0\] must be a list"),
        ({"draft_tokens": ["x"]}, r"tune\.draft_tokens=\['x'\] must be a list"),
        ({"topk": []}, r"tune\.topk=\[\]: both need a number"),
        ({"assumed": {"step": -0.1}}, r"tune\.assumed\.step=-0\.1 must not be negative"),
    ],
)
def test_bad_settings_of_the_search_name_their_keys(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        settings(**changes)
