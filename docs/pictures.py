"""Draws the two pictures of the README: python docs/pictures.py"""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch

DOCS = Path(__file__).parent
BLUE, GREEN, GREY, LINE = "#dbe8f8", "#dff0df", "#eeeeee", "#445566"
pyplot.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "eagle3", "font.size": 11}


def main() -> None:
    pipeline()
    unroll()


def pipeline() -> None:
    """Folders in the order in which they are made, and the command behind each arrow."""
    axes = canvas(12.6, 2.3)
    folders = ["raw\nconversations", "clean\nprompts", "the target's\nanswers", "feature\nshards"]
    folders += ["draft head\ncheckpoint", "SGLang\ncheckpoint"]
    made_by = ["prompts", "answers", "features", "train.py", "serve.py\nexport"]
    for number, folder in enumerate(folders):
        box(axes, 2.15 * number, 0.75, 1.6, 0.8, folder, GREY if number == 0 else GREEN)
        if number:
            arrow(axes, (2.15 * number - 0.55, 1.15), (2.15 * number, 1.15))
            axes.text(2.15 * number - 0.28, 1.65, made_by[number - 1], ha="center", va="bottom", fontsize=9.5)
    axes.plot([1.6, 8.05], [0.55, 0.55], color=LINE)
    axes.text(4.8, 0.12, "precompute.py, with the target", ha="center", fontsize=10)
    axes.text(12.35, 0.12, "serve.py: check, launch, bench, tune", ha="right", fontsize=10)
    save(axes, "pipeline", "Raw conversations become prompts, answers, feature shards, a head and a checkpoint")


def unroll() -> None:
    """One anchor of the example in eagle3/head/rows.py: the last prompt token, three TTT steps."""
    axes = canvas(10.2, 4.3)
    inputs, drafts = ["A", "B", "C"], ["B", "C", "end"]
    for step in range(3):
        left = 2.6 + 2.6 * step
        box(axes, left, 1.7, 1.7, 0.8, f"draft head\nTTT step {step}", BLUE)
        box(axes, left + 0.1, 0.35, 1.5, 0.7, f"embedding\nof {inputs[step]}", GREY)
        arrow(axes, (left + 0.85, 1.05), (left + 0.85, 1.7))
        box(axes, left + 0.1, 3.15, 1.5, 0.75, f"draft of {drafts[step]}", GREEN)
        arrow(axes, (left + 0.85, 2.5), (left + 0.85, 3.15))
        if step:
            axes.text(left - 0.45, 2.2, "own\noutput", ha="center", va="bottom", fontsize=9.5)
            arrow(axes, (left - 0.9, 2.1), (left, 2.1))
    box(axes, 0.1, 1.6, 1.7, 1.0, "aux hidden\nstates of p1\n(target)", GREY)
    arrow(axes, (1.8, 2.1), (2.6, 2.1))
    axes.text(0.1, 3.52, "compared with the\ntarget's distribution", ha="left", va="center", fontsize=10)
    arrow(axes, (1.95, 3.52), (2.65, 3.52))
    save(axes, "unroll", "Training-time test: three steps of the draft head from one anchor")


def canvas(width: float, height: float) -> Axes:
    figure = pyplot.figure(figsize=(width * 0.8, height * 0.8))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(-0.1, width), ylim=(0, height))
    axes.axis("off")
    return axes


def box(axes: Axes, left: float, bottom: float, width: float, height: float, text: str, colour: str) -> None:
    patch = FancyBboxPatch(
        (left, bottom), width, height, boxstyle="round,pad=0,rounding_size=0.08", facecolor=colour, edgecolor=LINE
    )
    axes.add_patch(patch)
    axes.text(left + width / 2, bottom + height / 2, text, ha="center", va="center")


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    axes.annotate("", xy=end, xytext=start, arrowprops={"arrowstyle": "-|>", "color": LINE, "shrinkA": 1, "shrinkB": 1})


def save(axes: Axes, name: str, title: str) -> None:
    figure = axes.figure
    figure.savefig(DOCS / f"{name}.svg", facecolor="white", metadata={"Date": None, "Title": title})


if __name__ == "__main__":
    main()
