"""A sweep in one picture: the jobs as lines over the swept keys, and how much each key decides."""

import math
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from scipy import stats

MOST_VALUES = 5  # of a key that are grouped each by itself, or labelled; more numbers are taken in thirds
DECADES = 1.0  # positive numbers that reach over more than so many lie on a logarithmic axis
SPREAD = 0.05  # of an axis: jobs with the same value run beside one another, the better the higher
LONGEST = 16  # of a key on one line
BOX = {"facecolor": "white", "alpha": 0.75, "edgecolor": "none", "pad": 0.8}  # behind a label that lies over lines


@dataclass(frozen=True)
class Job:
    """What one job was told of the swept keys, as text, and what came out."""

    settings: Mapping[str, str]
    score: float


def sweep_figure(jobs: Sequence[Job], *, metric: str, smaller_is_better: bool, title: str) -> Figure:
    """Draw jobs that have a score over keys with at least two values."""
    keys = list(jobs[0].settings)
    figure = Figure(figsize=(4.2 + 1.7 * (len(keys) + 1), 4.4), layout="constrained")
    lines, bars = figure.subplots(1, 2, width_ratios=[1.2 * (len(keys) + 1), 2])
    _draw_jobs(lines, jobs, metric, smaller_is_better)
    scores = [job.score for job in jobs]
    _draw_importance(bars, {key: importance([job.settings[key] for job in jobs], scores) for key in keys})
    figure.suptitle(title)
    return figure


def importance(values: Sequence[str], scores: Sequence[float]) -> float | None:
    """Return the share of the variance of the scores' ranks that lies between a key's values: ε² of Kruskal and Wallis
    (scipy.stats.kruskal), 0 for what chance gives; more than five numbers are taken in thirds. None where no value was
    tried twice."""
    groups: dict[Hashable, list[float]] = defaultdict(list)
    for group, score in zip(_groups(values), scores, strict=True):
        groups[group].append(score)
    if not 1 < len(groups) < len(scores):
        return None
    if len(set(scores)) == 1:
        return 0.0
    statistic = stats.kruskal(*groups.values()).statistic
    return max(0.0, float((statistic - len(groups) + 1) / (len(scores) - len(groups))))


def _groups(values: Sequence[str]) -> Sequence[Hashable]:
    numbers = _numbers(values)
    if numbers is None or len(set(values)) <= MOST_VALUES:
        return values
    return np.digitize(numbers, np.quantile(numbers, [1 / 3, 2 / 3])).tolist()


def _numbers(values: Sequence[str]) -> list[float] | None:
    """Return the values as numbers, None where one is none."""
    try:
        found = [float(value) for value in values]
    except ValueError:
        return None
    return found if all(map(math.isfinite, found)) else None


# --- parallel coordinates --------------------------------------------------------------------------------------------


def _draw_jobs(axes: Axes, jobs: Sequence[Job], metric: str, smaller_is_better: bool) -> None:
    """Draw a line for each job over axes of their own scales, the better the later and the brighter."""
    keys, scores = list(jobs[0].settings), [job.score for job in jobs]
    columns = [_heights([job.settings[key] for job in jobs]) for key in keys]
    low, high = min(scores), max(scores)
    columns.append(([(score - low) / (high - low or 1) for score in scores], {f"{low:.3f}": 0.0, f"{high:.3f}": 1.0}))
    colours, place_of = colormaps["viridis_r" if smaller_is_better else "viridis"], Normalize(low, high)
    ranked = sorted(range(len(jobs)), key=lambda number: scores[number], reverse=smaller_is_better)
    for rank, number in enumerate(ranked):
        best = number == ranked[-1]
        apart = SPREAD * (rank / max(1, len(ranked) - 1) - 0.5)
        heights = [found[number] + apart for found, _ in columns[:-1]] + [columns[-1][0][number]]
        colour = "tab:red" if best else colours(place_of(scores[number]))
        axes.plot(heights, color=colour, linewidth=2.5 if best else 1.3, alpha=1 if best else 0.75)
    for place, (_, ticks) in enumerate(columns):
        axes.axvline(place, color="0.4", linewidth=0.8)
        for label, height in ticks.items():
            axes.annotate(
                label,
                (place, height),
                xytext=(4, 0),
                textcoords="offset points",
                va="center",
                fontsize="small",
                bbox=BOX,
            )
    axes.set_xticks(range(len(columns)), [_broken(name) for name in (*keys, metric)])
    axes.set_xlim(-0.1, len(columns) - 0.55)
    axes.set_yticks([])
    axes.spines[:].set_visible(False)
    axes.set_title("jobs (red: the best)", fontsize="medium")


def _heights(values: Sequence[str]) -> tuple[list[float], dict[str, float]]:
    """Return where on an axis from 0 to 1 each value lies, and which labels stand there."""
    numbers = _numbers(values)
    if numbers is None:
        places = {value: float(place) for place, value in enumerate(sorted(set(values)))}
        numbers = [places[value] for value in values]
    elif min(numbers) > 0 and math.log10(max(numbers) / min(numbers)) >= DECADES:
        numbers = [math.log10(number) for number in numbers]
    low, high = min(numbers), max(numbers)
    heights = [(number - low) / (high - low or 1) for number in numbers]
    labels = dict(zip(values, heights, strict=True))
    if len(labels) > MOST_VALUES and _numbers(values) is not None:
        labels = {value: height for value, height in labels.items() if height in (0, 1)}
    return heights, {_short(value): height for value, height in labels.items()}


def _short(value: str) -> str:
    numbers = _numbers([value])
    return f"{numbers[0]:.3g}" if numbers else value if len(value) <= 18 else f"{value[:8]}…{value[-8:]}"


def _broken(name: str) -> str:
    """Return a long name on several lines."""
    return (
        name if len(name) <= LONGEST else name.replace(".", "\n.").replace("/", "/\n").replace("_accept", "_\naccept")
    )


# --- importance ------------------------------------------------------------------------------------------------------


def _draw_importance(axes: Axes, found: Mapping[str, float | None]) -> None:
    known = sorted(((value, key) for key, value in found.items() if value is not None))
    axes.set_title("what decides (ε² of ranks)", fontsize="medium")
    axes.set_xlim(0, 1)
    axes.spines[["top", "right"]].set_visible(False)
    if not known:
        axes.set_yticks([])
        axes.text(0.5, 0.5, "no value was tried twice", ha="center", transform=axes.transAxes, color="0.5")
        return
    bars = axes.barh([key for _, key in known], [value for value, _ in known], 0.5, color="tab:blue")
    axes.bar_label(bars, [f"{value:.2f}" for value, _ in known], padding=3)
