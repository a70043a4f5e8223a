"""The tables of the pages, made from the files in benchmarks/results; those that only print numbers are in tables.txt.

    python benchmarks/tables.py        # writes them between the markers <!-- table: NAME --> and <!-- end of table -->

Below each table, except on the README, a line names its files with their date, commit and machine.

tests/test_numbers.py fails while a page and its files differ.
"""

import json
import re
import string
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

from quickstart import table as last_lines

from eagle3.markdown import table

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "eagle3").glob("*/README.md"))]
MARKED = re.compile(r"(<!-- table: (\w+) -->\n)(.*?)(<!-- end of table -->)", re.DOTALL)
SETS = ("held out 3", "held out 7", "mt_bench 3", "gsm8k 3")
BEST = "8 answers to each prompt, 1 epoch, weight decay 0.1, Muon"
READ: dict[str, Any] = {}  # the result files that the table at hand was made from, by name


def main() -> None:
    for page in PAGES:
        if (new := filled(page)) != page.read_text():
            page.write_text(new)
            print(f"{page.relative_to(ROOT)} has new tables")


def filled(page: Path) -> str:
    """The page with all its tables made again."""
    has_sources = page.parent != ROOT
    return MARKED.sub(lambda found: f"{found[1]}\n{made(found[2], has_sources)}\n\n{found[4]}", page.read_text())


def made(name: str, has_sources: bool) -> str:
    READ.clear()
    table = TABLES[name]()
    return f"{table}\n\n{sources()}" if has_sources else table


def sources() -> str:
    """The files that the table at hand was made from: their date, commit and machine."""
    names: dict[str, list[str]] = {}
    for name, found in READ.items():
        facts = f"{found['date']}, commit {found['commit']}, {short(found['machine'])}"
        names.setdefault(facts, []).append(f"[{name}](../../benchmarks/results/{name})")
    return "From " + "; ".join(f"{', '.join(same)} ({facts})" for facts, same in names.items()) + "."


def short(machine: str) -> str:
    return re.sub(r"NVIDIA (\w+)( 80GB HBM3)?", r"\1", machine).replace("x86_64 ", "")


def result(name: str) -> Any:
    READ[name] = json.loads((RESULTS / name).read_text())
    return READ[name]


def markdown(titles: str, rows: Iterable[Iterable[str]]) -> str:
    return table(titles.split(" | "), rows)


def percent(share: float, form: str = "+.1%") -> str:
    return f"{share:{form}}".replace("%", " %")


def quickstart() -> str:
    """The last lines of benchmarks/quickstart.py."""
    return f"```text\n{last_lines(result('quickstart.json'))}\n```"


def best() -> str:
    """What was measured, on one page: docs/results/overview.md."""
    rows = [*accept_lengths(), no_data(), training_speed(), *serving_gains(), time_to_head()]
    return markdown("what | result | compared with", rows)


def accept_lengths() -> list[list[str]]:
    rows = []
    default = " / ".join(f"**{on_public_target('heldout', drafts, 'greedy')[0]:.2f}**" for drafts in DRAFTS)
    rows.append(["accept length, chains of 3 / 7 and a tree of 16", default, "1 without a head"])
    heads = result(SPECFORGE)["heads"]
    seeds = result(SEEDS)["after_training"]["heldout"]["accept_length"]

    def over_seeds(first: str, *others: str, drafts: str) -> float:  # the first is of a run of its own
        lengths = [seeds[f"{drafts}, greedy"][name]["accept_length"] for name in others]
        return mean([heads["curves"][first][-1]["accept_length"][f"all, {drafts}, greedy"], *lengths])

    of_ours = partial(over_seeds, "ours, recipe", "ours, seed 1", "ours, seed 2")
    of_theirs = partial(over_seeds, "SpecForge, lr 0.001", "SpecForge, seed 1", "SpecForge, seed 2")
    ours = " / ".join(f"**{of_ours(drafts=drafts):.2f}**" for drafts in DRAFTS)
    theirs = " / ".join(f"{of_theirs(drafts=drafts):.2f}" for drafts in DRAFTS)
    longer = " / ".join(
        f"{seeds[f'{drafts}, greedy']['SpecForge, 10 epochs']['accept_length']:.2f}" for drafts in DRAFTS
    )
    theirs = f"{theirs}, SpecForge, the best of three learning rates; ten epochs, one seed: {longer}"
    rows.append(
        ["same head shape, `lm_head` trained, six epochs, mean of three seeds, two on new answers", ours, theirs]
    )
    theirs, ours = (
        next(iter(result(name)["heads"]["curves"].values()))[-1]
        for name in ("race_speculators.json", "race_speculators_fixed.json")
    )
    told = [
        " / ".join(f"{point['accept_length'][f'all, {drafts}, greedy']:.2f}" for drafts in DRAFTS)
        for point in (ours, theirs)
    ]
    told[1] += ", speculators 0.9 without its norms, at its default learning rate: within the error"
    rows.append(["the same with a fixed `lm_head`, one seed", *told])
    races = {
        "plain heads, 283 steps, best of three learning rates each": SAME_HEAD,
        "each at its defaults, three epochs of 1,532 conversations, best of three or four learning rates": DEFAULTS,
    }
    for what, raced in races.items():
        mine, *peers = (best_0_5b(*raced, trainer) for trainer in ("ours", "SpecForge", "speculators"))
        what = f"Qwen2.5-Coder-0.5B, {what}, chains of 3 / 7, one seed"
        rows.append([what, mine, f"{peers[0]}, SpecForge; {peers[1]}, speculators"])
    mine, peer = (best_0_5b(*PACKS, trainer) for trainer in ("ours, packs of 4,096", "speculators, rows of 4,096"))
    what = "the same, packs of 4,096 tokens, 1,525 conversations with new answers, best of two or three learning rates"
    rows.append([what, mine, f"{peer}, speculators"])
    greedy = result("several_answers.json")["prompts"]["heldout"]["greedy"]
    one, eight = (
        " / ".join(f"{greedy[drafts][answers]['accept_length']:.2f}" for drafts in DRAFTS)
        for answers in ("one answer", "eight answers")
    )
    rows.append(["eight answers to each prompt, four times the training steps, one seed", eight, f"{one}, one answer"])
    return rows


