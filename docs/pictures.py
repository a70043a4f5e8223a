"""Draws the pictures of docs/concepts and docs/results, and the README's badges: python docs/pictures.py

Those of the results show numbers of benchmarks/results; tests/test_pages.py fails while one shows another number.
Every picture has a dark version of its colours, background included, for readers who prefer a dark page.
"""

import io
import re
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS.parent / "benchmarks"))
import tables  # noqa: E402

BLUE, GREEN, GREY, RED, LINE = "#dbe8f8", "#dff0df", "#eeeeee", "#f6dddd", "#445566"
pyplot.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "eagle3", "font.size": 11}
OURS, LIGHT, THEIRS, OTHER, GUIDE = "#2f5a9e", "#628fda", "#84909f", "#a65a12", "#666666"
DARK = {
    "#ffffff": "#0d1117", "#000000": "#c9d1d9", BLUE: "#1d3a5f", GREEN: "#1d3f2a", GREY: "#30363d", RED: "#5a2328",
    LINE: "#9fb0c3", OURS: "#4f8fe8", LIGHT: "#b6d3fb", THEIRS: "#75818f", OTHER: "#e09a4f", GUIDE: "#8b949e",
}  # fmt: skip
SHOWN_HEADS = {
    "SpecForge's loss": "reference",
    "ours, its settings": "EAGLE-3, settings of the reference",
    "experiment=head_quality": "recipe",
    "8 answers to each prompt, Muon": tables.BEST,
}


def main() -> None:
    for name, drawn in badges().items():
        (DOCS / "badges" / f"{name}.svg").write_text(drawn)
    pipeline()
    unroll()
    anchors()
    accept_length()
    for draw in RESULTS:
        with pyplot.rc_context({"font.size": 10}):
            figure = pyplot.figure(figsize=(7.2, 2.9), layout="constrained")
            draw(figure)
        for axes in figure.axes:
            axes.spines[["top", "right"]].set_visible(False)
        save(figure.axes[0], f"results/{draw.__name__}", draw.__doc__.partition(";")[0])


def badges() -> dict[str, str]:
    """The README's badges, from pyproject.toml."""
    project = tomllib.loads((DOCS.parent / "pyproject.toml").read_text())["project"]
    first, end = re.findall(r"3\.(\d+)", project["requires-python"])
    return {
        "license": badge("licence", project["license"]),
        "python": badge("python", " | ".join(f"3.{minor}" for minor in range(int(first), int(end)))),
    }


def badge(label: str, value: str) -> str:
    left, right = (7 * len(text) + 12 for text in (label, value))
    return f"""<svg xmlns="http://www.w3.org/2000/svg" width="{left + right}" height="20" role="img">
<title>{label}: {value}</title>
<rect width="{left + right}" height="20" rx="3" fill="{OURS}"/><rect width="{left}" height="20" rx="3" fill="#444444"/>
<g fill="#ffffff" font-family="Verdana, DejaVu Sans, sans-serif" font-size="11" text-anchor="middle">
<text x="{left / 2}" y="14">{label}</text><text x="{left + right / 2}" y="14">{value}</text></g></svg>
"""


def pipeline() -> None:
    """Folders in the order in which they are made, and below them the script behind each arrow."""
    axes = canvas(12.6, 2.3)
    folders = ["raw\nconversations", "clean\nprompts", "the target's\nanswers", "feature\nshards"]
    folders += ["draft head\ncheckpoint", "exported\nhead"]
    stages = ["prompts", "answers", "features", "training", "export"]
    scripts = {"precompute.py": (1, 3), "train.py": (4, 4), "serve.py": (5, 5)}  # its first arrow and its last
    for number, folder in enumerate(folders):
        box(axes, 2.15 * number, 0.95, 1.6, 0.8, folder, GREY if number == 0 else GREEN)
        if number:
            arrow(axes, (2.15 * number - 0.55, 1.35), (2.15 * number, 1.35))
            axes.text(2.15 * number - 0.28, 1.85, stages[number - 1], ha="center", va="bottom", fontsize=9.5)
    for script, (first, last) in scripts.items():
        left, right = 2.15 * first - 0.5, 2.15 * last + 1.55
        axes.plot([left, left, right, right], [0.75, 0.65, 0.65, 0.75], color=LINE)
        axes.text((left + right) / 2, 0.2, script, ha="center", fontsize=10)
    save(
        axes, "concepts/pipeline", "Raw conversations become prompts, answers, feature shards, a head and a checkpoint"
    )


