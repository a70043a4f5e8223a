"""`action=compare sweep=FOLDER`: the heads of a sweep on the same prompts, and what its settings do over seeds.

A head is compared with the one of the first setting and the same seed. Rows of settings are made of the rows of seeds,
whose `head` is the setting.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from eagle3 import markdown
from eagle3.decoding.paired import CONFIDENCE, Estimate, estimate_mean
from eagle3.serving.check.prompts import PromptSet
from eagle3.serving.compare.heads import require_targets
from eagle3.serving.compare.jobs import Job, Jobs
from eagle3.serving.compare.kept import measure_jobs
from eagle3.serving.compare.measure import ALL, Gained
from eagle3.serving.compare.run import conditions, rows, table, write_comparison
from eagle3.serving.report import drafts
from eagle3.settings.serving import CompareRun
from eagle3.target.model import Target

WAY = ("sampling", "temperature", "top_p", "top_k", "steps", "topk", "draft_tokens")  # keys of a row
ROUNDING = 1e-9  # below it, two accept lengths are the same ratio


def compare_sweep(
    run: CompareRun, jobs: Jobs, target: Target, prompts: PromptSet, *, origin: Mapping[str, Any], folder: Path
) -> list[dict[str, Any]]:
    """Print a row for each setting and way of decoding, and what they say; compare.json and compare.md, which have the
    rows of each seed and source too, go to `folder`. Return the rows of the settings."""
    heads = {job.name: job.head for job in jobs.finished}
    require_targets(heads.values(), target.identity)
    gained = measure_jobs(run, jobs.finished, target, prompts)
    found = [*seed_rows(jobs.finished, gained, prompts.sources)]
    over_seeds = setting_rows(found)
    numbers = {
        **origin,
        "sweep": str(jobs.sweep),
        "jobs": {job.name: {"setting": job.setting, "seed": job.seed} for job in jobs.finished},
        "jobs_left_out": jobs.left_out,
        **conditions(run, heads, target, prompts),
        "settings": over_seeds,
        "rows": found,
    }
    left_out = [jobs.left_out_line()] if jobs.left_out else []
    write_comparison(run, numbers, settings_page(over_seeds, prompts), folder, *left_out, *seed_pages(found))
    return over_seeds


def seed_rows(jobs: Sequence[Job], gained: Mapping[str, Gained], sources: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the rows of each seed. Differences are from the first setting, None where it has no head of the seed."""
    first = jobs[0].setting
    for seed in dict.fromkeys(job.seed for job in jobs):
        heads = {job.setting: gained[job.name] for job in jobs if job.seed == seed}
        without = {} if first in heads else {"difference": None, "difference_kept": None}
        yield from ({"seed": seed, **row, **without} for row in rows(heads, sources))


def setting_rows(found: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each way of decoding and setting, over all prompts: means over its seeds."""
    whole = [row for row in found if row["source"] == row["positions"] == ALL]
    settings = dict.fromkeys(row["head"] for row in whole)
    made = []
    for way in dict.fromkeys(tuple(row[key] for key in WAY) for row in whole):
        of_way = [row for row in whole if tuple(row[key] for key in WAY) == way]
        for setting in settings:
            of_setting = [row for row in of_way if row["head"] == setting]
            made += [setting_row(of_setting, first=next(iter(settings)))] if of_setting else []
    return made


def setting_row(of_seeds: Sequence[Mapping[str, Any]], *, first: str) -> dict[str, Any]:
    """Summarise the rows of one setting; pairs are heads of the setting and the `first` one with the same seed."""
    pairs = [row["difference"] for row in of_seeds if row["difference"]]
    row = {
        **{key: of_seeds[0][key] for key in WAY},
        "setting": of_seeds[0]["head"],
        "seeds": [row["seed"] for row in of_seeds],
        "conversations": of_seeds[0]["conversations"],
        "prompts": of_seeds[0]["prompts"],
        "accept_length": over_seeds([row["accept_length"] for row in of_seeds])._asdict(),
        "pairs": len(pairs),
        "difference": over_seeds(pairs)._asdict() if pairs else None,
    }
    return {**row, "verdict": None if row["setting"] == first else verdict(row, first)}


def over_seeds(estimates: Sequence[Mapping[str, Any]]) -> Estimate:
    """Return the mean with an interval over seeds; of one seed the estimate itself, whose interval is over prompts.

    Seeds with the same value have no interval. Accept lengths are ratios of counts, so on few prompts some are the same
    by chance, and the interval would be a single number, as if the mean were certain."""
    if len(estimates) == 1:
        return Estimate(**estimates[0])
    values = [each["value"] for each in estimates]
    alike = max(values) - min(values) < ROUNDING
    return estimate_mean(values)._replace(low=None, high=None) if alike else estimate_mean(values)


def verdict(row: Mapping[str, Any], first: str) -> str:
    """Say in a sentence how far a setting is from the first one, and whether that is more than chance."""
    against, way = f"{row['setting']} - {first}", f"in a {drafts(row)}, {row['sampling']}"
    if not row["difference"]:
        return f"{against} {way}: no seed in common"
    difference = Estimate(**row["difference"])
    measured = " ".join(filter(None, _estimate_cells(difference, "+")))
    over = f"{row['pairs']} seeds" if row["pairs"] > 1 else f"one seed, {row['conversations']} conversations"
    said = "not separated"
    if difference.low is None or difference.high is None:
        said = "no interval"
        if row["pairs"] > 1:
            said += ", the difference is the same in each seed; compare on more prompts"
    elif difference.low > 0 or difference.high < 0:
        said = "longer" if difference.low > 0 else "shorter"
    return f"{against}: {measured} {way}, over {over}: {said}"


def settings_page(made: Sequence[Mapping[str, Any]], prompts: PromptSet) -> str:
    interval = f"{CONFIDENCE:.0%} interval"
    columns = ["sampling", "drafts", "setting", "seeds", "accept length", interval, "difference", interval]
    lines = [row["verdict"] for row in made if row["verdict"]]
    note = f"{prompts}. Intervals are over seeds (Student's t), of one seed over conversations."
    return "\n\n".join([markdown.table(columns, map(_cells, made)), note, *(["\n".join(lines)] if lines else [])])


def _cells(row: Mapping[str, Any]) -> list[str]:
    cells = [row["sampling"], drafts(row), row["setting"], str(len(row["seeds"]))]
    cells += _estimate_cells(Estimate(**row["accept_length"]))
    return cells + (_estimate_cells(Estimate(**row["difference"]), "+") if row["difference"] else ["", ""])


def _estimate_cells(estimate: Estimate, sign: str = "") -> list[str]:
    """Write a value and its interval, which may be missing."""
    interval = "" if estimate.low is None else f"[{estimate.low:{sign}.3f}, {estimate.high:{sign}.3f}]"
    return [f"{estimate.value:{sign}.3f}", interval]


def seed_pages(found: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for seed in dict.fromkeys(row["seed"] for row in found):
        title = f"## Seed {seed}" if seed else "## Every head"
        yield f"{title}\n\n{table([row for row in found if row['seed'] == seed])}"
