"""The pictures of docs/results, and those of curves and of a sweep in docs/how-to, made from the files in
benchmarks/results: python benchmarks/pictures.py

tests/test_pages.py fails while a picture says another number than its file.
"""

from collections.abc import Callable
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import tables
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from eagle3.training.curves import Curve
from eagle3.training.pictures.curves import curves_figure
from eagle3.training.sweep import picture

FOLDER = Path(__file__).parent.parent / "docs" / "results"
OURS, LIGHT, THEIRS = "#3f6fb5", "#8fb3e3", "#a9b4c2"
pyplot.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "eagle3", "font.size": 10}
SHOWN_HEADS = {
    "SpecForge's loss": "reference",
    "ours, its settings": "EAGLE-3, settings of the reference",
    "experiment=head_quality": "recipe",
    "8 answers to each prompt, Muon": tables.BEST,
}


def main() -> None:
    for draw in PICTURES:
        figure, axes = pyplot.subplots(figsize=(7.2, 2.9), layout="constrained")
        draw(axes)
        axes.spines[["top", "right"]].set_visible(False)
        save(figure, FOLDER / f"{draw.__name__}.svg")
    for make in FIGURES:
        save(make(), FOLDER.parent / "how-to" / f"{make.__name__}.svg")


def save(figure: Figure, path: Path) -> None:
    figure.savefig(path, facecolor="white", metadata={"Date": None})


def heads(axes: Axes) -> list[str]:
    """Accept length of four heads on held-out prompts, chains of 7; return the numbers shown."""
    found = tables.by_name()
    values = [tables.kept(found[name], "held out 7") for name in SHOWN_HEADS.values()]
    shown = [f"{value:.3f}" for value in values]
    bars = axes.barh(list(SHOWN_HEADS), values, color=[THEIRS, *[OURS] * 3])
    axes.bar_label(bars, shown, padding=3)
    axes.set(xlim=(1, 2.8), xlabel="accept length, held-out prompts, chains of 7 (1: no head)")
    axes.invert_yaxis()
    return shown


def race(axes: Axes) -> list[str]:
    """Tokens a second of a training step, beside SpecForge's; return the numbers shown."""
    steps = tables.result("race.json")["steps"]
    found = [tables.raced(row["batch"]) for row in steps]
    ways = {"SpecForge": ([theirs for _, theirs, _ in found], THEIRS)}
    for way, label, colour in (("bf16", "eagle3, bf16", OURS), ("fp8", "eagle3, float8", LIGHT)):
        ways[label] = ([ours[way] for ours, _, _ in found], colour)
    shown = []
    for number, (label, (rates, colour)) in enumerate(ways.items()):
        texts = [tables.thousands(rate) for rate in rates]
        places = [place + 0.27 * (number - 1) for place in range(len(steps))]
        bars = axes.bar(places, [rate / 1000 for rate in rates], 0.25, label=label, color=colour)
        axes.bar_label(bars, texts, padding=2)
        shown += texts
    axes.set_xticks(range(len(steps)), [row["batch"].replace(", ", ",\n", 1).replace("],", "],\n") for row in steps])
    axes.set(ylabel="thousand tokens/s, one H200")
    axes.margins(y=0.25)
    axes.legend(frameon=False, loc="upper right", ncols=3)
    return shown


def speed_up(axes: Axes) -> list[str]:
    """Speed-up over concurrency with its interval, for each prompt set; return the numbers shown."""
    cells, shown = tables.result("sglang_bench/results.json")["cells"], []
    for prompt_set, colour in (("held_out", OURS), ("mt_bench", "#c0762f")):
        of_set = [cell for cell in cells if cell["prompt_set"] == prompt_set]
        gains = [cell["speed_ups"]["head"]["tpot"] for cell in of_set]
        places, values = [cell["concurrency"] for cell in of_set], [gain["value"] for gain in gains]
        axes.fill_between(
            places, [gain["low"] for gain in gains], [gain["high"] for gain in gains], color=colour, alpha=0.2
        )
        axes.plot(places, values, marker="o", color=colour, label=prompt_set)
        axes.annotate(f"{values[0]:.2f}", (places[0], values[0]), xytext=(4, 5), textcoords="offset points")
        shown.append(f"{values[0]:.2f}")
    axes.axhline(1, color="#666666", linewidth=0.8, linestyle="--")
    axes.set_xscale("log", base=2)
    axes.set_xticks(places, [str(place) for place in places])
    axes.set(xlabel="concurrency", ylabel="speed-up, time per output token", ylim=(0, 2.7))
    axes.legend(frameon=False)
    return shown


def curves() -> Figure:
    """What a training draws by itself."""
    found = tables.result("tiny_runs.json")["curves"]
    return curves_figure({"quickstart": {name: Curve(**curve) for name, curve in found.items()}})


def sweep() -> Figure:
    """What a sweep draws at its end."""
    return picture(tables.result("tiny_runs.json")["sweep"], "tiny target")


PICTURES: tuple[Callable[[Axes], list[str]], ...] = (heads, race, speed_up)
FIGURES: tuple[Callable[[], Figure], ...] = (curves, sweep)

if __name__ == "__main__":
    main()