def unroll() -> None:
    """One anchor of the example in eagle3/head/anchors.py: the last prompt token, three TTT steps."""
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
    save(axes, "concepts/unroll", "Training-time test: three steps of the draft head from one anchor")


def anchors() -> None:
    """The example of docs/concepts/anchors.md: tokens, and below them the chain of each anchor."""
    axes = canvas(10.2, 4.0)
    tokens = ["p0", "p1", "A", "B", "C", "end"]
    for place, token in enumerate(tokens):
        left = 2.3 + 1.3 * place
        box(axes, left, 3.1, 1.2, 0.55, token, GREY if place < 2 else GREEN)
        axes.text(left + 0.6, 3.75, str(place), ha="center", fontsize=9)
    axes.text(0.1, 3.37, "prompt, then answer", va="center", fontsize=10)
    for row, anchor in enumerate((1, 2, 3)):
        bottom = 2.2 - 0.85 * row
        axes.text(0.1, bottom + 0.27, f"anchor {anchor}", va="center", fontsize=10)
        box(axes, 2.3 + 1.3 * anchor, bottom, 1.2, 0.55, f"h_{anchor}", BLUE)
        box(axes, 2.3 + 1.3 * (anchor + 1), bottom, 1.2, 0.55, f"{tokens[anchor + 1]}, given", GREY)
        for step, token in enumerate(tokens[anchor + 2 :]):
            box(axes, 2.3 + 1.3 * (anchor + 2 + step), bottom, 1.2, 0.55, f"{token}, step {step}", GREEN)
    save(
        axes,
        "concepts/anchors",
        "Anchors 1, 2 and 3 of an answer A B C end after a prompt p0 p1, and what each step predicts",
    )


def accept_length() -> None:
    """Three rounds of a chain of three drafts: accepted and rejected drafts, and the target's own token."""
    axes = canvas(10.2, 3.6)
    rounds = [(["sits", "on", "my"], 2, "the"), (["rug", ".", "end"], 0, "mat"), ([",", "and", "purrs"], 3, "end")]
    for number, (drafts, accepted, own) in enumerate(rounds):
        bottom = 2.6 - 0.9 * number
        axes.text(0.1, bottom + 0.3, f"round {number + 1}", va="center", fontsize=10)
        for place, token in enumerate(drafts):
            mark, colour = ("✓", GREEN) if place < accepted else ("✗", RED)
            box(axes, 1.3 + 1.5 * place, bottom, 1.3, 0.6, f"{token} {mark}", colour)
        box(axes, 6.0, bottom, 1.3, 0.6, own, BLUE)
        axes.text(7.6, bottom + 0.3, f"{accepted} accepted + 1 = {accepted + 1}", va="center", fontsize=10)
    for left, title in ((3.45, "drafts of the head"), (6.65, "by the target"), (8.8, "tokens")):
        axes.text(left, 3.35, title, ha="center", fontsize=10)
    tokens = sum(accepted + 1 for _, accepted, _ in rounds)
    told = f"{tokens} tokens in {len(rounds)} passes of the target: accept length {tokens / len(rounds):.2f}"
    axes.text(10.0, 0.3, told, ha="right", va="center", fontsize=11)
    save(
        axes,
        "concepts/accept_length",
        "Three rounds: two, none and three of three drafts are accepted, so three passes give eight tokens",
    )


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
    """Write a picture with the rules that replace its colours in dark mode."""
    drawn = io.StringIO()
    axes.figure.savefig(drawn, format="svg", facecolor="white", metadata={"Date": None, "Title": title})
    rules = [
        f'[style*="{part}: {light}"] {{{part}: {dark} !important}}\n'
        for light, dark in DARK.items()
        for part in ("fill", "stroke")
    ]
    style = f"@media (prefers-color-scheme: dark) {{\ntext {{fill: #e6edf3}}\n{''.join(rules)}}}</style>"
    (DOCS / f"{name}.svg").write_text(drawn.getvalue().replace("</style>", style, 1))