def no_data() -> list[str]:
    """Prompts that the target wrote, where they gain and where they lose; means of seeds."""
    seeds = result("own_prompts.json")["seeds"]

    def told(way: str) -> str:
        lengths = {
            title: [
                mean(seed[f"{name}: all, chain of {drafts}, greedy"][way]["accept_length"] for seed in seeds)
                for drafts in (3, 7)
            ]
            for name, title in (("mt_bench", "MT-bench"), ("heldout", "documentation"))
        }
        return ", ".join(f"{title} {three:.2f} / {seven:.2f}" for title, (three, seven) in lengths.items())

    what = "SmolLM2, 11,000 prompts that it wrote itself, chains of 3 / 7, mean of three seeds"
    return [what, told("by the target"), f"{told('documentation')}, with the same number of documentation prompts"]


def training_speed() -> list[str]:
    bf16 = [[next(iter(row["over"][peer].values())) for row in raced(peer)] for peer in PEERS]
    told = " and ".join(f"**{min(ratios):.2f} to {max(ratios):.2f} x**" for ratios in bf16)
    own = [row for row in raced("SpecForge") if "bf16" in row["costs"]]
    default = [row["costs"]["bf16"]["tokens_per_s"] / fastest(row, "SpecForge")["tokens_per_s"] for row in own]
    told += f", with the default recipe {min(default):.2f} to {max(default):.2f} x SpecForge"
    peers = f"{' and '.join(PEERS)} on the same H200, with the peer's optimizer on both sides"
    return ["training speed at an 8 B's shape, random weights, by document length", told, peers]


def serving_gains() -> list[list[str]]:
    rows = []
    enlarged = ("sglang_bench_smollm2_chain.json", "cells")
    for target, of in {"Qwen2.5-Coder-1.5B": SERVED_1_5B, "SmolLM2 enlarged to 8.5 B": enlarged}.items():
        cells = served_cells(*of)
        for what, key in zip(("time per token", "throughput"), GAINS, strict=True):
            sets = [
                [cells[name, load]["speed_ups"]["head"][key] for load in (1, 16, 64)]
                for name in ("held_out", "mt_bench")
            ]
            held_out = " / ".join(with_limits(gain) for gain in sets[0])
            others = " / ".join(f"{gain['value']:.2f}" for gain in sets[1])
            told = f"{held_out}; MT-bench {others}"
            rows.append(
                [f"{target}, speed-up in {what} at 1 / 16 / 64 requests", told, "the same server without a head"]
            )
        head, plain = (
            f"{1000 * cells['held_out', 1]['sides'][side]['ttft']['median']:.0f} ms" for side in ("head", "plain")
        )
        rows.append([f"{target}, time to first token at 1 request", head, f"{plain} without a head"])
    return rows


def time_to_head() -> list[str]:
    whole = result("time_to_head.json")
    disk, hours = cost_of_100000(whole)
    cost = f"**{hours:.2f} GPU-hours**, {disk} of disk; with one epoch {whole['for_100000']['gpu_hours']:.2f}"
    extrapolated = f"extrapolated from {whole['conversations']:,} of 384 tokens, random weights, on one H200"
    return ["100,000 conversations to a head, target of 8 B, the recipe's four epochs", cost, extrapolated]


def proof() -> str:
    """What the README shows first: a target of its own size, greedy and sampled."""
    titles = {"held_out": "held out", "gsm8k": "GSM8K", "mt_bench": "MT-bench"}
    sampled = (SERVED_1_5B[0], "sampled")
    rows = []
    for name, temperature, of in [*((name, "0", SERVED_1_5B) for name in titles), ("held_out", "0.7", sampled)]:
        cells = served_cells(*of)
        gains = [with_limits(cells[name, load]["speed_ups"]["head"]["tpot"]) for load in (1, 16, 64)]
        rows.append([titles[name], temperature, f"{cells[name, 1]['sides']['head']['accept_length']:.2f}", *gains])
    return markdown("prompts | T | accept length | 1 request | 16 | 64", rows)


def with_limits(gain: dict[str, Any]) -> str:
    """Return a speed-up with its interval, which one repeat does not have; bold where the whole interval is above 1."""
    if gain["low"] is None:
        return f"{gain['value']:.2f}"
    return f"{with_interval(gain)} [{gain['low']:.2f}, {gain['high']:.2f}]"


