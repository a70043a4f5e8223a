"""The picture of a sweep: which jobs and keys are in it, and what importance says."""

from pathlib import Path

import numpy as np
import pytest
from matplotlib import image

from eagle3.training import sweep
from eagle3.training.pictures.sweep import importance
from eagle3.training.sweep import NoPicture, picture, read_jobs, show, write_picture
from tests.training.test_sweep import METRIC, job

LOSSES, RATES = ("lk", "cross_entropy_tv"), ("1e-4", "1e-3", "1e-2")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Six jobs, one of them without a result: the middle rate is the best, the loss decides little."""
    for number, (loss, rate) in enumerate((loss, rate) for loss in LOSSES for rate in RATES):
        score = None if number == 5 else {"1e-4": 1.2, "1e-3": 2.0, "1e-2": 1.5}[rate] + 0.01 * number
        job(tmp_path / "rates", str(number), ["data.path=x", f"loss={loss}", f"optim.lr={rate}"], score)
    return tmp_path / "rates"


def test_the_picture_shows_the_keys_that_differ_and_counts_jobs_without_a_result(folder: Path) -> None:
    figure = picture(read_jobs(folder), folder.name)
    jobs, bars = figure.axes
    assert figure.get_suptitle() == "rates: 6 jobs, 1 of them without a result"
    names = [label.get_text().replace("\n", "") for label in jobs.get_xticklabels()]
    assert names == ["loss", "optim.lr", METRIC]
    assert len([line for line in jobs.lines if len(line.get_xdata()) == 3]) == 5
    assert {"lk", "cross_entropy_tv", "0.0001", "0.001", "0.01", "1.200", "2.040"} <= {
        text.get_text() for text in jobs.texts
    }
    assert [label.get_text() for label in bars.get_yticklabels()] == ["loss", "optim.lr"], "what decides most is above"


def test_the_best_job_is_red_and_ends_at_the_top(folder: Path) -> None:
    [best] = [line for line in picture(read_jobs(folder), "rates").axes[0].lines if line.get_color() == "tab:red"]
    assert best.get_ydata()[-1] == 1
    for each in folder.glob("*/result.json"):
        each.unlink()
    jobs = [each | {"score": float(each["name"]), "metric": "val/loss", "mode": "min"} for each in read_jobs(folder)]
    [best] = [line for line in picture(jobs, "rates").axes[0].lines if line.get_color() == "tab:red"]
    assert best.get_ydata()[-1] == 0


def test_the_command_draws_what_there_is_so_far(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    show(folder)
    assert capsys.readouterr().out.splitlines()[0] == f"picture: {folder}/sweep.png"
    assert image.imread(folder / "sweep.png").shape[1] > 600


def test_one_result_is_no_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, score in enumerate([1.5, None]):
        job(tmp_path, str(number), [f"seed={number}"], score)
    show(tmp_path)
    assert capsys.readouterr().out.splitlines()[0].startswith("no sweep.png: it shows two results or more")


def test_without_matplotlib_the_way_out_is_said(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "find_spec", lambda name: None)
    with pytest.raises(NoPicture, match=r"needs matplotlib and scipy; .*'eagle3\[bench\]'"):
        write_picture(folder)


# --- importance ------------------------------------------------------------------------------------------------------


def test_a_key_that_decides_alone_has_almost_all_and_one_without_effect_almost_none() -> None:
    draw = np.random.default_rng(0)
    key, other = draw.integers(3, size=200), draw.integers(3, size=200)
    scores = (key + 0.01 * draw.random(200)).tolist()
    assert importance([str(value) for value in key], scores) > 0.85
    assert importance([str(value) for value in other], scores) < 0.05


def test_a_number_whose_best_lies_in_the_middle_is_important() -> None:
    """No rank correlation would see it."""
    rates = 10 ** np.random.default_rng(1).uniform(-4, -2, size=60)
    scores = (-np.abs(np.log10(rates) + 3)).tolist()
    assert importance([str(rate) for rate in rates], scores) > 0.5


@pytest.mark.parametrize(
    ("values", "scores", "expected"),
    [
        (["a", "b", "c"], [1.0, 2.0, 3.0], None),  # no value tried twice
        (["a", "a"], [1.0, 2.0], None),
        (["a", "a", "b"], [1.0, 1.0, 1.0], 0.0),
        (["a", "a", "b", "b"], [1.0, 2.0, 1.5, 1.6], 0.0),  # as chance has it, or less
    ],
)
def test_few_jobs_promise_nothing(values: list[str], scores: list[float], expected: float | None) -> None:
    assert importance(values, scores) == expected
