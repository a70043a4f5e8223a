"""The tables of the pages, made from the files in benchmarks/results.

    python benchmarks/tables.py        # writes them between the markers <!-- table: NAME --> and <!-- end of table -->

tests/test_numbers.py fails while a page and its files differ.
"""

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from eagle3.markdown import table

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "eagle3").glob("*/README.md"))]
MARKED = re.compile(r"(<!-- table: (\w+) -->\n)(.*?)(<!-- end of table -->)", re.DOTALL)
SETS = ("held out 3", "held out 7", "mt_bench 3", "gsm8k 3")
BEST = "8 answers to each prompt, 1 epoch, weight decay 0.1, Muon"


def main() -> None:
    for page in PAGES:
        text = page.read_text()
        if (new := filled(text)) != text:
            page.write_text(new)
            print(f"{page.relative_to(ROOT)} has new tables")


def filled(text: str) -> str:
    """The page with all its tables made again."""
    return MARKED.sub(lambda found: f"{found[1]}\n{TABLES[found[2]]()}\n\n{found[4]}", text)


def result(name: str) -> Any:
    return json.loads((RESULTS / name).read_text())


def markdown(titles: str, rows: Iterable[Iterable[str]]) -> str:
    return table(titles.split(" | "), rows)


def quickstart() -> str:
    """The last lines of benchmarks/quickstart.py."""
    found = result("quickstart.json")
    lines = ["chain steps   accept length (decoded)   validation, sampled answers"]
    for steps, value in found["accept_length"].items():
        lines.append(f"{steps:>11}   {value:>23.3f}   {found['simulated_accept_length_by_steps'][steps]:>27.3f}")
    lines += [
        f"lossless: {found['lossless']:.0%} of {found['held_out_prompts']} held-out prompts decode to the target's own "
        "tokens",
        f"{found['answer_tokens']} answer tokens, {found['train_seconds']:.0f} s of training, "
        f"{found['total_seconds']:.0f} s in all",
    ]
    return "\n".join(["```text", *lines, "```"])


def best() -> str:
    """The one table of the README."""
    heads, rows = by_name(), []
    for steps_of_chain in (3, 7):
        ours, reference = (kept(heads[name], f"held out {steps_of_chain}") for name in (BEST, "reference"))
        what = f"accept length on held-out prompts, {steps_of_chain} drafts in a row"
        rows.append([what, f"{reference:.3f}", f"**{ours:.3f}**", f"{ours / reference - 1:+.1%}".replace("%", " %")])
    for what, batch in (
        ("training speed, 4 documents of 128 to 2,048 tokens", "[128, 256, 512, 2048], a quarter prompt"),
        ("training speed, 1 document of 16,384 tokens", "1 x 16,384"),
    ):
        ours, theirs, ratios = raced(batch)
        rows.append([what, thousands(theirs), f"**{thousands(ours['bf16'])}**", f"{ratios['bf16']:.2f} x"])
    return markdown("what | SpecForge | eagle3 | gain", rows)


def raced(batch: str) -> tuple[dict[str, float], float, dict[str, float]]:
    """Return tokens a second of our ways and of SpecForge's fastest layout, and our ratios to it."""
    row = next(row for row in result("race.json")["steps"] if row["batch"] == batch)
    rates = {way: cost["tokens_per_s"] for way, cost in row["costs"].items()}
    ratios = row["over_fastest_specforge"]
    return {way: rates[way] for way in ratios}, max(rates[way] for way in rates if way not in ratios), ratios


def race() -> str:
    rows = []
    for row in result("race.json")["steps"]:
        ours, theirs, ratios = raced(row["batch"])
        memory = {way: cost["peak_gb"] for way, cost in row["costs"].items()}
        other = next(way for way in memory if row["costs"][way]["tokens_per_s"] == theirs)
        cells = [f"**{thousands(rate)}**, {memory[way]:.1f} GB ({ratios[way]:.2f} x)" for way, rate in ours.items()]
        rows.append([row["batch"], f"{thousands(theirs)}, {memory[other]:.1f} GB", *cells])
    return markdown("documents of a batch | SpecForge | eagle3, bf16 | `kernels.fp8=true`", rows)


