"""`action=compare`: from exported heads to a table of their differences, and compare.json, which has more of them."""

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from eagle3 import markdown
from eagle3.decoding.paired import CONFIDENCE, Estimate, accept_length, difference
from eagle3.decoding.speculate import load_speculator
from eagle3.head_files.files import read_files
from eagle3.serving.check.prompts import PromptSet
from eagle3.serving.compare.heads import require_targets
from eagle3.serving.compare.measure import ALL, Gained, Measured, answers_at, measure_head
from eagle3.serving.report import drafts, with_error, write_report
from eagle3.settings.serving import CompareRun
from eagle3.storage.files import WEIGHTS, sha256_file, sha256_json
from eagle3.target.model import Target

log = logging.getLogger(__name__)


def compare(
    run: CompareRun,
    heads: Mapping[str, Path],
    target: Target,
    prompts: PromptSet,
    *,
    origin: Mapping[str, Any],
    folder: Path,
) -> list[dict[str, Any]]:
    """Print the table, and return its rows; compare.json and compare.md go to `folder`. `origin` goes into the first:
    commit, command, machine, versions."""
    require_targets(heads.values(), target.identity)
    # All before anything is decoded for long: a head that cannot be decoded ends the run here.
    loaded = {name: load_speculator(target, read_files(path)) for name, path in heads.items()}
    start = time.perf_counter()
    answers = answers_at(target, prompts.prompts, run)
    seconds_of_answers = time.perf_counter() - start
    measured: dict[str, Gained] = {}
    seconds: dict[str, float] = {}
    for name in heads:
        start, speculator = time.perf_counter(), loaded.pop(name)
        measured[name] = measure_head(speculator, answers, prompts.conversations, run.compare, name)
        seconds[name] = time.perf_counter() - start
    found = rows(measured, prompts.sources)
    facts = conditions(run, heads, target, prompts) | {"seconds": {"answers": seconds_of_answers, "heads": seconds}}
    write_comparison(run, {**origin, **facts, "rows": found}, f"{prompts}\n\n{table(found)}", folder)
    return found


def conditions(run: CompareRun, heads: Mapping[str, Path], target: Target, prompts: PromptSet) -> dict[str, Any]:
    """Return what compare.json says of how was measured."""
    return {
        "target": target.path,
        "dtype": str(target.embedding.dtype).removeprefix("torch."),
        "heads": {name: head_facts(path) for name, path in heads.items()},
        "conversations": prompts.num_conversations,
        "turns": prompts.turns,
        "prompts": len(prompts.prompts),
        "prompts_from": prompts.origin,
        "prompts_hash": sha256_json(prompts.prompts),
        "left_out": dict(prompts.left_out),
        "max_new_tokens": run.max_new_tokens,
        "seed": run.seed,
        **asdict(run.compare),
    }


def write_comparison(run: CompareRun, numbers: Mapping[str, Any], page: str, folder: Path, *more: str) -> None:
    """Write the numbers to compare.json and all parts to compare.md, and print the page."""
    if run.compare.draft_window is not None:
        page = f"compare.draft_window={run.compare.draft_window}\n\n{page}"
    numbers_file, page_file = folder / "compare.json", folder / "compare.md"
    write_report(numbers_file, numbers, page_file, "\n\n".join([page, *more]))
    print(page)
    log.info("all rows are in %s, all numbers are in %s", page_file, numbers_file)


def head_facts(head: Path) -> dict[str, Any]:
    weights = {path.name: sha256_file(path) for path in sorted(head.glob(WEIGHTS))}
    return {"path": str(head), "sha256": weights}


# --- the table ------------------------------------------------------------------------------------------------------


def rows(measured: Mapping[str, Gained], sources: Sequence[str]) -> list[dict[str, Any]]:
    """Return a row for each way, source and head; the first head is the one that the others are compared with."""
    first = next(iter(measured.values()))
    return [
        {
            "sampling": str(way.sampling),
            **asdict(way.sampling),
            **way.shape._asdict(),
            "source": source,
            "positions": positions,
            "head": head,
            **_numbers(ways[way][positions], first[way][positions], chosen, is_first=ways is first),
        }
        for source, chosen in _chosen(sources)
        for way in first
        for positions in first[way]
        for head, ways in measured.items()
        if _verified(first[way][positions], chosen) and _verified(ways[way][positions], chosen)
    ]


def _chosen(sources: Sequence[str]) -> Iterator[tuple[str, np.ndarray]]:
    """Yield all prompts, and where there are several sources, those of each, the most frequent first."""
    yield ALL, np.ones(len(sources), dtype=bool)
    names = np.array(sources)
    found = sorted(dict.fromkeys(sources), key=lambda name: -int((names == name).sum()))
    for name in found if len(found) > 1 else []:
        yield name, names == name


def _verified(found: Measured, chosen: np.ndarray) -> bool:
    return bool(found.gains.of(chosen).verifications.any())


def _numbers(found: Measured, first: Measured, chosen: np.ndarray, *, is_first: bool) -> dict[str, Any]:
    ours, kept = found.gains.of(chosen), found.kept.of(chosen)
    against = None if is_first else difference(ours, first.gains.of(chosen))
    against_kept = None if is_first else difference(kept, first.kept.of(chosen))
    return {
        "accept_length": accept_length(ours)._asdict(),
        "difference": against and against._asdict(),
        "accept_length_kept": accept_length(kept)._asdict(),
        "difference_kept": against_kept and against_kept._asdict(),
        "conversations": len({*ours.conversations[ours.verifications > 0].tolist()}),
        "prompts": int((ours.verifications > 0).sum()),
        "verifications": int(ours.verifications.sum()),
    }


def table(found: Sequence[Mapping[str, Any]]) -> str:
    by_position = any(row["positions"] != ALL for row in found)
    head = [
        "source",
        *(["text"] if by_position else []),
        "prompts",
        "sampling",
        "drafts",
        "head",
        "accept length",
        "difference",
        f"{CONFIDENCE:.0%} interval",
        "standard error",
    ]
    return markdown.table(head, [_cells(row, by_position=by_position) for row in found])


def _cells(row: Mapping[str, Any], *, by_position: bool) -> list[str]:
    against = [""] * 3
    if row["difference"]:
        estimate = Estimate(**row["difference"])
        against = [f"{estimate.value:+.3f}", "", ""]
        if estimate.standard_error is not None:
            against[1:] = [f"{estimate.low:+.3f} to {estimate.high:+.3f}", f"{estimate.standard_error:.3f}"]
    length = Estimate(**row["accept_length"])
    named = [row["source"], *([row["positions"]] if by_position else [])]
    named += [str(row["prompts"]), row["sampling"], drafts(row), row["head"]]
    return [*named, with_error(length.value, length.standard_error), *against]