def served_tails() -> str:
    """Speed-ups in the p90 / p99 of the time per token, of chains of 3."""
    rows = []
    for target, of in (
        ("SmolLM2, enlarged", ("sglang_bench_smollm2_chain.json", "cells")),
        ("Qwen2.5-Coder-1.5B", SERVED_1_5B),
    ):
        of_set: dict[str, dict[int, str]] = {}
        for (prompts, requests), cell in served_cells(*of).items():
            plain, head = (cell["sides"][side]["tpot"] for side in ("plain", "head"))
            of_set.setdefault(prompts, {})[requests] = (
                f"{plain['p90'] / head['p90']:.2f} / {plain['p99'] / head['p99']:.2f}"
            )
        rows += [
            [target, prompts, *(found.get(load, "") for load in (1, 4, 16, 64))] for prompts, found in of_set.items()
        ]
    return markdown("target | prompts | 1 request | 4 | 16 | 64", rows)


def fits() -> str:
    """What a target must be and what a run takes."""
    whole = result("time_to_head.json")
    disk, hours = cost_of_100000(whole)
    per_token = whole["bytes_per_token"] / 1000
    sizes = "trained here: 24 M, 135 M and 1.5 B, and 8 B's shape with random weights"
    rows = [
        ["your model", f"a text model that transformers loads; recipes for 1 B to 70 B; {sizes}"],
        [
            "GPU",
            "one NVIDIA GPU that holds the target: 16 GB of weights at 8 B. H100 and H200 were used; a CPU for trials",
        ],
        ["disk", f"{per_token:.1f} kB a token at 8 B: {disk} for 100,000 conversations of 384 tokens"],
        [
            "time",
            f"**{hours:.2f} GPU-hours** for these on an H200, to a head with the recipe's four epochs (extrapolated)",
        ],
        [
            "server",
            "SGLang; vLLM, run on a CPU; llama.cpp with `model=eagle3`; TensorRT-LLM loads such heads, not run here",
        ],
        [
            "no disk",
            "[features made while training](docs/how-to/live.md), on one host; the target then works in each epoch",
        ],
        ["not covered", "vision, DFlash, MTP"],
    ]
    return markdown("does it fit? | ", rows)


def stored_or_live() -> str:
    """What 100,000 conversations of 384 tokens cost from a store and while training, by the rates of both steps."""
    whole = result("time_to_head.json")
    tokens = 100_000 * 384
    made, trained = (tokens / whole["steps"][step]["tokens_per_s"] / 3600 for step in ("features", "training"))
    disk = f"{tokens * whole['bytes_per_token'] / 1e12:.1f} TB, 0"
    rows = [
        [
            str(epochs), disk, f"{made + epochs * trained:.2f}, {epochs * (made + trained):.2f}",
            f"{made + epochs * trained:.2f}", f"{epochs * max(made, trained):.2f}",
        ]
        for epochs in (1, 2, 4, 10)
    ]  # fmt: skip
    hours = "GPU-hours of work: store, live | hours on one GPU, store | hours on two GPUs, live"
    return markdown(f"epochs | disk: store, live | {hours}", rows)


def cost_of_100000(whole: Any) -> tuple[str, float]:
    """Return disk and GPU-hours of 100,000 conversations with the recipe's four epochs."""
    conversations = whole["conversations"]
    epoch = 100_000 / conversations * (whole["steps"]["training"]["seconds"] - whole["starts"]["training"]) / 3600
    return f"{whole['features_bytes'] / conversations * 1e5 / 1e12:.1f} TB", whole["for_100000"][
        "gpu_hours"
    ] + 3 * epoch


SERVED_1_5B = ("served_1_5b.json", "greedy")


def served_cells(name: str, of: str = "cells") -> dict[tuple[str, int], Any]:
    """Cells of a bench, by prompts and concurrent requests."""
    return {(cell["prompt_set"], cell["concurrency"]): cell for cell in result(name)[of]}


def times(cell: Any, what: str, form: str) -> str:
    """The plain server's median of `what` in milliseconds, and the head's."""
    return " -> ".join(f"{1000 * cell['sides'][side][what]['median']:{form}}" for side in ("plain", "head"))


def public_target() -> str:
    """Accept length of train.py's defaults on SmolLM2-135M-Instruct: means of the seeds, and the error over prompts."""
    rows = []
    for title, file in PROMPTS.items():
        for sampling in ("greedy", "T = 1"):
            cells = [on_public_target(file, drafts, sampling) for drafts in DRAFTS]
            rows.append([title, sampling, *(f"{length:.2f} ± {error:.2f}" for length, error in cells)])
    return markdown(f"prompts | answers | {' | '.join(DRAFTS)}", rows)


def on_public_target(file: str, drafts: str, sampling: str) -> tuple[float, float]:
    """Return the mean accept length of the seeds, and the mean of their standard errors over prompts."""
    key = f"{file}: all, {drafts}, {sampling}"
    seeds = [seed[key]["defaults"] for seed in result("public_target.json")["seeds"]]
    return mean(seed["accept_length"] for seed in seeds), mean(seed["standard_error"] for seed in seeds)


def lm_head_decoded() -> str:
    """What a fixed lm_head adds on the public target's prompts, for each pair of one seed."""
    rows = []
    seeds = [seed for seed in result("public_target.json")["seeds"] if "trained_lm_head" in next(iter(seed.values()))]
    for title, file in PROMPTS.items():
        for sampling in ("greedy", "T = 1"):
            cells = []
            for drafts in DRAFTS:
                of_trained = [seed[f"{file}: all, {drafts}, {sampling}"]["trained_lm_head"] for seed in seeds]
                gains = [(-each["difference"]["value"], each["difference"]["high"] < 0) for each in of_trained]
                cells.append(" / ".join(f"**{gain:+.2f}**" if sure else f"{gain:+.2f}" for gain, sure in gains))
            rows.append([title, sampling, *cells])
    return markdown(f"prompts | answers | {' | '.join(DRAFTS)}", rows)


