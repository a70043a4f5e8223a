"""The stage `prompts`: sources → OUT/prompts/{prompts.jsonl, rejects.jsonl, ledger.json}."""

import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import IO

from tqdm import tqdm

from eagle3.errors import InputError
from eagle3.prompts.checks import Check, build_checks, refusal
from eagle3.prompts.prompt import Prompt, Refused, read_prompts
from eagle3.prompts.sources import Row, Source, check_limit, configured_sources
from eagle3.storage import json_line, read_json, sha256_file, write_json, written_whole

log = logging.getLogger(__name__)

RULES = 1  # raise it when the same rows would give other prompts, so that prompts made by older rules are made again


@dataclass
class Counts:
    """What became of the rows of one source."""

    rows: int = 0
    prompts: int = 0
    rejected: Counter[str] = field(default_factory=Counter)  # by reason
    licenses: Counter[str] = field(default_factory=Counter)  # of the prompts
    origins: Counter[str] = field(default_factory=Counter)  # the prompts' own `source`


def prepare_prompts(
    *,
    path: str | None,
    license: str | None,
    name: str | None,
    split: str,
    limit: int | None,
    allowed_licenses: list[str],
    sources: list[dict] | None,
    keep_answers: bool,
    out_dir: str | Path,
) -> dict:
    """Write the prompts that pass and return the ledger; does nothing when the ledger says that they are up to date.

    All but the last two arguments are the keys of conf/prompts. `keep_answers` keeps assistant turns (imported
    conversations). Raises InputError when no prompt is left.
    """
    check_limit("prompts", limit)
    found = configured_sources(path=path, license=license, name=name, split=split, sources=sources)
    checks = build_checks(allowed_licenses=allowed_licenses)
    folder = Path(out_dir) / "prompts"
    inputs = {
        "rules": RULES,
        "keep_answers": keep_answers,
        "limit": limit,
        "allowed_licenses": list(allowed_licenses),
        "sources": [_source_inputs(source) for source in found],
    }
    ledger = _current_ledger(folder, inputs)
    if ledger is not None:
        log.info("prompts are up to date: %d in %s", ledger["prompts"], folder)
        return ledger
    counts = {source.name: Counts() for source in found}
    _write_prompts(folder, found, checks, counts, keep_answers=keep_answers, limit=limit)
    ledger = _ledger(folder, inputs, counts)
    write_json(folder / "ledger.json", ledger)
    log.info("%d of %d rows are prompts: %s", ledger["prompts"], ledger["rows"], folder)
    return ledger


def _source_inputs(source: Source) -> dict:
    return {
        "name": source.name,
        "path": str(source.path),
        "license": source.license,
        "limit": source.limit,
        "id_prefix": source.id_prefix,
        "fingerprint": source.fingerprint(),
    }


def _current_ledger(folder: Path, inputs: dict) -> dict | None:
    """The ledger, if it was made from these inputs and the prompts are still those it describes."""
    ledger_path, prompts_path = folder / "ledger.json", folder / "prompts.jsonl"
    if not (ledger_path.exists() and prompts_path.exists()):
        return None
    ledger = read_json(ledger_path, made_by="python precompute.py 'stages=[prompts]'")
    current = ledger["inputs"] == inputs and ledger["sha256"] == sha256_file(prompts_path)
    return ledger if current else None


def _write_prompts(
    folder: Path,
    sources: list[Source],
    checks: list[Check],
    counts: dict[str, Counts],
    *,
    keep_answers: bool,
    limit: int | None,
) -> None:
    ids: set[str] = set()
    with written_whole(folder / "rejects.jsonl") as rejects, written_whole(folder / "prompts.jsonl") as file:
        passing = chain.from_iterable(
            islice(_passing(source, checks, ids, counts[source.name], rejects, keep_answers=keep_answers), source.limit)
            for source in sources
        )
        for prompt in islice(passing, limit):
            file.write(json_line(asdict(prompt)))
        if not ids:
            raise _nothing_left(counts)


def _passing(
    source: Source, checks: list[Check], ids: set[str], counts: Counts, rejects: IO[bytes], *, keep_answers: bool
) -> Iterator[Prompt]:
    """The prompts of one source that pass; every other row is counted and written to `rejects`."""
    rows = read_prompts(source, keep_answers=keep_answers)
    for row, found in tqdm(rows, desc=f"prompts from {source.name}", unit=" rows"):
        counts.rows += 1
        reason = found.reason if isinstance(found, Refused) else refusal(found, checks)
        if reason is None and found.id in ids:
            reason = "duplicate id"
        if reason is None:
            assert isinstance(found, Prompt)
            ids.add(found.id)
            counts.prompts += 1
            counts.licenses[found.license or ""] += 1
            counts.origins[found.source] += 1
            yield found
        else:
            counts.rejected[reason] += 1
            rejects.write(_reject(source, row, found.id, reason))


def _reject(source: Source, row: Row, id: str | None, reason: str) -> bytes:
    return json_line({"id": id, "source": source.name, "file": row.file, "line": row.line, "reason": reason})


def _ledger(folder: Path, inputs: dict, counts: dict[str, Counts]) -> dict:
    return {
        "rows": sum(count.rows for count in counts.values()),
        "prompts": sum(count.prompts for count in counts.values()),
        "sha256": sha256_file(folder / "prompts.jsonl"),
        "sources": {name: vars(count) for name, count in counts.items()},
        "inputs": inputs,
    }


def _nothing_left(counts: dict[str, Counts]) -> InputError:
    rows = sum(count.rows for count in counts.values())
    rejected = sum((count.rejected for count in counts.values()), Counter())
    reasons = ", ".join(f"{reason}: {number}" for reason, number in rejected.most_common()) or "the sources are empty"
    way_out = "give rows with messages, conversations, turns or prompt"
    if any(reason.startswith("license") for reason in rejected):
        way_out = (
            "declare what licence the rows have with prompts.license=MIT, or extend prompts.allowed_licenses "
            "(conf/prompts/default.yaml)"
        )
    return InputError(f"prompts: none of {rows} rows in {', '.join(counts)} passed ({reasons}); {way_out}")
