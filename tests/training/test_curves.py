"""The picture of a training's curves, from real runs: at the end, after a resume, of several runs in one."""

from pathlib import Path

import pytest
from matplotlib import image
from training_runs import LIGHTNING_WARNS, Start

from eagle3.errors import Interrupted
from eagle3.training.curves import PANELS, Curve, draw, main, read_curves

pytestmark = LIGHTNING_WARNS
CURVES = "callbacks.curves={_target_: eagle3.training.curves.Curves, run_dir: '${run_dir}'}"
METRICS = "epoch,step,train/grad_norm,val/loss\n0,0,0.5,\n0,1,,3.25\n0,2,,3.0\n"


def write(folder: Path, text: str = METRICS) -> Path:
    folder.mkdir(parents=True)
    (folder / "metrics.csv").write_text(text)
    return folder


def test_every_panel_shows_what_a_training_logs_also_after_a_resume(train: Start) -> None:
    first = train("run", CURVES, signal_after=14)
    with pytest.raises(Interrupted):
        first.fit()
    assert (first.directory / "curves.png").is_file()
    done = train("run", CURVES, "trainer.max_epochs=3", f"ckpt_path={first.directory}/checkpoints/last.ckpt").fit()
    assert image.imread(done.directory / "curves.png").shape[0] > 800
    curves = read_curves(done.directory)
    assert curves["train/loss"].steps == list(range(done.trainer.global_step))
    assert len(curves["val/served_reach_3"].values) == 3
    lines = [2, 3, 4, 3, 1, 1, 2, 1]  # one is the best's star
    assert [len(axes.lines) for axes in draw({"run": curves}).axes] == lines
    wanted = [name for metrics in PANELS.values() for name in metrics]
    assert all(any(metric.startswith(name.removesuffix("*")) for metric in curves) for name in wanted)


def test_a_picture_that_cannot_be_drawn_costs_a_line_and_no_checkpoint(
    train: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("eagle3.errors.find_spec", lambda name: None)
    done = train("run", CURVES, "trainer.max_epochs=1").fit()
    [line] = [each for each in caplog.messages if "curves.png" in each]
    assert "is not drawn" in line and "needs the package matplotlib; install" in line and "[bench]" in line
    assert not (done.directory / "curves.png").exists()
    assert {"last.ckpt"} < {path.name for path in (done.directory / "checkpoints").iterdir()}


def test_the_command_draws_one_run_or_several_without_a_line_that_is_being_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other, alike = (write(tmp_path / name, f"{METRICS}0,3,7") for name in ("a/one", "a/other", "b/one"))
    assert read_curves(one) == {"train/grad_norm": Curve([0], [0.5]), "val/loss": Curve([1, 2], [3.25, 3.0])}
    main([str(one)])
    assert (one / "curves.png").is_file()
    main([str(one), str(other), str(alike), "--out", str(tmp_path / "all.png")])
    assert capsys.readouterr().out.split() == [f"{one}/curves.png", f"{tmp_path}/all.png"]
    with pytest.raises(SystemExit):
        main([str(tmp_path)])
    assert f"{tmp_path}/metrics.csv does not exist; give the folder of a training" in capsys.readouterr().err


def test_lines_of_runs_have_colours_names_and_markers_where_they_are_short() -> None:
    curves = {"val/loss": Curve([2, 5], [3.0, 2.0]), "train/loss": Curve([4], [2.5]), "train/lr": Curve([4], [0.1])}
    [losses] = draw({"one": curves, "other": {"val/loss": curves["val/loss"]}}).axes  # no panel of single points
    labels = [text.get_text() for text in losses.get_legend().get_texts()]
    assert labels == ["one: training", "one: validation", "other: validation"]
    assert [line.get_color() for line in losses.lines] == ["C0", "C0", "C1"]
    assert {line.get_marker() for line in losses.lines} == {"o"}
    [long] = draw({"run": {"train/loss": Curve(list(range(99)), [1.0] * 99)}}).axes
    assert [line.get_marker() for line in long.lines] == ["None"]


def test_the_step_of_the_best_checkpoint_is_marked_and_of_many_lines_some_are_drawn(tmp_path: Path) -> None:
    curves = {f"val/loss_{step}": Curve([1, 2], [2.0, 1.0]) for step in range(64)}
    curves["val/served_accept_length_3"] = Curve([2, 5, 8], [1.0, 1.5, 1.9])
    curves["val/served_accept_length_7"] = Curve([2, 5, 8], [1.0, 1.5, 1.25])
    curves["train/grad_norm"] = Curve([1, 2], [0.0, 0.0])
    figure = draw({"run": curves})
    by_step, served, norms = figure.axes
    assert len(by_step.lines) == 8 and by_step.get_legend().get_texts()[0].get_text() == "step 0"
    assert served.get_legend().get_texts()[-1].get_text() == "best: 1.50 at step 6"  # as the log counts, from 1
    assert norms.get_yscale() == "linear"
    figure.savefig(tmp_path / "curves.png")  # a warning, of zeros or that nothing fits, would be an error here
