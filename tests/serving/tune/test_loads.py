"""Steps by load: each load's fastest chain is found with few servers, and plain decoding where none pays."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from exported_head import tiny_target
from fitted_head import LAYERS, PROMPT, fitted_head
from serving_fixtures import launch_settings, sglang_site
from stores import ASSETS
from timed_machine import Machine, gain, settings

from eagle3.engine.adaptive import read_adaptive
from eagle3.errors import InputError
from eagle3.head_files.format import save_head
from eagle3.serving.check.settings import Answering
from eagle3.serving.tune.loads import LoadStates, adaptive_steps, search_loads, thresholds
from eagle3.serving.tune.loads_report import loads_advice, loads_table, write_loads_report
from eagle3.serving.tune.predict import Setting, VerificationCost, all_settings
from eagle3.serving.tune.run import tune
from eagle3.serving.tune.timing import LoadTiming
from eagle3.target.files import read_target_files

CHAINS = all_settings(steps=[*range(1, 8)], topk=[1], draft_tokens=[], draft_vocab_size=64)
LOADS = [1, 8, 64]


class LoadMachine:
    """Machines whose verification costs the more for each token, the more requests run at a time."""

    def __init__(self, *, broken: tuple[Setting, ...] = ()) -> None:
        self.machines = {load: Machine(cost(load), broken=broken) for load in LOADS}
        self.started: list[Setting | None] = []

    def at_loads(self, setting: Setting | None, loads: Sequence[int]) -> dict[int, LoadTiming]:
        self.started.append(setting)
        return {load: self.machines[load](setting) for load in loads}

    def fastest(self, load: int) -> Setting:
        return min(CHAINS, key=self.machines[load].seconds)


def cost(load: int) -> VerificationCost:
    return VerificationCost(fixed=0.0105, draft_token=0.00009 * load, step=0.0004)


def searched(machine: LoadMachine, *, gains: Any = "all", **changes: Any) -> LoadStates:
    gains = {chain: gain(chain) for chain in CHAINS} if gains == "all" else gains
    steps = [*range(1, 8)]
    return search_loads(settings(loads=LOADS, steps=steps, **changes), gains, machine, lambda found: None)


def test_each_load_gets_its_fastest_chain_or_none_with_few_servers() -> None:
    machine = LoadMachine()
    found = searched(machine, timed=4)
    assert len(machine.started) == len(set(machine.started)) == 1 + 4 and machine.started[0] is None
    steps = adaptive_steps(found)
    assert [machine.fastest(load).steps for load in LOADS] == [6, 4, 2]
    assert steps[64] == 0  # where the fastest is slower than the plain target
    for load in LOADS[:2]:
        took = found[load].timed[Setting(steps[load], 1, steps[load] + 1)].seconds_per_token
        assert took <= 1.03 * machine.machines[load].seconds(machine.fastest(load))


def test_with_every_chain_timed_the_choice_is_the_fastest_at_each_load() -> None:
    machine = LoadMachine()
    steps = adaptive_steps(searched(machine, timed=20))
    assert sorted(machine.started[1:]) == CHAINS  # type: ignore[type-var]
    assert steps == {1: 6, 8: 4, 64: 0}


def test_without_our_decoder_the_longest_chains_server_says_what_the_others_gain() -> None:
    machine = LoadMachine()
    found = searched(machine, gains=None, timed=3)
    assert machine.started[:2] == [None, Setting(7, 1, 8)] and len(machine.started) == 4
    for chain, predicted in found[8].gains.items():
        assert predicted.accept_length == pytest.approx(gain(chain).accept_length, rel=0.02)


def test_a_chain_that_cannot_run_is_noted_at_every_load_and_the_others_are_timed() -> None:
    first = searched(LoadMachine(), timed=1)
    [chain] = first[1].timed
    found = searched(LoadMachine(broken=(chain,)), timed=2)
    assert all([*state.failed] == [chain] and len(state.timed) == 1 for state in found.values())
    with pytest.raises(InputError, match=r"none of the chains could be timed, .* out of memory"):
        searched(LoadMachine(broken=tuple(CHAINS)))


def test_the_table_the_advice_and_the_files_say_the_same(tmp_path: Path) -> None:
    found = searched(LoadMachine(), timed=20)
    lines = [line.split() for line in loads_table(found).splitlines()]
    assert [line[0] for line in lines[1:]] == ["1", "8", "64"]
    assert [line[-2:] for line in lines[1:3]] == [["6", "steps"], ["4", "steps"]] and lines[3][-1] == "plain"
    write_loads_report(found, tmp_path, {"commit": "abc"})
    assert read_adaptive(str(tmp_path / "adaptive.json")) == {1: [6], 3: [4], 23: [0]}  # halfway by ratio
    report = json.loads((tmp_path / "tune.json").read_text())
    assert (report["commit"], report["steps"]) == ("abc", {"1": 6, "8": 4, "64": 0})
    assert report["loads"]["8"]["plain"]["seconds_per_token"] == found[8].plain.seconds_per_token  # type: ignore[union-attr]
    assert (tmp_path / "tune.png").stat().st_size > 10_000
    said = loads_advice(found, tmp_path, target="TARGET", head="HEAD")
    assert f"action=launch target.path=TARGET head=HEAD adaptive={tmp_path}/adaptive.json" in said
    assert "does not draft" in said


def test_a_chain_begins_halfway_between_the_loads_that_differ() -> None:
    assert thresholds({1: 6, 2: 6, 4: 6, 8: 4, 32: 4, 64: 0}) == {1: 6, 6: 4, 46: 0}
    assert thresholds({1: 5, 2: 3}) == {1: 5, 2: 3} and thresholds({4: 2, 8: 2}) == {4: 2}


def test_where_no_chain_pays_at_any_load_the_advice_is_the_plain_target(tmp_path: Path) -> None:
    class Dear(LoadMachine):
        def __init__(self) -> None:
            super().__init__()
            self.machines = {load: Machine(VerificationCost(0.05, 0.01, 0.01)) for load in LOADS}

    assert loads_advice(searched(Dear()), tmp_path, target="T", head="H").startswith("no chain beats the plain target")


def test_the_search_starts_real_servers_and_loads_each_at_every_load(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = read_target_files(path=str(ASSETS / "tiny"), revision=None, trust_remote_code=False)
    save_head(tmp_path / "head", fitted_head(tiny_target(), PROMPT), LAYERS, "float32")
    given = settings(loads=[1, 2], steps=[1, 3], topk=[1, 4], timed=2, evidence="server", timeout_s=60)
    tune(
        given, launch_settings(sglang_site(tmp_path), check=False), target, str(tmp_path / "head"),
        [PROMPT, PROMPT[3:]], Answering(max_new_tokens=12, temperature=0.0, seed=0),
        target_settings={"path": target.path}, origin={}, folder=tmp_path / "out",
    )  # fmt: skip
    report = json.loads((tmp_path / "out" / "tune.json").read_text())
    assert sorted(path.name for path in (tmp_path / "out").glob("*.log")) == ["1-1-2.log", "3-1-4.log", "plain.log"]
    of_chains = [row["timed"]["requests"] for row in report["loads"]["2"]["settings"]]
    assert of_chains == [2, 2] and report["loads"]["1"]["plain"]["same_answers"] is None
    assert report["loads"]["2"]["plain"]["same_answers"] == 1.0  # its own answers of the load before
    assert "requests" in capsys.readouterr().out


def test_what_cannot_work_is_said_before_a_server_starts(tmp_path: Path) -> None:
    target = read_target_files(path=str(ASSETS / "tiny"), revision=None, trust_remote_code=False)

    def refused(words: str, **changes: Any) -> None:
        with pytest.raises(InputError, match=words):
            tune(
                settings(**changes), launch_settings(tmp_path, check=False, max_running_requests=8), target, "head",
                [PROMPT], Answering(max_new_tokens=8, temperature=0.0, seed=0),
                target_settings={"path": target.path}, origin={}, folder=tmp_path,
            )  # fmt: skip

    refused(r"tune\.loads=\[1\] tune\.timed=0: .* set tune\.timed=4", loads=[1], timed=0)
    refused(r"launch\.max_running_requests=8 does not hold tune\.loads=16", loads=[1, 16])
    (tmp_path / "tune.json").touch()
    refused(r"tune\.json is of another search; name a new folder: hydra\.run\.dir=DIR")