def epochs() -> str:
    """Accept length on validation prompts after each epoch of the public target's training."""
    seeds = result("public_target.json")["validation_after_each_epoch"].values()
    rows = []
    for epoch, points in enumerate(zip(*seeds, strict=True), start=1):
        cells = [_with_range([point[f"accept_length_{steps}"] for point in points]) for steps in (3, 7)]
        rows.append([f"{epoch}", *cells])
    return markdown("epoch | chain of 3 | chain of 7", rows)


def data_curve() -> str:
    """Accept length on validation prompts, by the share of the public target's prompts."""
    found = result("data_curve.json")
    rows = []
    for way in found["chain_of_7"]:
        tokens = way["share"] * found["store"]["answer_tokens"] / 1e6
        length = _with_range(way["seeds"]) if len(way["seeds"]) > 1 else f"{way['seeds'][0]:.3f}"
        rows.append([way["way"], f"{tokens:.2f} M", f"{way['best_epoch']} of {way['epochs']}", length])
    return markdown("training data | answer tokens, about | best epoch | chain of 7", rows)


def several_answers() -> str:
    """Accept length with one answer to each of the public target's prompts, with four and with eight."""
    found, rows = result("several_answers.json")["prompts"], []
    for title, file in PROMPTS.items():
        cells = []
        for drafts in DRAFTS:
            heads = found[file]["greedy"][drafts]
            one, *more = (heads[answers] for answers in ("one answer", "four answers", "eight answers"))
            cells.append(" -> ".join([f"{one['accept_length']:.2f}", *map(bold_if_sure, more)]))
        rows.append([title, *cells])
    return markdown(f"prompts | {' | '.join(DRAFTS)}", rows)


def bold_if_sure(head: dict[str, Any]) -> str:
    length = f"{head['accept_length']:.2f}"
    return f"**{length}**" if head["difference"]["low"] > 0 else length


def served_smollm2() -> str:
    """What SGLang does with the public target's head at the cost of 8.5 billion weights."""
    chain, *others = (served_cells(f"sglang_bench_smollm2_{drafts}.json") for drafts in ("chain", "chain_7", "tree"))
    rows = []
    for key, cell in chain.items():
        gains = [[with_interval(of[key]["speed_ups"]["head"][what]) for what in GAINS] for of in (chain, *others)]
        lengths = " / ".join(f"{of[key]['sides']['head']['accept_length']:.2f}" for of in (chain, *others))
        told = [" / ".join(gain) for gain in gains[1:]]
        rows.append(
            [key[0], f"{key[1]}", times(cell, "tpot", ".2f"), *gains[0], times(cell, "ttft", ".0f"), *told, lengths]
        )
    titles = "prompts | requests | ms a token | time | throughput | first token, ms | chain of 7: time / throughput"
    return markdown(f"{titles} | tree: time / throughput | accept lengths", rows)


GAINS = ("tpot", "throughput")


def served_1_5b() -> str:
    """What SGLang does with a head of Qwen2.5-Coder-1.5B-Instruct, at the target's own size."""
    rows = []
    sampled = served_cells(SERVED_1_5B[0], "sampled")
    for key, cell in served_cells(*SERVED_1_5B).items():
        told = [with_limits(cell["speed_ups"]["head"][what]) for what in GAINS]
        other = with_limits(sampled[key]["speed_ups"]["head"]["tpot"]) if key in sampled else ""
        length = f"{cell['sides']['head']['accept_length']:.2f}"
        rows.append([key[0], f"{key[1]}", times(cell, "tpot", ".2f"), *told, times(cell, "ttft", ".0f"), length, other])
    titles = "prompts | requests | ms a token | time | throughput | first token, ms | accept length"
    return markdown(f"{titles} | T = 0.7: time", rows)


def accepted_1_5b() -> str:
    """Accept length of the same head in chains of 1 to 8, in our decoder."""
    rows = [
        [name, sampling, *(f"{of['value']:.2f}" for of in chains.values())]
        for name, samplings in result(SERVED_1_5B[0])["accepted"].items()
        for sampling, chains in samplings.items()
    ]
    return markdown("prompts | answers | 1 | 2 | 3 | 4 | 5 | 6 | 7 | 8", rows)


def live_run() -> str:
    """One epoch on the same answers, from a store and with features made meanwhile."""
    run = result("live_training.json")
    rows = []
    for name, features in (("stored", f"{run['features']['seconds']} s before"), ("live", "meanwhile")):
        of = run[name]
        first, steps = of["seconds_of_the_first_10_steps"], of["seconds"]["steps and validation"]
        lengths = " / ".join(f"{each:.3f}" for each in of["served_accept_length"].values())
        whole = f"{of['seconds']['in all']:.0f} s"
        rows.append(
            [name, features, whole, f"{first:.0f} s", f"{steps - first:.0f} s", f"{of['losses'][-1]:.4f}", lengths]
        )
    titles = "features | features made | train.py | first 10 steps | 186 steps and validation | last loss"
    return markdown(f"{titles} | served, chains of 3 / 5 / 7", rows)


