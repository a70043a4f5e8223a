"""Pictures of a bench run: time per token and throughput over concurrency, accept length of each prompt set."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from matplotlib import colormaps
from matplotlib.axes import Axes
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
    """Draw time per output token and throughput over concurrency, and the accept lengths: in the order of PICTURES."""
    return [
        draw_over_concurrency(
            sets,
            lambda side: 1000 * side.tpot.median if side.tpot else None,
            "time per output token, median [ms]",
        ),
        draw_over_concurrency(sets, lambda side: side.throughput, "output tokens/s"),
        draw_accept_lengths(sets),
    ]


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
    set_loads(axes, sorted({cell.concurrency for cells in sets.values() for cell in cells}))
    axes.set_ylim(bottom=0)
    axes.set_ylabel(label)
    if axes.lines:
        figure.legend(loc="outside lower center", ncols=2)
    return figure


def set_loads(axes: Axes, loads: Sequence[int]) -> None:
    """Let each load have its place on a logarithmic axis."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(loads, [str(load) for load in loads])
    axes.minorticks_off()
    axes.set_xlabel("concurrency")


def draw_accept_lengths(sets: Mapping[str, Sequence[Cell]]) -> Figure:
    """Draw a bar for each prompt set and concurrency: batching must not change what is accepted."""
    lengths = {
        (name, cell.concurrency): cell.sides["head"].accept_length
        for name, cells in sets.items()
        for cell in cells
        if "head" in cell.sides
    }
    levels = sorted({concurrency for _, concurrency in lengths})
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / max(len(levels), 1)
    for place, level in enumerate(levels):
        heights = [lengths.get((name, level)) or 0.0 for name in sets]
        colour = colormaps["viridis"](0.9 * place / max(len(levels) - 1, 1))
        places = [number + place * width for number in range(len(sets))]
        axes.bar(places, heights, width, color=colour, label=f"concurrency {level}")
    axes.set_xticks([number + 0.4 - width / 2 for number in range(len(sets))], list(sets))
    axes.axhline(1, color="grey", linewidth=0.8)
    axes.set_ylabel("accept length [tokens]")
    if levels:
        figure.legend(loc="outside lower center", ncols=4)
    return figure