def heads(figure: Figure) -> list[str]:
    """Accept length of four heads on held-out prompts, chains of 7, with standard errors; return the numbers shown."""
    found = [tables.by_name()[name] for name in SHOWN_HEADS.values()]
    values = [tables.kept(head, "held out 7") for head in found]
    # The error is of the accept length that counts drafts past an answer's end, too: larger by 0.01 to 0.04.
    errors = [head["decoded"]["held out 7"]["standard_error"] for head in found]
    axes, shown = figure.subplots(), [f"{value:.3f}" for value in values]
    bars = axes.barh(list(SHOWN_HEADS), values, color=[THEIRS, *[OURS] * 3], xerr=errors, ecolor="#000000", capsize=3)
    axes.bar_label(bars, shown, padding=3)
    axes.set(xlim=(1, 3), xlabel="accept length ± standard error, chains of 7 (1: no head)")
    axes.invert_yaxis()
    return shown


def race(figure: Figure) -> list[str]:
    """Tokens a second of a training step, compared with those of other trainers; return the numbers shown."""
    steps = tables.raced("speculators")  # SpecForge was timed on one more batch
    panels, shown = figure.subplots(1, 2, sharey=True), []
    for axes, peer in zip(panels, tables.PEERS, strict=True):
        ways = {peer: ([tables.fastest(row, peer) for row in steps], THEIRS)}
        for way, label, colour in zip(
            steps[0]["over"][peer], ("eagle3, bf16", "eagle3, float8"), (OURS, LIGHT), strict=True
        ):
            ways[label] = ([row["costs"][way] for row in steps], colour)
        for number, (label, (costs, colour)) in enumerate(ways.items()):
            texts = [f"{cost['tokens_per_s'] / 1000:.1f}" for cost in costs]
            places = [place + 0.27 * (number - 1) for place in range(len(steps))]
            rates = [cost["tokens_per_s"] / 1000 for cost in costs]
            axes.bar_label(axes.bar(places, rates, 0.25, label=label, color=colour), texts, padding=2, fontsize=7)
            shown += texts
        titles = ["4 of 128\nto 2,048" if row["batch"].startswith("[") else row["batch"] for row in steps]
        axes.set_xticks(range(len(steps)), titles)
        axes.set_xlabel("documents x tokens in a batch")
        axes.margins(y=0.32)
        axes.legend(frameon=False, loc="upper right", fontsize=8)
    panels[0].set(ylabel="thousand tokens/s, one H200")
    return shown


def speed_up(figure: Figure) -> list[str]:
    """Speed-up of the 1.5 B target over concurrency with its interval, by prompt set; return the numbers shown."""
    shown = []
    figure.set_size_inches(9.6, 3.6)
    cells = tables.served_cells(*tables.SERVED_1_5B)
    for axes, sets in zip(figure.subplots(1, 2, sharey=True), SPEED_UPS, strict=True):
        curves = []
        for (prompt_set, label), colour in zip(sets.items(), (OURS, OTHER), strict=True):
            gains = {
                load: cell["speed_ups"]["head"]["tpot"] for (name, load), cell in cells.items() if name == prompt_set
            }
            places, values = [*gains], [gain["value"] for gain in gains.values()]
            low, high = ([gain[end] for gain in gains.values()] for end in ("low", "high"))
            axes.fill_between(places, low, high, facecolor=(colour, 0.15), edgecolor=colour, linewidth=0.6)
            axes.plot(places, values, marker="o", color=colour, label=label)
            curves.append(values)
        for values, others in (curves, curves[::-1]):
            for end in (0, -1):
                lift = 8 if values[end] > others[end] else -16
                axes.annotate(
                    f"{values[end]:.2f}", (places[end], values[end]), xytext=(0, lift), textcoords="offset points",
                    ha="center",
                )  # fmt: skip
                shown.append(f"{values[end]:.2f}")
        axes.axhline(1, color=GUIDE, linewidth=0.8, linestyle="--", label="the same server without a head")
        axes.set_xscale("log", base=2)
        axes.set_xticks(places, [str(place) for place in places])
        axes.set(xlabel="concurrent requests", xlim=(0.8, 80), ylim=(0, 2.8))
        axes.legend(frameon=False, loc="upper right", fontsize=9)
    figure.axes[0].set_ylabel("times as fast per token")
    return shown


