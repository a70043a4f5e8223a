"""Pictures of a bench run, over concurrency: time per token, throughput, accept length."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from eagle3.serving.bench.stats import Cell, Summary
from eagle3.settings.serving import Side

PICTURES = ("tpot.png", "throughput.png", "accept_length.png")
LINE_STYLES: dict[Side, str] = {"plain": "--", "head": "-", "adaptive": ":"}


def draw_pictures(sets: Mapping[str, Sequence[Cell]], folder: Path) -> None:
    """Write all pictures; `sets` holds the cells of each prompt set by rising concurrency."""
    for name, figure in zip(PICTURES, bench_figures(sets), strict=True):
        figure.savefig(folder / name, dpi=120)


def bench_figures(sets: Mapping[str, Sequence[Cell]]) -> list[Figure]:
    """Draw one figure for each of PICTURES."""
    values: dict[str, Callable[[Summary], float | None]] = {
        "time per output token, median [ms]": lambda side: 1000 * side.tpot.median if side.tpot else None,
        "output tokens/s": lambda side: side.throughput,
        "accept length [tokens]": lambda side: side.accept_length,  # batching must not change it
    }
    return [draw_over_concurrency(sets, value, label) for label, value in values.items()]


def draw_over_concurrency(
    sets: Mapping[str, Sequence[Cell]], value: Callable[[Summary], float | None], label: str
) -> Figure:
    """Draw a line of `value` for each prompt set and side."""
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for number, (name, cells) in enumerate(sets.items()):
        for side, line in LINE_STYLES.items():
            measured = {cell.concurrency: value(cell.sides[side]) for cell in cells if side in cell.sides}
            points = {key: height for key, height in measured.items() if height is not None}
            if points:
                axes.plot(*zip(*points.items(), strict=True), f"o{line}C{number % 10}", label=f"{name}, {side}")
    loads = sorted({cell.concurrency for cells in sets.values() for cell in cells})
    axes.set_xscale("log", base=2)
    axes.set_xticks(loads, [str(load) for load in loads])
    axes.minorticks_off()
    axes.set_xlabel("concurrency")
    axes.set_ylim(bottom=0)
    axes.set_ylabel(label)
    if axes.lines:
        figure.legend(loc="outside lower center", ncols=2)
    return figure
