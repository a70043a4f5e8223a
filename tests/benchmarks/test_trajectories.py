"""The benchmark of trajectories runs train.py to the end for each variant, and judges by the rule that it states."""

import json
from pathlib import Path

import pytest
from stores import ROOT


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


def test_two_variants_run_to_their_validation_and_are_taken_as_they_are_afterwards(
    tmp_path: Path, store_path: Path, capfd: pytest.CaptureFixture
) -> None:
    import trajectories

    skipped = [variant.name for variant in trajectories.VARIANTS if variant.name not in ("reference", "accumulation")]
    arguments = ["--data", str(store_path), "--out", str(tmp_path / "out"), "--steps", "4", "--seeds", "0"]
    arguments += ["--jobs", "2", "--skip", *skipped, "--", "trainer=cpu", "data.pack_tokens=64", "ttt_steps=3"]
    trajectories.main(arguments)
    printed, written = capfd.readouterr().out, (tmp_path / "out" / "trajectories.json").read_text()
    assert {"reference-0", "accumulation-0"} <= set(printed.split())
    reference, accumulation = json.loads(written)["rows"]
    assert reference["loss_difference"] == {"largest": 0, "mean": 0, "at": {"4": 0}}
    assert accumulation["loss_difference"]["largest"] > 0
    assert accumulation["val/accept_length"]["mean"] >= 1
    assert accumulation["val/loss"]["difference"] == pytest.approx(0, abs=0.2)
    config = (tmp_path / "out" / "runs" / "accumulation-0" / ".hydra" / "overrides.yaml").read_text()
    assert {"- data.pack_tokens=32", "- trainer.accumulate_grad_batches=2", "- kernels.attention=dense"} <= set(
        config.split("\n")
    )

    trajectories.main(arguments)
    assert "accumulation-0" not in capfd.readouterr().out
    assert (tmp_path / "out" / "trajectories.json").read_text() == written


def test_losses_are_compared_step_by_step_within_a_seed() -> None:
    from trajectories import Trajectory, apart

    reference = [Trajectory([float(step) for step in range(12)], {}), Trajectory([1.0] * 12, {})]
    own = [Trajectory([step + 0.5 for step in range(12)], {}), Trajectory([1.0] * 9 + [0.0, 1.0, 4.0], {})]
    found = apart(own, reference)
    assert found["largest"] == 3
    assert found["mean"] == pytest.approx((0.5 + 4 / 12) / 2)
    assert found["at"] == {"10": 0.75, "12": 1.75}


@pytest.mark.parametrize(("shift", "within"), [(0.11, True), (-0.11, True), (0.12, False), (-0.12, False)])
def test_a_mean_is_within_two_standard_errors_of_the_reference_or_not(shift: float, within: bool) -> None:
    from trajectories import judged

    reference = [1.9, 2.0, 2.1]  # standard deviation 0.1, standard error 0.0577
    found = judged([value + shift for value in (1.0, 2.0, 3.0)], reference)  # its own spread decides nothing
    assert found["noise"] == pytest.approx(0.1)
    assert found["difference"] == pytest.approx(shift)
    assert found["within"] is within


def test_a_reference_is_compared_with_itself_seed_by_seed() -> None:
    from trajectories import METRICS, VARIANTS, Trajectory, row

    runs = [Trajectory([level, level], dict.fromkeys(METRICS, level)) for level in (1.0, 2.0, 4.0)]
    found = row(VARIANTS[0], runs, runs)
    assert found["loss_difference"]["largest"] == 3
    assert found["loss_difference"]["mean"] == pytest.approx(2)
    assert found["val/loss"]["difference"] == 0


def test_one_seed_has_no_noise() -> None:
    from trajectories import judged

    found = judged([1.5], [1.0])
    assert found["difference"] == 0.5
    assert found["noise"] is found["within"] is None


@pytest.mark.parametrize(
    ("metrics", "whole"),
    [
        ("train/loss,val/loss,val/accept_length\n2,,\n1,,\n,0.5,1.5\n", True),
        ("train/loss,val/loss,val/accept_length\n2,,\n1,,\n", False),
        ("train/loss\n2\n", False),
        ("", False),
    ],
)
def test_a_run_is_finished_once_all_steps_and_the_validation_are_written(
    metrics: str, whole: bool, tmp_path: Path
) -> None:
    from trajectories import Trajectory, read

    (tmp_path / "metrics.csv").write_text(metrics)
    end = {"val/loss": 0.5, "val/accept_length": 1.5}
    assert read(tmp_path, steps=2) == (Trajectory([2, 1], end) if whole else None)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (["--skip", "clip"], "skip them too"),
        (["--", "trainer.precision=32-true"], "trainer.precision: this benchmark sets it"),
        (["--", "seed=3"], "seed: this benchmark sets it"),
    ],
)
def test_settings_that_would_break_a_comparison_are_refused(
    wrong: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    import trajectories

    with pytest.raises(SystemExit):
        trajectories.main(["--data", str(tmp_path), "--out", str(tmp_path), *wrong])
    assert message in capsys.readouterr().err