def heads() -> str:
    found, rows = by_name(), []
    for title, name in HEADS.items():
        head = found[name]
        cells = [f"{kept(head, where):.3f}" for where in SETS]
        if name == BEST:
            gains = [kept(head, where) / kept(found["reference"], where) - 1 for where in SETS]
            cells = [f"**{cell}** ({gain:+.1%})".replace("%", " %") for cell, gain in zip(cells, gains, strict=True)]
        rows.append([title, seen(head), *cells])
    return markdown("head | answer tokens x epochs | held out, 3 steps | 7 steps | MT-bench, 3 | GSM8K, 3", rows)


EIGHT = "8 answers to each prompt, 1 epoch"
HEADS = {
    "SpecForge's loss": "reference",
    "ours with its settings (EAGLE-3, lr 1e-3, batches of 8,192)": "EAGLE-3, settings of the reference",
    "`experiment=head_quality`": "recipe",
    "- seed 1": "recipe, seed 1",
    "- seed 2": "recipe, seed 2",
    "- without EAGLE-3.1's norms": "EAGLE-3 without norms",
    "- `lm_head` not started from the target's rows": "lm_head not from the target",
    "- batches of 8,192 tokens": "batches of 8,192 tokens",
    "- 6 key/value heads, MLP of 672": "6 key/value heads, narrower MLP",
    "- layers 2, 6, 11 captured": "layers 2, 6, 11 captured",
    "- float8 products, MLP of 1,008": "float8 products",
    "- 16 epochs": "16 epochs",
    "- more data: conversations of many turns too": "more data: all rows",
    "- answers sampled at T = 1": "answers sampled at T = 1",
    "- greedy answers": "greedy answers",
    "- 2 answers to each prompt": "2 answers to each prompt, 4 epochs",
    "- 8 answers to each prompt, once each": EIGHT,
    "- 8 answers, seed 1": f"{EIGHT}, seed 1",
    "- 8 answers, seed 2": f"{EIGHT}, seed 2",
    "- 8 answers, one of them greedy": f"{EIGHT}, one of them greedy",
    "- 8 answers, weight decay 0.1 instead of 0.5": f"{EIGHT}, weight decay 0.1",
    "- **8 answers, weight decay 0.1, `optim=muon`**": BEST,
}
EPOCHS = 8  # of experiment=head_quality


def by_name() -> dict[str, Any]:
    return {head["name"]: head for head in result("head_quality.json")["heads"]}


def kept(head: Any, where: str) -> float:
    """Accept length without drafts behind an answer's end."""
    return head["decoded"][where]["accept_length_kept"]


def seen(head: Any) -> str:
    """Answer tokens of an epoch, and epochs."""
    given = dict(override.split("=", 1) for override in head.get("overrides", ()))
    return f"{head['answer_tokens_of_an_epoch']:,} x {given.get('trainer.max_epochs', EPOCHS)}"


def steps() -> str:
    float8 = {(row["tokens"], row["answer_share"]): row for row in result("train_step_fp8.json")["rows"]}
    rows = []
    for row in result("train_step.json")["rows"]:
        quick = float8.get((row["tokens"], row["answer_share"]))
        documents = "1 document" if row["documents"] == 1 else f"{row['documents']} documents"
        rows.append(
            [
                f"{row['tokens']:,}, {documents}, {share(row['answer_share'])}",
                f"**{thousands(row['tokens_per_s'])}**",
                f"{row['peak_gb']:.1f} GB",
                f"{row['step_ms']:.0f} ms",
                f"{row['share_of_ceiling']:.0%}".replace("%", " %"),
                thousands(quick["tokens_per_s"]) if quick else "-",
            ]
        )
    return markdown("tokens in a batch | tokens/s | memory | a step | of the ceiling | with `kernels.fp8=true`", rows)


def share(answers: float) -> str:
    return "all answers" if answers == 1 else f"{answers:.0%} answers".replace("%", " %")


def thousands(rate: float) -> str:
    """Tokens a second, to three digits."""
    return f"{rate / 1000:.0f} k" if rate >= 100_000 else f"{rate / 1000:.1f} k"


def trajectories() -> str:
    on_cpu, on_gpu = (
        {row["name"]: row["val/accept_length"] for row in result(name)["rows"]}
        for name in ("trajectories.json", "trajectories_gpu.json")
    )
    rows = []
    for title, name, follower in TRAJECTORIES:
        cells = []
        for found in (on_cpu, on_gpu):
            noise = f" (noise {found[follower]['noise']:.3f})" if follower and follower in found else ""
            cells.append(f"{found[name]['mean']:.3f}{noise}" if name in found else "-")
        rows.append([title, *cells])
    return markdown("run | CPU, packs of 512 tokens | H200, packs of 4,096", rows)


