"""The stage `prompts`: sources → DIR/prompts/{prompts.jsonl, rejects.jsonl, ledger.json, report.md, …}, resumable.

Rows are scanned in chunks (scan.py), duplicates and the mix are chosen over all of them (selection.py), then the files
are written (output.py, ledger.py, report.py), ledger.json last. DIR/prompts/.work holds what a killed run goes on from.
"""

import logging
import os
import shutil
from pathlib import Path

from eagle3.prompts.licenses.attribution import attribution_text
from eagle3.prompts.output.answered import require_not_answered
from eagle3.prompts.output.files import write_prompts
from eagle3.prompts.output.ledger import current_ledger, make_ledger, nothing_left
from eagle3.prompts.output.report import write_report
from eagle3.prompts.reading.sources import Source, configured_sources
from eagle3.prompts.rules import Rules
from eagle3.prompts.scan import Enough, Scanner, scan, tasks_of
from eagle3.prompts.scratch import tell_scratch
from eagle3.prompts.selection import Selection, select
from eagle3.prompts.spool import Scanned
from eagle3.secrets import public
from eagle3.storage.files import atomic_write
from eagle3.storage.records import write_sealed_json

log = logging.getLogger(__name__)

FORMAT = 6  # raise it when the same rows would give other prompts, so that prompts made by older rules are made again


def prepare_prompts(
    *,
    path: str | None,
    license: str | None,
    name: str | None,
    split: str | None,
    attribution: str | None,
    limit: int | None,
    sources: list[str | dict] | None,
    fields: dict[str, str | list[str]],
    roles: dict[str, str],
    tokenizer: str | None,
    tools: str,
    rules: Rules,
    processes: int | None,
    chunk_mb: float,
    refused_sample: int,
    keep_answers: bool,
    out_dir: str | Path,
) -> dict:
    """Write the prompts that pass and return the ledger; does nothing when the ledger says that they are up to date.

    Most arguments are keys of conf/prompts. `keep_answers` keeps assistant turns (imported conversations). Raises
    InputError when no prompt is left, or when `out_dir`/responses answers other prompts.
    """
    found = configured_sources(
        path=path, license=license, name=name, split=split, attribution=attribution, sources=sources,
        fields=fields, roles=roles, tokenizer=tokenizer, tools=tools,
    )  # fmt: skip
    folder = Path(out_dir) / "prompts"
    inputs = _inputs(found, rules, keep_answers=keep_answers, limit=limit, refused_sample=refused_sample)
    ledger = current_ledger(folder, inputs)
    if ledger is not None:
        log.info("prompts are up to date: %d in %s", ledger["prompts"], folder)
        _remove_work(folder)
        return ledger
    scanned, selection = _scan_and_select(
        folder / ".work", found, rules, keep_answers=keep_answers, limit=limit, processes=processes or _cores(),
        chunk_mb=chunk_mb, refused_sample=refused_sample,
    )  # fmt: skip
    ledger = _write(folder, found, scanned, selection, rules, inputs, processes=processes or _cores())
    _remove_work(folder)
    log.info("%d of %d rows are prompts: %s", ledger["prompts"], ledger["rows"], folder)
    return ledger


def _inputs(sources: list[Source], rules: Rules, *, keep_answers: bool, limit: int | None, refused_sample: int) -> dict:
    inputs = {
        "format": FORMAT,
        "keep_answers": keep_answers,
        "limit": limit,
        "refused_sample": refused_sample,
        "rules": rules.inputs(),
        "sources": [
            {
                **source.inputs(),
                "credit": source.terms.credit(),
                "limit": source.limit,
                "files": source.fingerprint(),
            }
            for source in sources
        ],
    }
    return public(inputs)


def _scan_and_select(
    work: Path,
    sources: list[Source],
    rules: Rules,
    *,
    keep_answers: bool,
    limit: int | None,
    processes: int,
    chunk_mb: float,
    refused_sample: int,
) -> tuple[Scanned, Selection]:
    """Scan as much as the limits ask for; more, when duplicates leave too few of what was scanned."""
    scanner = Scanner(
        folder=work / "chunks",
        sources=sources,
        checks=[rules.checks(source) for source in sources],
        safe_id=rules.privacy.safe_id,
        safe_source=rules.privacy.safe_source,
        signer=rules.signer,
        traffic=rules.traffic,
        keep_answers=keep_answers,
        refused_sample=refused_sample,
        masked=rules.privacy.masked,
    )
    tasks = tasks_of(sources, int(chunk_mb * 1e6), [FORMAT, keep_answers, refused_sample, rules.inputs()])
    tell_scratch(work, sources, tasks, scanner.dtype)
    sample = rules.measured_sample()
    enough = Enough(sources, limit=None if rules.traffic else limit)  # the mix draws from all there is
    while True:
        chunks = list(scan(tasks, scanner, enough=enough, processes=processes))
        with Scanned(chunks) as scanned:
            if not len(scanned):
                raise nothing_left(sources, chunks)
            selection = select(
                scanned, sources, duplicates=rules.duplicates, traffic=rules.traffic, sample=sample, limit=limit,
                folder=work / "columns", processes=processes,
            )  # fmt: skip
        if len(chunks) == len(tasks) or not enough.raised(selection.unique().tolist()):
            return scanned, selection


def _remove_work(folder: Path) -> None:
    """Rename, then remove: what a kill in the middle leaves must not be taken for whole chunks."""
    work, removed = folder / ".work", folder / ".removed"
    shutil.rmtree(removed, ignore_errors=True)
    if work.exists():
        work.rename(removed)
        shutil.rmtree(removed)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _write(
    folder: Path,
    sources: list[Source],
    scanned: Scanned,
    selection: Selection,
    rules: Rules,
    inputs: dict,
    *,
    processes: int,
) -> dict:
    made = folder / ".work" / "made"
    counts = write_prompts(
        made, sources, scanned, selection, refused_sample=inputs["refused_sample"], processes=processes
    )
    require_not_answered(folder, made / "prompts.jsonl", inputs)
    (folder / "ledger.json").unlink(missing_ok=True)  # it would describe other prompts if the next lines were killed
    for name in ("rejects.jsonl", "refused_sample.jsonl", "prompts.jsonl"):
        (made / name).replace(folder / name)
    ledger = public(make_ledger(folder, sources, counts, selection.traffic, rules, inputs))
    write_report(folder, ledger)
    with atomic_write(folder / "attribution.txt") as file:
        file.write(attribution_text(ledger["attribution"]).encode())
    write_sealed_json(folder / "ledger.json", ledger)
    return ledger