SET_TITLES = {
    "held_out": "held out, documentation", "heldout": "held out, documentation", "gsm8k": "GSM8K",
    "humaneval": "HumanEval", "mt_bench": "MT-bench", "general": "general", "sql": "SQL",
}  # fmt: skip


def own_prompts_1_5b() -> str:
    """Heads of Qwen2.5-Coder-1.5B-Instruct by their prompts, in chains of 3 / 7; bold: surely above documentation."""
    rows = []
    for name, heads in result("qwen25_coder_1_5b.json")["compared"].items():
        told = []
        for head in ("documentation", "from_target", "both"):
            cells = [heads[head][steps] for steps in ("3", "7")]
            told.append(" / ".join(_accepted(cell) for cell in cells))
        rows.append([SET_TITLES[name], *told])
    return markdown("prompts | documentation | by the target | half of each", rows)


def ways(file: str) -> str:
    """Ways of training in chains of 3 / 7, means of seeds; bold: surely above the first way, over seeds or prompts."""
    found = result(file)
    names = list(found["ways"]["ways"])

    def cell(name: str, way: str, drafts: int) -> str:
        chain = f"{name}: all, chain of {drafts}, greedy"
        seeds = [seed[chain][way] for seed in found["seeds"]]
        length = f"{mean(seed['accept_length'] for seed in seeds):.2f}"
        low = 0
        if way != names[0]:
            low = found["changes"][chain][way]["interval"][0] if len(seeds) > 1 else seeds[0]["difference"]["low"]
        return f"**{length}**" if low > 0 else length

    files = [chain.split(":")[0] for chain in found["seeds"][0] if ", chain of 3," in chain]
    rows = [[SET_TITLES[name], *(f"{cell(name, way, 3)} / {cell(name, way, 7)}" for way in names)] for name in files]
    return markdown(" | ".join(["prompts", *names]), rows)


def live_seeds() -> str:
    """Validation after an epoch on stored and on live features, for each seed."""
    rows = []
    for seed, of in enumerate(result("live_seeds.json")["seeds"]):
        both = [of["stored"], of["live"]]
        losses = [f"{each['validation_loss']:.3f}" for each in both]
        lengths = [" / ".join(f"{each:.3f}" for each in run["served_accept_length"].values()) for run in both]
        rows.append([f"{seed}", *losses, *lengths])
    return markdown("seed | validation loss, stored | live | served, chains of 3 / 5 / 7, stored | live", rows)


def _accepted(cell: dict[str, Any]) -> str:
    length = f"{cell['value']:.2f}"
    return f"**{length}**" if cell.get("difference", {}).get("low", 0) > 0 else length


def with_interval(gain: dict[str, float]) -> str:
    """Return a speed-up, bold where its whole interval is above 1."""
    return f"**{gain['value']:.2f}**" if gain["low"] > 1 else f"{gain['value']:.2f}"


def raced_heads(*files: str) -> str:
    """Another trainer's heads and ours on the public target, after some epochs."""
    rows = []
    for name, points in (curve for file in files for curve in result(file)["heads"]["curves"].items()):
        for point in points:
            lengths = [f"{point['accept_length'][f'all, {drafts}, greedy']:.3f}" for drafts in DRAFTS]
            rows.append([name, f"{point['epoch']}", f"{point['seconds']:.0f} s", *lengths])
    return markdown(f"training | epochs | seconds of its steps | {' | '.join(DRAFTS)}", rows)


def raced_prompts(titles: str, heads: Sequence[tuple[str, str]]) -> str:
    """Heads of races, (file, name), on all prompts."""
    rows = []
    for title, file in PROMPTS.items():
        races = [result(race)["after_training"][file] for race, _ in heads]
        for way in (*(f"{drafts}, greedy" for drafts in DRAFTS), f"{DRAFTS[-1]}, T = 1"):
            found = [race["accept_length"].get(way, {}).get(name) for race, (_, name) in zip(races, heads, strict=True)]
            if all(found):
                cells = [f"{head['accept_length']:.2f} ± {head['standard_error']:.2f}" for head in found]
                rows.append([f"{races[0]['prompts']} {title.removeprefix('400 ')}", way, *cells])
    return markdown(f"prompts | decoding | {titles}", rows)


def raced_qwen(file: str, group: str) -> Iterator[tuple[list[str], list[list[float]]]]:
    """Yield the trainer, learning rate and steps of each head, and its chains of 3 and 7 on each set."""
    found = result(file)
    sets = [found["accepted"][f"{group}, {prompts}"] for prompts in PROMPTS.values()]
    for head, training in found["trainings"].items():
        trainer, _, rate = head.removeprefix(f"{group}, ").rpartition(", lr ")
        chains = [[each[f"chain of {k}, greedy"][head]["accept_length"] for k in (3, 7)] for each in sets]
        yield [trainer, rate, f"{training['steps']:,}"], chains


def best_0_5b(file: str, group: str, trainer: str) -> str:
    """What the head of a trainer that accepts most on the held-out prompts accepts there."""
    best = max(sets[0] for (name, *_), sets in raced_qwen(file, group) if name == trainer)
    return " / ".join(f"{length:.2f}" for length in best)


def raced_trainers(file: str, group: str) -> str:
    rows = [
        [*training, *(" / ".join(f"{length:.2f}" for length in pair) for pair in sets)]
        for training, sets in raced_qwen(file, group)
    ]
    held_out = result(file)["accepted"][f"{group}, heldout"]["chain of 3, greedy"]["prompts"]
    sets = " | ".join(PROMPTS).replace("400", str(held_out))
    return markdown(f"training | learning rate | steps | {sets}", rows)