TRAJECTORIES = [  # what it is, its name, and the run whose noise is that of this one's seeds
    ("plain, float32", "reference", "reference"),
    ("bf16 autocast", "autocast", ""),
    ("chunked loss", "chunked", ""),
    ("padded attention", "padded", ""),
    ("fused layer", "fused", ""),
    ("bf16, flash attention, fused layer, chunked loss together", "fast", ""),
    ("gradient accumulation", "accumulation", ""),
    ("plain, float32, tight clipping", "clip", "clip-accumulation"),
    ("tight clipping, bf16 autocast", "clip-autocast", ""),
    ("tight clipping, all fast paths", "clip-fast", ""),
    ("tight clipping, gradient accumulation", "clip-accumulation", ""),
]


def adapted() -> str:
    """Accept lengths on the old and the new traffic, and how far they are from the adapted head's."""
    rows = []
    for title, name in ADAPTED.items():
        cells = []
        for kind in ("new", "old"):
            found = result("adapt.json")["heads"][name]["accept_length"][kind]
            away = found["difference"]
            beside = f" ({away['value']:+.3f}; {away['low']:+.3f} to {away['high']:+.3f})" if away else ""
            cells.append(f"{found['value']:.3f}{beside}")
        rows.append([title, *cells])
    return markdown("trained on | mathematics and prose | code and commands", rows)


ADAPTED = {
    "code and commands": "old",
    "a tenth of mathematics and prose, anew": "anew",
    "**the same tenth, `init_from` the first head**": "adapted",
    "that, with a tenth of code and commands beside it": "adapted_with_old",
    "all of mathematics and prose, anew": "anew_on_all",
}


def costs() -> str:
    found, training = result("llama8b_cost.json"), result("end_to_end.json")["runs"][0]
    answers, features = found["answers"], found["features"]
    batch, tokens = answers["batch"], training["tokens_per_s"]
    return markdown(
        "step | rate | GPU memory | on disk",
        [
            [
                f"answers ({batch} in a batch, 256 new tokens each)",
                f"{answers['answer_tokens_per_s']:,} answer tokens/s",
                f"{answers['peak_gb']:.0f} GB",
                "-",
            ],
            [
                "features (16,384 tokens a forward pass)",
                f"{features['tokens_per_s']:,} tokens/s",
                f"{features['peak_gb']:.0f} GB",
                f"{features['bytes_per_token'] / 1000:.1f} kB a token",
            ],
            [
                "training (packs of 16,384 tokens, half of them answers)",
                f"{thousands(tokens)} tokens/s, {thousands(training['anchors_per_s'])} of them answers",
                "-",
                "-",
            ],
        ],
    )


def parity() -> str:
    rows = []
    for title, shape in result("sglang_parity.json")["shapes"].items():
        served = shape["served"]
        ours = [shape["decoded"]["bfloat16"], shape["decoded"]["float32"], shape["replayed"]]
        cells = [f"{value:.3f} ({served / value - 1:+.1%})".replace("%", " %") for value in ours]
        same = [f"{shape['lossless'][dtype]:.1%}".replace("%", " %") for dtype in ("bfloat16", "float32")]
        rows.append([title, f"{served:.3f}", *cells, *same])
    return markdown(
        "draft | SGLang | our decoder, bf16 | our decoder, float32 | our drafter on SGLang's own texts | "
        "same answers, bf16 | float32",
        rows,
    )


def bench() -> str:
    rows = []
    for cell in result("sglang_bench/results.json")["cells"]:
        plain, head, gain = cell["sides"]["plain"], cell["sides"]["head"], cell["speed_ups"]["head"]["tpot"]
        times = " -> ".join(f"{1000 * side['tpot']['median']:.2f}" for side in (plain, head))
        value = f"{gain['value']:.2f}"
        rows.append(
            [
                cell["prompt_set"],
                str(cell["concurrency"]),
                times,
                f"**{value}**" if gain["low"] > 1 else value,
                f"{gain['low']:.2f} to {gain['high']:.2f}",
                f"{head['accept_length']:.2f}",
            ]
        )
    return markdown(
        "prompts | concurrency | ms a token, plain -> head | speed-up | 95 % interval | accept length", rows
    )


