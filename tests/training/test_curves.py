"""The picture of a training's curves, from real runs: at the end, after a resume, of several runs in one."""

from pathlib import Path

import pytest
from matplotlib import image
from training_runs import LIGHTNING_WARNS

from eagle3.training.curves import PANELS, Curve, draw, main, read_curves

pytestmark = LIGHTNING_WARNS
CURVES = "callbacks.curves={_target_: eagle3.training.curves.Curves, run_dir: '${run_dir}'}"
METRICS = "epoch,step,train/grad_norm,val/loss\n0,0,0.5,\n0,1,,3.25\n0,2,,3.0\n"


def write(folder: Path, text: str = METRICS) -> Path:
    folder.mkdir(parents=True)
    (folder / "metrics.csv").write_text(text)
    return folder


def test_every_panel_shows_what_a_training_logs_also_after_a_resume(train):
    first = train("run", CURVES, signal_after=14).stopped()
    assert (first.directory / "curves.png").is_file()
    done = train("run", CURVES, "trainer.max_epochs=3", first.resume).fit()
    assert image.imread(done.directory / "curves.png").shape[0] > 800
    curves = read_curves(done.directory)
    assert curves["train/loss"].steps == list(range(done.trainer.global_step))
    assert len(curves["val/served_reach_3"].values) == 3
    lines = [2, 3, 4, 3, 1, 1, 2, 1]  # one is the best's star
    assert [len(axes.lines) for axes in draw({"run": curves}).axes] == lines
    wanted = [name for panel in PANELS.values() for name in panel.metrics]
    assert all(any(metric.startswith(name.removesuffix("*")) for metric in curves) for name in wanted)


def test_of_many_steps_every_so_many_are_drawn(tmp_path):
    curves = {f"val/loss_{step}": Curve([1, 2], [2.0, 1.0]) for step in range(64)}
    figure = draw({"run": curves})
    [panel] = figure.axes
    labels = [text.get_text() for text in panel.get_legend().get_texts()]
    assert len(panel.lines) == len(labels) == 8 and labels[0] == "step 0"
    figure.savefig(tmp_path / "curves.png")  # a warning that nothing fits would be an error here


def test_a_picture_that_cannot_be_drawn_costs_a_line_and_no_checkpoint(train, monkeypatch, caplog):
    monkeypatch.setattr("eagle3.errors.find_spec", lambda name: None)
    done = train("run", CURVES, "trainer.max_epochs=1").fit()
    [line] = [each for each in caplog.messages if "curves.png" in each]
    assert "is not drawn" in line and "needs the package matplotlib; install" in line and "[bench]" in line
    assert not (done.directory / "curves.png").exists()
    assert {"last.ckpt"} < {path.name for path in (done.directory / "checkpoints").iterdir()}


def test_a_line_that_is_being_written_is_left_out(tmp_path):
    run = write(tmp_path / "run", f"{METRICS}0,3,7")
    assert read_curves(run) == {"train/grad_norm": Curve([0], [0.5]), "val/loss": Curve([1, 2], [3.25, 3.0])}


def test_the_command_draws_one_run_or_several(tmp_path, capsys):
    one, other, alike = (write(tmp_path / name) for name in ("a/one", "a/other", "b/one"))
    main([str(one)])
    assert (one / "curves.png").is_file()
    main([str(one), str(other), str(alike), "--out", str(tmp_path / "all.png")])
    assert capsys.readouterr().out.split() == [f"{one}/curves.png", f"{tmp_path}/all.png"]
    with pytest.raises(SystemExit):
        main([str(tmp_path)])
    assert f"{tmp_path}/metrics.csv does not exist; give the folder of a training" in capsys.readouterr().err


def test_of_several_runs_each_has_its_colour_and_a_name(tmp_path):
    curves = read_curves(write(tmp_path / "run"))
    figure = draw({"one": curves, "other": curves})
    losses = figure.axes[0]
    assert [text.get_text() for text in losses.get_legend().get_texts()] == ["one: validation", "other: validation"]
    assert [line.get_color() for line in losses.lines] == ["C0", "C1"]


def test_several_runs_have_fewer_lines_each_of_a_numbered_metric():
    curves = {f"val/loss_{step}": Curve([1, 2], [2.0, 1.0]) for step in range(8)}
    [panel] = draw({"one": curves, "other": curves}).axes
    labels = [line.get_label() for line in panel.lines]
    assert labels == [f"{run}: step {step}" for run in ("one", "other") for step in (0, 2, 4, 6)]


def test_a_short_run_has_markers_and_no_panel_of_a_single_point():
    short = {"val/loss": Curve([2, 5], [3.0, 2.0]), "train/loss": Curve([4], [2.5]), "train/lr": Curve([4], [0.1])}
    [losses] = draw({"run": short}).axes
    assert [line.get_marker() for line in losses.lines] == ["o", "o"]
    [long] = draw({"run": {"train/loss": Curve(list(range(99)), [1.0] * 99)}}).axes
    assert [line.get_marker() for line in long.lines] == ["None"]


def test_many_values_of_a_training_are_pale_under_their_running_mean():
    metrics = ("train/loss", "train/lr", "val/loss")
    losses, rates = draw({"run": {metric: Curve(list(range(200)), [0.0, 2.0] * 100) for metric in metrics}}).axes
    values, mean, validation = losses.lines
    assert list(values.get_ydata()) == [0.0, 2.0] * 100 and values.get_color() == mean.get_color()
    assert values.get_alpha() < 1 and mean.get_alpha() is None and len(mean.get_ydata()) == 200
    assert all(0.7 < value < 1.3 for value in mean.get_ydata())
    assert len(rates.lines) == 1 and validation.get_label() == "validation"


def test_steps_are_counted_from_one_and_each_panel_has_the_same_steps():
    panels = draw({"run": {"train/loss": Curve([0, 9], [2.0, 1.0]), "val/loss_0": Curve([4, 9], [2.0, 1.0])}}).axes
    assert [list(axes.lines[0].get_xdata()) for axes in panels] == [[1, 10], [5, 10]]
    assert panels[0].get_xlim() == panels[1].get_xlim()


def test_a_dark_picture_has_a_dark_background(tmp_path):
    run = write(tmp_path / "run")
    main([str(run)])
    main([str(run), "--dark", "--out", str(tmp_path / "dark.png")])
    light, dark = (image.imread(path)[..., :3].mean() for path in (run / "curves.png", tmp_path / "dark.png"))
    assert dark < 0.2 < 0.9 < light


def test_the_step_of_the_best_checkpoint_is_marked():
    served = {
        "val/served_accept_length_3": Curve([2, 5, 8], [1.0, 1.5, 1.9]),
        "val/served_accept_length_7": Curve([2, 5, 8], [1.0, 1.5, 1.25]),
    }
    [panel] = draw({"run": served}).axes
    [*_, words] = [text.get_text() for text in panel.get_legend().get_texts()]
    assert words == "best: 1.50 at step 6"  # as the log counts steps, from 1


def test_gradient_norms_of_zero_are_drawn_without_a_warning(tmp_path):
    figure = draw({"run": {"train/grad_norm": Curve([1, 2], [0.0, 0.0])}})
    [panel] = [axes for axes in figure.axes if axes.lines]
    figure.savefig(tmp_path / "curves.png")  # a warning would be an error here
    assert panel.get_yscale() == "linear"
