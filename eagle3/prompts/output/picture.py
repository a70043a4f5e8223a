"""report.png: rows of each source and how many became prompts, the reasons, the traffic mix before and after."""

from collections import Counter
from typing import IO, Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

SHOWN_REASONS = 12  # the commonest; the others are one bar
LONGEST_LABEL = 40
OTHERS = "other reasons"


def draw(ledger: dict[str, Any], file: IO[bytes]) -> None:
    """Draw the picture; with the same version of matplotlib the same ledger gives the same bytes."""
    sources, mixes = ledger["sources"], (ledger["traffic"] or {"features": {}})["features"]
    reasons = _reasons(sources)
    heights = [1.2 + 0.35 * len(sources), 1.2 + 0.3 * len(reasons), *[2.2] * len(mixes)]
    figure = Figure(figsize=(11, sum(heights)), layout="constrained")
    axes = figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0]
    rows = {name: (source["rows"], f"{source['prompts']:,} of {source['rows']:,}") for name, source in sources.items()}
    _draw_bars(axes[0], "rows in, prompts out", rows)
    axes[0].barh(range(len(sources)), [source["prompts"] for source in sources.values()])
    _draw_bars(axes[1], "why rows are not prompts", {reason: (n, f"{n:,}") for reason, n in reasons.items()})
    for axis, (name, mix) in zip(axes[2:], mixes.items(), strict=True):
        _draw_mix(axis, name, mix)
    figure.savefig(file, dpi=110, format="png", metadata={"Software": None})


def _reasons(sources: dict[str, Any]) -> dict[str, int]:
    """Count rows by reason over all sources, the commonest first."""
    total: Counter[str] = sum((Counter(source["rejected"]) for source in sources.values()), Counter())
    ordered = sorted(total.items(), key=lambda item: (-item[1], item[0]))
    rest = sum(rows for _, rows in ordered[SHOWN_REASONS:])
    return dict(ordered[:SHOWN_REASONS]) | ({OTHERS: rest} if rest else {})


def _draw_bars(axis: Axes, title: str, bars: dict[str, tuple[int, str]]) -> None:
    """Draw a horizontal bar of rows for each name, with its text at the end."""
    drawn = axis.barh(range(len(bars)), [rows for rows, _ in bars.values()], color="tab:orange")
    axis.bar_label(drawn, [text for _, text in bars.values()], fontsize="small", padding=3)
    axis.set_yticks(range(len(bars)), [_label(name) for name in bars])
    axis.margins(x=0.15)
    axis.invert_yaxis()
    axis.set(xlabel="rows", title=title)


def _draw_mix(axis: Axes, name: str, mix: dict[str, Any]) -> None:
    shown = [(key, mix[key]) for key in ("before", "after", "target") if mix[key] is not None]
    width = 0.8 / len(shown)
    for number, (key, shares) in enumerate(shown):
        axis.bar([place + number * width for place in range(len(shares))], shares, width, label=key)
    axis.set_xticks(
        [place + 0.4 - width / 2 for place in range(len(mix["bins"]))], [_label(bin) for bin in mix["bins"]]
    )
    axis.tick_params(axis="x", labelsize="small")
    axis.set(title=_label(name), ylabel="share")
    axis.legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))


def _label(text: str) -> str:
    """Shorten to ASCII: the font has no other letters, and "$" would start a formula."""
    plain = text.encode("ascii", "replace").decode().replace("$", "\\$")
    return plain if len(plain) <= LONGEST_LABEL else f"{plain[: LONGEST_LABEL - 3]}..."