SAME_HEAD = ("race_qwen25_coder_0_5b.json", "same head")
DEFAULTS = ("race_defaults_0_5b.json", "defaults")
PACKS = ("race_packs_0_5b.json", "defaults")
SPECFORGE, SPECULATORS, FIXED = "race_smollm2.json", "race_speculators.json", "race_speculators_fixed.json"
SEEDS = "race_smollm2_seeds.json"
SAME_AND_DEFAULT = "ours, same head | defaults of `train.py`"


def long_windows() -> str:
    """Accept length in chains of 3 / 7 by position in long texts, with windows of the draft head."""
    windows = result("long_windows.json")["windows"]
    columns = [("fixed", window) for window in windows] + [("trained", "none"), ("trained", "512")]
    rows = []
    for text, first in windows["none"].items():
        cells = [in_chains(windows[window][text], head) for head, window in columns]
        rows.append([text, f"{first['fixed, chain of 7']['prompts']}", *cells])
    ways = "default | window 2,048 | 1,024 | 512 | `lm_head` trained | the same, window 512"
    return markdown(f"tokens before the round | prompts | {ways}", rows)


def long_texts() -> str:
    """Accept length in chains of 3 / 7 by position in long texts, of heads trained further."""
    found = result("long_texts.json")
    columns = [(head, "none") for head in ("default", "control", "adapted")] + [("adapted", "512")]
    rows = []
    for text, first in found["windows"]["none"].items():
        cells = [in_chains(found["windows"][window][text], head) for head, window in columns]
        rows.append([text, f"{first['default, chain of 7']['prompts']}", *cells])
    short = [in_chains(found["short"], head) for head, _ in columns[:3]]
    rows.append(["short questions", f"{found['short']['default, chain of 7']['prompts']}", *short, ""])
    heads = "trained `lm_head` | 3 more epochs | adapted | adapted, window 512"
    return markdown(f"tokens before the round | prompts | {heads}", rows)


def in_chains(found: dict[str, Any], head: str) -> str:
    """A head's accept length in chains of 3 / 7."""
    return " / ".join(f"{found[f'{head}, chain of {steps}']['accept_length']:.2f}" for steps in (3, 7))


DRAFTS = ("chain of 3", "chain of 7", "tree 5/4/16")
PROMPTS = {"400 held out": "heldout", "GSM8K": "gsm8k", "HumanEval": "humaneval", "MT-bench": "mt_bench"}


def raced(peer: str) -> list[dict[str, Any]]:
    """Return the batches that a peer was timed on; `over` has our rates as multiples of its fastest, by our ways."""
    return [row for row in result("race.json")["steps"] if row["over"][peer]]


def fastest(row: dict[str, Any], peer: str) -> dict[str, Any]:
    """Return what a peer's fastest way needs for a batch."""
    costs = [cost for way, cost in row["costs"].items() if way.startswith(peer)]
    return dict(max(costs, key=lambda cost: cost["tokens_per_s"]))


def race(peer: str) -> str:
    def cell(cost: dict[str, Any]) -> str:
        return f"{thousands(cost['tokens_per_s'])}, {cost['peak_gb']:.1f} GB"

    rows = []
    for row in raced(peer):
        ours = [f"{cell(row['costs'][way])} (**{over:.2f} x**)" for way, over in row["over"][peer].items()]
        rows.append([row["batch"], thousands(row["target_vocab"]), cell(fastest(row, peer)), *ours])
    return markdown(f"documents of a batch | target vocabulary | {peer} | eagle3, bf16 | `kernels.fp8=true`", rows)


PEERS = ("SpecForge", "speculators")


def attention() -> str:
    found: dict[str, dict[str, list[str]]] = {}
    for row in result("attention.json")["rows"]:
        if row["channels"] == 128:
            found.setdefault(row["case"], {}).setdefault(row["kernel"], []).append(f"{row['ms']:.2f}")
    rows = [[case, *(" + ".join(kernels[name]) for name in KERNELS)] for case, kernels in found.items()]
    return markdown("rows | " + " | ".join(KERNELS.values()), rows)


KERNELS = {"torch_flash": "PyTorch's copy, ms", "flash_attn": "flash-attn 2.8.3, ms", "triton": "ours, ms"}


def heads() -> str:
    found, rows = by_name(), []
    for title, name in HEADS.items():
        head = found[name]
        cells = [f"{kept(head, where):.3f}" for where in SETS]
        if name == BEST:
            gains = [kept(head, where) / kept(found["reference"], where) - 1 for where in SETS]
            cells = [f"**{cell}** ({percent(gain)})" for cell, gain in zip(cells, gains, strict=True)]
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
    "- float8 matmuls, MLP of 1,008": "float8 products",
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


def local_read() -> str:
    """Rates of readers of samples in random order, from a disk and from memory."""
    cold, warm = (result("local_read.json")["mb_per_s"][state] for state in ("cold", "warm"))
    rows = []
    for title, name in READERS.items():
        of_plain = percent(cold[name] / cold["plain_read"], ".0%")
        rows.append([title, f"{cold[name]:,.0f} MB/s", of_plain, f"{warm[name] / 1000:.1f} GB/s"])
    return markdown("reader | from disk | of a plain read | from memory", rows)


