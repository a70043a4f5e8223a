"""The stage `prompts`: sources → DIR/prompts/{prompts.jsonl, rejects.jsonl, ledger.json, report.md, …}, resumable.

Rows are scanned in chunks (scan.py), duplicates and the mix are selected over all chunks (selection.py), then the files
are written (ledger.py, report.py), ledger.json last. A killed run resumes from DIR/prompts/.work.
"""

import logging
import shutil
from collections import Counter
from contextlib import closing
from pathlib import Path

from loky import cpu_count

from eagle3.errors import InputError
from eagle3.prompts.ledger import Counts, current_ledger, make_ledger, nothing_left, write_prompts
from eagle3.prompts.reading.sources import Source, configured_sources
from eagle3.prompts.report import write_report
from eagle3.prompts.rules import Rules
from eagle3.prompts.scan import Enough, Scanner, ScanTask, scan, tasks_of
from eagle3.prompts.selection import Selection
from eagle3.secrets import public
from eagle3.settings.prompts import StageSettings
from eagle3.storage.files import read_json, sha256_file
from eagle3.storage.records import write_sealed_json

log = logging.getLogger(__name__)

FORMAT = 9  # raise it when the same rows would give other prompts, so that older prompts are made again


def prepare_prompts(settings: StageSettings, rules: Rules, *, keep_answers: bool, out_dir: str | Path) -> dict:
    """Write the prompts that pass and return the ledger; does nothing if the ledger shows that they are up to date.

    `keep_answers` keeps assistant turns (imported conversations). Raises InputError when no prompt is left, or when
    the answers in `out_dir`/answers are to other prompts.
    """
    found = configured_sources(settings)
    folder = Path(out_dir) / "prompts"
    work = folder / ".work"
    made_by = {"format": FORMAT, "keep_answers": keep_answers, "rules": rules.inputs()}
    sources = [
        {**source.inputs(), "credit": source.terms.credit(), "limit": source.limit, "files": source.fingerprint()}
        for source in found
    ]
    inputs = public({**made_by, "limit": settings.limit, "sources": sources})
    ledger = current_ledger(folder, inputs)
    if ledger is not None:
        log.info("prompts are up to date: %d in %s", ledger["prompts"], folder)
        shutil.rmtree(work, ignore_errors=True)  # of a run that was killed while it removed it
        return ledger
    scanner = Scanner(work / "chunks", found, rules, keep_answers=keep_answers)
    tasks = tasks_of(found, int(settings.chunk_mb * 1e6), list(made_by.values()))
    counts, traffic = _write_selected(work, scanner, tasks, rules, settings)
    ledger = _publish(folder, found, counts, traffic, rules, inputs)
    shutil.rmtree(work)
    log.info("%d of %d rows are prompts: %s", ledger["prompts"], ledger["rows"], folder)
    if left_out := sum((Counter(source["rejected"]) for source in ledger["sources"].values()), Counter[str]()):
        log.info("left out: %s; report.md there has more", dict(left_out.most_common()))
    return ledger


def _write_selected(
    work: Path, scanner: Scanner, tasks: list[ScanTask], rules: Rules, settings: StageSettings
) -> tuple[dict[str, Counts], dict | None]:
    """Write the selected prompts to `work`/made; return their counts by source, and the report of the traffic mix.

    Reads as far as the limits require, and further if duplicates leave too few prompts.
    """
    sources, limit, processes = scanner.sources, settings.limit, settings.processes or cpu_count()
    sample = rules.sample_cells(rules.traffic) if rules.traffic else Counter()
    enough = Enough(sources, limit=None if rules.traffic else limit)  # the mix draws from all rows
    while True:
        chunks = list(scan(tasks, scanner, enough=enough, processes=processes))
        if not any(chunk.summary["prompts"] for chunk in chunks):
            raise nothing_left(sources, chunks)
        with closing(Selection(work / "selection", chunks, threads=processes)) as selection:
            selection.apply(rules.duplicates, sources)
            if len(chunks) < len(tasks) and enough.raised(selection.kept(len(sources))):
                continue
            report = selection.draw(rules.traffic, sample) if rules.traffic else None
            if limit is not None:
                selection.limit(limit)
            return write_prompts(work / "made", sources, chunks, selection), report


def _publish(
    folder: Path, sources: list[Source], counts: dict[str, Counts], traffic: dict | None, rules: Rules, inputs: dict
) -> dict:
    """Move the new files into `folder` and write their ledger and report."""
    made = folder / ".work" / "made"
    _require_not_answered(folder, made / "prompts.jsonl")
    (folder / "ledger.json").unlink(missing_ok=True)  # if the next lines are killed, it would describe other prompts
    for name in ("rejects.jsonl", "prompts.jsonl"):
        (made / name).replace(folder / name)
    ledger = public(make_ledger(folder, sources, counts, traffic, rules, inputs))
    write_report(folder, ledger)
    write_sealed_json(folder / "ledger.json", ledger)
    return ledger


def _require_not_answered(folder: Path, prompts: Path) -> None:
    """Raise InputError if the answers next to `folder` are to other prompts than those in the new file `prompts`."""
    manifest = folder.parent / "answers" / "manifest.json"
    if not manifest.exists():
        return
    answered = read_json(manifest, made_by="precompute.py 'stages=[answers]'")
    if answered["prompts_sha256"] != sha256_file(prompts):
        raise InputError(
            f"the answers in {manifest.parent} are to other prompts than these would be, so {folder} stays as it is; "
            f"take another out_dir, continue with the prompts that are there ('stages=[answers,features]'), or delete "
            f"{manifest.parent} to generate answers again: those in it are lost"
        )
