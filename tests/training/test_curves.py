"""The picture of a training's curves, from real runs: after validations, after a resume, of several runs in one."""

import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from matplotlib import image

from eagle3.errors import Interrupted
from eagle3.training import curves as drawing
from eagle3.training.curves import PANELS, Curve, Curves, draw, main, read_curves
from tests.training.test_training import Run

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*does not have many workers.*",
    "ignore:.*treespec, LeafSpec.*",
    "ignore:Checkpoint directory.*",
)
CURVES = "{_target_: eagle3.training.curves.Curves, run_dir: '${run_dir}', every_n_validations: 2}"


@pytest.fixture
def train(tmp_path: Path, store_path: Path) -> Callable[..., Run]:
    def start(name: str, *overrides: str, signal_after: int | None = None) -> Run:
        return Run(tmp_path / name, store_path, f"callbacks.curves={CURVES}", *overrides, signal_after=signal_after)

    return start


def drawn(figure: Any) -> dict[str, int]:
    """How many curves each panel has."""
    return {axes.get_title(): len(axes.lines) for axes in figure.axes}


def test_every_panel_shows_what_a_training_logs(train: Callable[..., Run]) -> None:
    done = train("run", "trainer.max_epochs=3").fit()
    assert image.imread(done.directory / "curves.png").shape[0] > 800
    curves = read_curves(done.directory)
    assert curves["train/loss"].steps == list(range(done.trainer.global_step))
    assert len(curves["val/served_reach_3"].values) == 3
    assert list(drawn(draw({"run": curves})).values()) == [2, 3, 3, 3, 1, 1, 2, 1]


def test_of_many_steps_every_so_many_are_drawn(tmp_path: Path) -> None:
    curves = {f"val/loss_{step}": Curve([1, 2], [2.0, 1.0]) for step in range(64)}
    figure = draw({"run": curves})
    [panel] = [axes for axes in figure.axes if axes.get_title() == "loss by TTT step (nats)"]
    labels = [text.get_text() for text in panel.get_legend().get_texts()]
    assert len(panel.lines) == len(labels) == 8 and labels[0] == "val/loss_0"
    figure.savefig(tmp_path / "curves.png")  # a warning that nothing fits would be an error here


def test_the_picture_is_drawn_after_every_so_many_validations_and_at_the_end(
    train: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    monkeypatch.setattr(
        drawing, "write_curves", lambda runs, out: seen.append(len(read_curves(*runs)["val/loss"].values))
    )
    train("run", "trainer.max_epochs=5", "callbacks.early_stopping=null").fit()
    assert seen == [2, 4, 5]
    seen.clear()
    train("other", "trainer.max_epochs=4", "callbacks.early_stopping=null").fit()
    assert seen == [2, 4], "the last is not drawn twice"


def test_after_a_resume_the_picture_has_both_parts(train: Callable[..., Run]) -> None:
    first = train("run", signal_after=20)
    with pytest.raises(Interrupted):
        first.fit()
    rest = train("run", f"ckpt_path={first.directory}/checkpoints/last.ckpt").fit()
    assert (first.directory / "curves.png").is_file()
    assert read_curves(rest.directory)["train/loss"].steps == list(range(rest.trainer.global_step))


def test_without_matplotlib_the_training_says_so_in_a_line_and_goes_on(
    train: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(drawing, "find_spec", lambda name: None)
    with caplog.at_level(logging.INFO):
        done = train("run", "trainer.max_epochs=1").fit()
    assert [line for line in caplog.messages if "curves.png" in line] == [
        "curves.png is not drawn: that needs matplotlib, pip install -c constraints.txt -e '.[bench]' in the clone"
    ]
    assert not (done.directory / "curves.png").exists()


def test_a_picture_that_cannot_be_drawn_or_sent_costs_a_warning_and_no_checkpoint(
    train: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*given: object) -> None:
        raise ConnectionError("the tracker is away")

    monkeypatch.setattr(drawing, "log_picture", fail)
    done = train("run", "trainer.max_epochs=2").fit()
    said = "curves.png is not drawn, the training continues: ConnectionError: the tracker is away"
    assert [line for line in caplog.messages if "curves.png" in line] == [said]
    assert {"last.ckpt"} < {path.name for path in (done.directory / "checkpoints").iterdir()}


def test_without_metrics_csv_nothing_is_drawn(tmp_path: Path) -> None:
    Curves(run_dir=str(tmp_path), every_n_validations=1)._draw(
        SimpleNamespace(loggers=[], is_global_zero=True, global_step=3)  # type: ignore[arg-type]
    )
    assert not list(tmp_path.iterdir())


def write(folder: Path, text: str) -> Path:
    folder.mkdir(parents=True)
    (folder / "metrics.csv").write_text(text)
    return folder


METRICS = "epoch,step,train/grad_norm,val/loss\n0,0,0.5,\n0,1,,3.25\n"


def test_a_line_that_is_being_written_is_left_out(tmp_path: Path) -> None:
    run = write(tmp_path / "run", f"{METRICS}0,2,7")
    assert read_curves(run) == {"train/grad_norm": Curve([0], [0.5]), "val/loss": Curve([1], [3.25])}


def test_the_command_draws_one_run_or_several(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other, alike = (write(tmp_path / name, METRICS) for name in ("a/one", "a/other", "b/one"))
    main([str(one)])
    assert (one / "curves.png").is_file()
    main([str(one), str(other), str(alike), "--out", str(tmp_path / "all.png")])
    assert capsys.readouterr().out.split() == [f"{one}/curves.png", f"{tmp_path}/all.png"]
    with pytest.raises(SystemExit):
        main([str(tmp_path)])
    assert f"{tmp_path}/metrics.csv does not exist; give the folder of a training" in capsys.readouterr().err


def test_of_several_runs_each_has_its_colour_and_a_name(tmp_path: Path) -> None:
    curves = read_curves(write(tmp_path / "run", METRICS))
    figure = draw({"one": curves, "other": curves})
    losses = figure.axes[0]
    assert [text.get_text() for text in losses.get_legend().get_texts()] == ["one: val/loss", "other: val/loss"]
    assert [line.get_color() for line in losses.lines] == ["C0", "C1"]
    assert drawn(figure)["learning rate"] == 0


def test_every_panel_names_metrics_that_exist(train: Callable[..., Run]) -> None:
    curves = read_curves(train("run", "trainer.max_epochs=1").fit().directory)
    wanted = [name for metrics in PANELS.values() for name in metrics]
    assert [name for name in wanted if not any(metric.startswith(name.removesuffix("*")) for metric in curves)] == []