READERS = {
    "a plain read": "plain_read", "eagle3": "packs", "litdata": "litdata", "webdataset's own reader": "webdataset",
}  # fmt: skip


def thousands(rate: float) -> str:
    """Tokens a second, to three digits."""
    return f"{rate / 1000:.0f} k" if rate >= 100_000 else f"{rate / 1000:.1f} k"


def parity() -> str:
    rows = []
    for title, shape in result("sglang_parity.json")["shapes"].items():
        served = shape["served"]
        ours = [shape["decoded"]["bfloat16"], shape["decoded"]["float32"], shape["replayed"]]
        cells = [f"{value:.3f} ({percent(served / value - 1)})" for value in ours]
        same = [percent(shape["lossless"][dtype], ".1%") for dtype in ("bfloat16", "float32")]
        rows.append([title, f"{served:.3f}", *cells, *same])
    titles = "draft | SGLang | our decoder, bf16 | our decoder, float32 | our drafter on SGLang's own texts"
    return markdown(f"{titles} | same answers, bf16 | float32", rows)


def loads() -> str:
    """Of a tune.json in its format before `tpot`."""
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


def served_ways() -> str:
    """Chains of 3 on the public target's servers: sampled, and what the overlap scheduler adds to greedy ones."""
    greedy, sampled, alone = (
        served_cells(f"sglang_bench_smollm2_{way}.json") for way in ("chain", "sampled", "no_overlap")
    )
    rows = []
    for key in sampled:
        shown = [with_interval(each[key]["speed_ups"]["head"][what]) for each in (greedy, sampled) for what in GAINS]
        lengths = " / ".join(f"{each[key]['sides']['head']['accept_length']:.2f}" for each in (greedy, sampled))
        rates = [[each[key]["sides"][side]["throughput"] for each in (greedy, alone)] for side in ("plain", "head")]
        overlap = [f"{on / off - 1:+.0%}".replace("%", " %") for on, off in rates]
        rows.append([key[0], str(key[1]), *shown, lengths, *overlap])
    titles = ["prompts", "requests", "greedy: time", "throughput", "T = 0.7: time", "throughput"]
    titles += ["accept length, greedy / T = 0.7", "overlap adds: plain", "chain of 3"]
    return markdown(" | ".join(titles), rows)


def served_steps() -> str:
    """Fixed chains on the public target's servers, and steps that change with the load."""
    ways = [("chain_1", "head"), ("chain_2", "head"), ("chain", "head"), ("adaptive", "adaptive")]
    sides = [(served_cells(f"sglang_bench_smollm2_{way}.json"), side) for way, side in ways]
    rows = []
    for key in sides[0][0]:
        gains = [[with_interval(cells[key]["speed_ups"][side][what]) for what in GAINS] for cells, side in sides]
        lengths = " / ".join(f"{cells[key]['sides'][side]['accept_length']:.2f}" for cells, side in sides)
        rows.append([key[0], str(key[1]), *(" / ".join(gain) for gain in gains), lengths])
    titles = "prompts | requests | chain of 1 | chain of 2 | chain of 3 | adaptive: 2 steps at 16, 1 at 64"
    return markdown(f"{titles} | accept lengths, in this order", rows)


def recipe() -> str:
    """What one change of the default recipe does to the accept length on validation prompts."""
    runs = sorted(result("recipe_search.json")["runs"].items(), key=lambda run: -run[1]["accept_length_7"])
    rows = [(name, f"{run['accept_length_3']:.3f}", f"{run['accept_length_7']:.3f}") for name, run in runs]
    return markdown("training | chain of 3 | chain of 7", rows)


def recipe_seeds() -> str:
    """Accept length on validation prompts of two targets: means of up to three seeds, and half their range."""
    found, rows = result("recipe_seeds.json")["runs"], []
    for title, name in RECIPES.items():
        cells: list[str] = []
        for target in ("s", "u"):
            seeds = [run for key, run in found.items() if re.fullmatch(rf"{target}_{re.escape(name)}(_s\d)?", key)]
            cells += [_with_range([run[f"accept_length_{steps}"] for run in seeds]) for steps in (3, 7)]
        rows.append([title, *cells])
    return markdown("training | 135 M: chain of 3 | chain of 7 | 24 M: chain of 3 | chain of 7", rows)


def fixed_lm_head() -> str:
    """Chains of 7 on validation prompts, epoch by epoch: means of up to three seeds, and half their range."""
    epochs, rows = (1, 2, 4, 6, 8, 10), []
    for name, run in result("fixed_lm_head.json")["runs"].items():
        seeds = run["by_epoch"].values()
        rows.append([name, *(_with_range([seed[str(n)][1] for seed in seeds if str(n) in seed]) for n in epochs)])
    return markdown(f"`lm_head` | {' | '.join(f'epoch {n}' for n in epochs)}", rows)


def _with_range(values: list[float]) -> str:
    if not values:
        return "-"
    spread = f" ± {(max(values) - min(values)) / 2:.3f}" if len(values) > 1 else ""
    return f"{mean(values):.3f}{spread}"