SPEED_UPS = (
    {"held_out": "prompts like the training's", "mt_bench": "MT-bench"},
    {"gsm8k": "GSM8K", "humaneval": "HumanEval"},
)


def growth(figure: Figure) -> list[str]:
    """Tokens a second and memory over hidden size, document length, answer share and GPUs; return the numbers shown."""
    found, shown = tables.result("growth.json"), []
    figure.set_size_inches(9.6, 4.4)
    panels = figure.subplots(2, len(GROWTH) + 1, sharex="col", sharey="row")
    for (name, (title, ticks)), (rate, memory) in zip(GROWTH.items(), panels.T[:-1], strict=True):
        rows = found[name]
        places, rates, gigabytes = ([row[key] for row in rows] for key in (name, "tokens_per_s", "peak_gb"))
        alone = [each / row["share_of_ceiling"] for each, row in zip(rates, rows, strict=True)]
        rate.plot(places, alone, color=GUIDE, linewidth=0.8, linestyle="--", label="its matmuls alone")
        rate.plot(places, rates, marker="o", markersize=4, color=OURS, label="a step")
        memory.plot(places, gigabytes, marker="o", markersize=4, color=OTHER)
        for end in (0, -1):
            texts = tables.thousands(rates[end]), f"{gigabytes[end]:.1f} GB"
            below, above = ({"xytext": (0, lift), "textcoords": "offset points", "ha": "center"} for lift in (-16, 7))
            rate.annotate(texts[0], (places[end], rates[end]), **below)
            memory.annotate(texts[1], (places[end], gigabytes[end]), **above)
            shown += texts
        rate.set(xscale="log", yscale="log")
        memory.margins(0.2)
        rate.margins(0.2)
        rate.minorticks_off()
        memory.set_xticks(ticks, [f"{tick:,}" if tick > 1 else f"{100 * tick:.0f}" for tick in ticks])
        rate.tick_params(labelbottom=True)
        memory.set_xlabel(title)
        rate.set_xlabel(title)
    rows = tables.result("growth_gpus.json")["gpus"]
    places, rates = ([row[key] for row in rows] for key in ("gpus", "tokens_per_s"))
    several, nothing = panels.T[-1]
    several.plot(
        places, [rates[0] * place for place in places], color=GUIDE, linewidth=0.8, linestyle=":", label="linear"
    )
    several.plot(places, rates, marker="o", markersize=4, color=OURS)
    for place, rate in zip(places, rates, strict=True):
        shown.append(tables.thousands(rate))
        several.annotate(shown[-1], (place, rate), xytext=(0, -16), textcoords="offset points", ha="center")
    several.set(xscale="log", yscale="log", xlabel="GPUs")
    several.minorticks_off()
    several.set_xticks(places, [str(place) for place in places])
    several.tick_params(labelbottom=True)
    several.margins(0.2)
    several.legend(frameon=False)
    nothing.set_axis_off()
    panels[0, 0].set_yticks([30_000, 100_000, 300_000], ["30", "100", "300"])
    panels[0, 0].set(ylabel="thousand tokens/s")
    panels[1, 0].set(ylabel="GPU memory, GB", ylim=0)
    panels[0, 1].legend(frameon=False, loc="upper right")
    return shown


GROWTH = {
    "hidden_size": ("hidden size", (576, 8192)),
    "document_tokens": ("tokens of a document", (512, 4096, 32768)),
    "answer_share": ("answers, % of all tokens", (0.05, 0.2, 1)),
}
RESULTS: tuple[Callable[[Figure], list[str]], ...] = (heads, race, speed_up, growth)

if __name__ == "__main__":
    main()
