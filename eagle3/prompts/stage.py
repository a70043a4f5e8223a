"""The stage `prompts`: sources → DIR/prompts/{prompts.jsonl, rejects.jsonl, ledger.json, report.md, …}, resumable.

Rows are scanned in chunks (scan.py), duplicates and the mix are chosen over all of them (selection.py), then the files
are written (output/), ledger.json last. A killed run resumes from DIR/prompts/.work.
"""

import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from eagle3.progress import Bar
from eagle3.prompts.chunks import ScannedChunk
from eagle3.prompts.licenses.attribution import attribution_text
from eagle3.prompts.output.answered import require_not_answered
from eagle3.prompts.output.files import Counts, write_prompts
from eagle3.prompts.output.ledger import current_ledger, make_ledger, nothing_left
from eagle3.prompts.output.report import write_report
from eagle3.prompts.reading.sources import Source, configured_sources
from eagle3.prompts.rules import Rules
from eagle3.prompts.scan import Enough, Scanner, ScanTask, scan, tasks_of
from eagle3.prompts.selection import Selection
from eagle3.secrets import public
from eagle3.storage.files import atomic_write
from eagle3.storage.records import write_sealed_json

log = logging.getLogger(__name__)

FORMAT = 7  # raise it when the same rows would give other prompts, so that prompts made by older rules are made again
SCRATCH_FACTOR = 4  # times the sources
PACKED, UNPACKED = (".gz", ".zst", ".parquet"), 5  # files of text are so many times as large when they are read


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
    processes = processes or _cores()
    work = folder / ".work"
    with _scanned_and_selected(
        work, found, rules, keep_answers=keep_answers, limit=limit, processes=processes, chunk_mb=chunk_mb,
        refused_sample=refused_sample,
    ) as (chunks, selection, traffic):  # fmt: skip
        counts = write_prompts(work / "made", found, chunks, selection, refused_sample=refused_sample)
    ledger = _publish(folder, found, counts, traffic, rules, inputs)
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


@contextmanager
def _scanned_and_selected(
    work: Path,
    sources: list[Source],
    rules: Rules,
    *,
    keep_answers: bool,
    limit: int | None,
    processes: int,
    chunk_mb: float,
    refused_sample: int,
) -> Iterator[tuple[list[ScannedChunk], Selection, dict | None]]:
    """Scan as much as the limits ask for; more, when duplicates leave too few of what was scanned.

    Gives the chunks, which of their prompts are kept, and the report of the traffic mix.
    """
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
    log_scratch_space(work, tasks)
    sample = rules.sample_cells()
    enough = Enough(sources, limit=None if rules.traffic else limit)  # the mix draws from all there is
    while True:
        chunks = list(scan(tasks, scanner, enough=enough, processes=processes))
        if not any(chunk.summary["prompts"] for chunk in chunks):
            raise nothing_left(sources, chunks)
        with Selection(work / "selection", chunks, threads=processes) as selection:
            selection.apply(rules.duplicates, sources)
            if len(chunks) < len(tasks) and enough.raised(selection.kept(len(sources))):
                continue
            report = selection.draw(rules.traffic, sample) if rules.traffic else None
            if limit is not None:
                selection.limit(limit)
            yield chunks, selection, report
            return


def log_scratch_space(folder: Path, tasks: list[ScanTask]) -> int:
    """Log and return how many bytes `folder` takes at most: rows with their hashes, the database, and the new files."""
    needed = sum(
        SCRATCH_FACTOR * task.chunk.size * (UNPACKED if task.chunk.file.endswith(PACKED) else 1) for task in tasks
    )
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    log.log(
        logging.WARNING if needed > free else logging.INFO, "up to %s of scratch space in %s; %s are free",
        Bar.format_sizeof(needed, "B"), folder, Bar.format_sizeof(free, "B"),
    )  # fmt: skip
    return needed


def _remove_work(folder: Path) -> None:
    """Rename, then remove: what a kill in the middle leaves must not be taken for whole chunks."""
    work, removed = folder / ".work", folder / ".removed"
    shutil.rmtree(removed, ignore_errors=True)
    if work.exists():
        work.rename(removed)
        shutil.rmtree(removed)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _publish(
    folder: Path, sources: list[Source], counts: dict[str, Counts], traffic: dict | None, rules: Rules, inputs: dict
) -> dict:
    """Put the new files into `folder` and write the ledger and the report of them."""
    made = folder / ".work" / "made"
    require_not_answered(folder, made / "prompts.jsonl", inputs)
    (folder / "ledger.json").unlink(missing_ok=True)  # it would describe other prompts if the next lines were killed
    for name in ("rejects.jsonl", "refused_sample.jsonl", "prompts.jsonl"):
        (made / name).replace(folder / name)
    ledger = public(make_ledger(folder, sources, counts, traffic, rules, inputs))
    write_report(folder, ledger)
    with atomic_write(folder / "attribution.txt") as file:
        file.write(attribution_text(ledger["attribution"]).encode())
    write_sealed_json(folder / "ledger.json", ledger)
    return ledger