RECIPES = {
    "EAGLE-3, AdamW, lr 1e-3, packs of 8,192, 2 epochs": "old2",
    "A: EAGLE-3.1, Muon, lr 3e-3, weight decay 0.1, packs of 8,192, `loss.decay=0.8`, 1 epoch": "R1",
    "A, 2 epochs": "R2",
    "A, 4 epochs": "R4",
    "B: as A, with packs of 4,096, weight decay 0.5, `loss.decay=0.6`, 1 epoch": "A1",
    "B, 2 epochs": "A2",
    "B, 4 epochs": "A4",
    "B with packs of 8,192": "A1-pack",
    "B with weight decay 0.1": "A1-wd",
    "B with weight decay 1": "A1_wd1",
    "B with `loss.decay=0.8`": "A1-decay",
    "B with lr 1.5e-3": "A1_lr1.5",
    "B with lr 6e-3": "A1_lr6",
    "B with an MLP twice as wide": "A1_mlp",
    "B, constant rate, decay in the last 30 % of the steps": "A1_wsd",
    "A on 30 % of the prompts, 1 epoch": "R1_share0.3",
    "A on 30 %, 4 epochs": "R4_share0.3",
    "B on 30 %, 1 epoch": "A1_share0.3",
    "B on 30 %, 4 epochs": "A4_share0.3",
    "A on 10 %, 4 epochs": "R4_share0.1",
    "B on 10 %, 4 epochs": "A4_share0.1",
}


def long_answers() -> str:
    found, rows = result("long_answers.json"), []
    for sampling in ("greedy", "sampled"):
        lengths: dict[str, list[str]] = {}
        for row in sorted(found[sampling], key=lambda row: row["steps"]):  # of each ours comes before the reference
            length = row["accept_length"]
            cell = f"{length['value']:.2f} ± {length['standard_error']:.2f}"
            lengths.setdefault(row["positions"], []).append(cell)
        rows += [[sampling, positions, *cells] for positions, cells in lengths.items()]
    return markdown("answers | tokens before the round | chain of 3 | reference | chain of 7 | reference", rows)


def bounds() -> str:
    found, rows = result("bounds.json")["heads"], []
    names = {"SpecForge's loss": "reference", "`loss=cross_entropy_tv`": "cross-entropy_+_tv", "`loss=lk`": "lk"}
    for title, name in names.items():
        seeds = [head for folder, head in found.items() if folder.rsplit("-", 1)[0] == name]
        columns = [(states, steps) for steps in ("3", "7") for states in ("drafts", "oracle")]
        rows.append([title, *(f"{mean(head[states][steps] for head in seeds):.3f}" for states, steps in columns)])
    columns = "head | 3 steps, own states | the target's states | 7 steps, own states | the target's states"
    return markdown(columns, rows)


class Cells(string.Formatter):
    """Python's formats, and `k` for thousands."""

    def format_field(self, value: Any, format_spec: str) -> str:
        return thousands(value) if format_spec == "k" else super().format_field(value, format_spec)


def filled_in(template: str) -> str:
    """Replace {NAME[key][key]:format} by the number in results/NAME.json."""
    numbers = {name: result(f"{name}.json") for name in re.findall(r"{(\w+)\[", template)}
    return Cells().vformat(template, (), numbers).replace("%", " %")


TEMPLATES = dict(re.findall(r"^## (\w+)\n\n((?:\|.*\n)+)", (ROOT / "benchmarks/tables.txt").read_text(), re.MULTILINE))
TABLES: dict[str, Callable[[], str]] = {
    name: partial(filled_in, template.rstrip()) for name, template in TEMPLATES.items()
} | {
    table.__name__: table
    for table in (
        quickstart, proof, fits, best, public_target, data_curve, several_answers, served_smollm2, served_1_5b,
        served_tails, own_prompts_1_5b, served_steps, epochs, heads, recipe, recipe_seeds, fixed_lm_head, attention,
        local_read, parity, loads, served_ways, long_answers, bounds, long_windows, long_texts, lm_head_decoded,
        stored_or_live, live_run, live_seeds, accepted_1_5b,
    )
} | {
    **{name: partial(ways, f"{name}.json") for name in ("own_prompts", "user_turns", "larger_batches")},
    **{f"race_{peer.lower()}": partial(race, peer) for peer in PEERS},
    "raced_trainers": partial(raced_trainers, *SAME_HEAD),
    "raced_defaults": partial(raced_trainers, *DEFAULTS),
    "raced_packs": partial(raced_trainers, *PACKS),
    "learning_rates_0_5b": partial(raced_trainers, "learning_rate_0_5b.json", "10 epochs of 10,000"),
    "packs_1_5b": partial(raced_trainers, "packs_1_5b.json", "three epochs"),
    "raced_heads": partial(raced_heads, SPECFORGE),
    "speculators_heads": partial(raced_heads, SPECULATORS, FIXED),
    "raced_prompts": partial(
        raced_prompts, f"SpecForge | {SAME_AND_DEFAULT}",
        [(SPECFORGE, name) for name in ("SpecForge, lr 0.001", "ours, recipe", "train.py")],
    ),
    "raced_seeds": partial(
        raced_prompts,
        "SpecForge, seed 1 | seed 2 | ours, seed 1 | seed 2 | SpecForge, 10 epochs | defaults of `train.py`",
        [
            (SEEDS, name) for name in (
                "SpecForge, seed 1", "SpecForge, seed 2", "ours, seed 1", "ours, seed 2", "SpecForge, 10 epochs",
                "train.py",
            )
        ],
    ),
    "speculators_prompts": partial(
        raced_prompts, f"speculators | {SAME_AND_DEFAULT}",
        [(SPECULATORS, "speculators"), (FIXED, "ours, fixed"), (FIXED, "train.py")],
    ),
}  # fmt: skip

if __name__ == "__main__":
    main()
