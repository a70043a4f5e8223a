"""The table of a comparison, and compare.json: all of it, by source of the prompts too."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from eagle3 import markdown
from eagle3.decoding.paired import CONFIDENCE, Estimate, accept_length, difference
from eagle3.draft_shape import Shape
from eagle3.errors import InputError
from eagle3.serving.compare.measure import Measured, Way
from eagle3.serving.report import with_error

ALL = "all"  # sources, positions


def rows(measured: Mapping[str, Mapping[Way, Measured]], sources: Sequence[str]) -> list[dict[str, Any]]:
    """Return a row for each way, source and head; the first head is the one that the others are compared with."""
    first = next(iter(measured.values()))
    return [
        {
            "sampling": way.sampling,
            "temperature": way.temperature,
            **way.shape._asdict(),
            "source": source,
            "positions": positions,
            "head": head,
            **_numbers(_at(ways[way], positions), _at(first[way], positions), chosen, is_first=ways is first),
        }
        for source, chosen in _chosen(sources)
        for way in first
        for positions in [ALL, *first[way].by_position]
        for head, ways in measured.items()
        if _verified(_at(first[way], positions), chosen) and _verified(_at(ways[way], positions), chosen)
    ]


def _at(found: Measured, positions: str) -> Measured:
    return found if positions == ALL else found.by_position[positions]


def require_verified(measured: Mapping[str, Mapping[Way, Measured]]) -> None:
    """Raise InputError where no answer was longer than the token that prefill gives."""
    for ways in measured.values():
        for found in ways.values():
            if not found.gains.verifications.any():
                raise InputError(
                    f"prompts.path: none of {len(found.gains.verifications)} answers was longer than one token, so no "
                    f"draft was verified; take other prompts or raise max_new_tokens"
                )


def _chosen(sources: Sequence[str]) -> Iterator[tuple[str, np.ndarray]]:
    """Yield all prompts, and where there are several sources, those of each, the most frequent first."""
    yield ALL, np.ones(len(sources), dtype=bool)
    names = np.array(sources)
    found = sorted(set(sources), key=lambda name: -int((names == name).sum()))
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
        "prompts": int((ours.verifications > 0).sum()),
        "verifications": int(ours.verifications.sum()),
    }


def table(found: Sequence[Mapping[str, Any]]) -> str:
    """Return the rows in Markdown."""
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
    drafts = str(Shape(row["steps"], row["topk"], row["draft_tokens"]))
    against = [""] * 3
    if row["difference"]:
        estimate = Estimate(**row["difference"])
        against = [f"{estimate.value:+.3f}", "", ""]
        if estimate.standard_error is not None:
            against[1:] = [f"{estimate.low:+.3f} to {estimate.high:+.3f}", f"{estimate.standard_error:.3f}"]
    length = Estimate(**row["accept_length"])
    named = [row["source"], *([row["positions"]] if by_position else [])]
    named += [str(row["prompts"]), row["sampling"], drafts, row["head"]]
    return [*named, with_error(length.value, length.standard_error), *against]