def tuned() -> str:
    found = result("sglang_tune/tune.json")
    plain, rows = found["plain"]["seconds_per_token"], []
    timed = [setting for setting in found["settings"] if setting["timed"]]
    for setting in sorted(timed, key=lambda each: each["timed"]["seconds_per_token"]):
        expected, measured = setting["accept_length"], setting["timed"]["gain"]["accept_length"]
        rows.append(
            [
                f"{setting['steps']}/{setting['topk']}/{setting['draft_tokens']}",
                f"{plain / setting['timed']['seconds_per_token']:.2f}",
                f"{expected:.3f}",
                f"{measured:.3f} ({measured / expected - 1:+.1%})".replace("%", " %"),
            ]
        )
    return markdown("steps/topk/draft tokens | speed-up | accept length replayed | served", rows)


def loads() -> str:
    found = result("sglang_tune_loads/tune.json")["loads"]
    rows = []
    for load, there in found.items():
        plain = there["plain"]["seconds_per_token"]
        timed = {each["steps"]: each["timed"]["seconds_per_token"] for each in there["settings"] if each["timed"]}
        ratios = {steps: plain / timed[steps] for steps in sorted(timed)}
        best = max(ratios.values())
        shown = [f"**{ratio:.2f}**" if ratio == best > 1 else f"{ratio:.2f}" for ratio in ratios.values()]
        rows.append([load, f"{1000 * plain:.2f}", *shown])
    return markdown(f"concurrency | plain, ms a token | {' | '.join(f'chain of {steps}' for steps in ratios)}", rows)


def adaptive() -> str:
    rows = []
    for cell in result("sglang_bench_adaptive/results.json")["cells"]:
        gains = [cell["speed_ups"][side] for side in ("head", "adaptive")]
        shown = [f"{gain[what]['value']:.2f}" for gain in gains for what in ("tpot", "throughput")]
        sides = [f"{cell['sides'][side]['accept_length']:.2f}" for side in ("head", "adaptive")]
        plain = 1000 * cell["sides"]["plain"]["tpot"]["median"]
        rows.append([str(cell["concurrency"]), f"{plain:.2f}", *shown, *sides])
    return markdown(
        "concurrency | plain, ms a token | chain of 6: time | throughput | adaptive: time | throughput | "
        "accept length of 6 | adaptive",
        rows,
    )


def long_answers() -> str:
    found, table_rows = result("long_answers.json"), []
    for sampling in ("greedy", "sampled"):
        for positions in dict.fromkeys(row["positions"] for row in found[sampling]):
            cells = []
            for steps in (3, 7):
                ours, reference = (
                    row for row in found[sampling] if (row["steps"], row["positions"]) == (steps, positions)
                )
                for row in (ours, reference):
                    length = row["accept_length"]
                    cells.append(f"{length['value']:.2f} ± {length['standard_error']:.2f}")
            table_rows.append([sampling, positions, *cells])
    return markdown("answers | tokens before the round | chain of 3 | reference | chain of 7 | reference", table_rows)


def bounds() -> str:
    found, table_rows = result("bounds.json")["heads"], []
    for title, name in (
        ("SpecForge's loss", "reference"),
        ("`loss=cross_entropy_tv`", "cross-entropy_+_tv"),
        ("`loss=lk`", "lk"),
    ):
        seeds = [head for folder, head in found.items() if folder.rsplit("-", 1)[0] == name]
        means = [
            sum(head[states][steps] for head in seeds) / len(seeds)
            for steps in ("3", "7")
            for states in ("drafts", "oracle")
        ]
        table_rows.append([title, *(f"{mean:.3f}" for mean in means)])
    columns = "head | 3 steps, own states | the target's states | 7 steps, own states | the target's states"
    return markdown(columns, table_rows)


def losses() -> str:
    found = result("losses.json")["changes"]
    rows = []
    for title, name in LOSSES.items():
        cells = []
        for steps in (3, 7):
            change = found[f"all, chain of {steps}, greedy"][name]
            low, high = change["interval"]
            cells.append(f"{change['accept_length_change']:+.1%} ({low:+.1%} to {high:+.1%})".replace("%", " %"))
        rows.append([title, *cells])
    return markdown("loss | chain of 3 | chain of 7", rows)


LOSSES = {
    "`loss=cross_entropy_tv`": "cross-entropy + TV",
    "`loss=lk`": "LK",
    "reverse KL": "reverse KL",
    "total variation": "total variation",
}


TABLES: dict[str, Callable[[], str]] = {
    table.__name__: table
    for table in (
        quickstart, best, heads, race, steps, adapted, trajectories, costs, parity, bench, tuned, loads, adaptive,
        long_answers, bounds, losses,
    )
}  # fmt: skip

if __name__ == "__main__":
    main()
