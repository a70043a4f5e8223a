"""The stage `prompts`: sources → DIR/prompts/{prompts.jsonl, rejects.jsonl, ledger.json, report.md, …}, resumable.

Rows are scanned in chunks (scan.py), duplicates and the mix are selected over all chunks (selection.py), then the files
are written (ledger.py, report.py), ledger.json last. A killed run resumes from DIR/prompts/.work.
"""

import logging
import shutil
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from loky import cpu_count

from eagle3.errors import InputError
from eagle3.prompts.chunks import READING, ScannedChunk
from eagle3.prompts.growing import GrowingSource
from eagle3.prompts.ledger import (
    LISTED,
    Counts,
    current_ledger,
    in_words,
    make_ledger,
    merged,
    nothing_left,
    write_prompts,
)
from eagle3.prompts.reading.sources import Source, configured_sources, require_unique_names
from eagle3.prompts.report import write_report
from eagle3.prompts.rules import Rules
from eagle3.prompts.scan import Enough, Scanner, ScanTask, scan, tasks_of
from eagle3.prompts.selection import Selection
from eagle3.secrets import public
from eagle3.settings.prompts import StageSettings
from eagle3.storage.files import read_json, sha256_file
from eagle3.storage.records import write_sealed_json

log = logging.getLogger(__name__)

FORMAT = 10  # raise it when the same rows would give other prompts, so that older prompts are made again


def prepare_prompts(
    settings: StageSettings,
    rules: Rules,
    *,
    keep_answers: bool,
    out_dir: str | Path,
    growing: GrowingSource | None = None,
) -> dict:
    """Write the prompts that pass and return the ledger; does nothing if the ledger shows that they are up to date.

    `keep_answers` keeps assistant turns (imported conversations); `growing` is a source before those of the settings,
    which may then name none. Raises InputError when no prompt is left, or when the answers in `out_dir`/answers are to
    other prompts.
    """
    named = growing is None or settings.path is not None or settings.sources is not None
    found = configured_sources(settings) if named else []
    if growing is not None:
        found = [growing.source(), *found]
        require_unique_names(found)
    folder = Path(out_dir) / "prompts"
    work = folder / ".work"
    made_by = {"format": FORMAT, "keep_answers": keep_answers, "rules": rules.inputs()}

    def inputs() -> Any:
        sources = [
            {**source.inputs(), "credit": source.terms.credit(), "limit": source.limit, "files": source.fingerprint()}
            for source in found
        ]
        return public({**made_by, "limit": settings.limit, "sources": sources})

    ledger = current_ledger(folder, inputs())
    if ledger is not None:
        log.info("prompts are up to date: %d in %s", ledger["prompts"], folder)
        shutil.rmtree(work, ignore_errors=True)  # of a run that was killed while it removed it
        return ledger
    scanner = Scanner(work / "chunks", found, rules, keep_answers=keep_answers)

    def select(sources: list[Source], *, first: int = 0) -> AbstractContextManager["Selected"]:
        """Select among the rows of the sources from number `first` on."""
        tasks = tasks_of(sources, int(settings.chunk_mb * 1e6), list(made_by.values()))
        tasks = [task for task in tasks if task.source >= first]
        return _selected(work, scanner, sources, tasks, rules, settings, grows=growing is not None)

    limited = found
    if growing is not None:
        found[0], limit = _grown(growing, found, select)
        limited = [replace(found[0], limit=limit), *found[1:]]
    counts, traffic = _write(work, limited, select, rules, settings)
    ledger = _publish(folder, found, counts, traffic, rules, inputs())
    shutil.rmtree(work)
    log.info("%d of %d rows are prompts: %s", ledger["prompts"], ledger["rows"], folder)
    _log_details(ledger["sources"].values())
    return ledger


def _log_details(counts: Collection[dict]) -> None:
    """Log one line of what was left out, and one of how rows were read; `counts` of the sources in the ledger."""
    named = merged(source["named"] for source in counts)
    if left_out := sum((Counter(source["rejected"]) for source in counts), Counter[str]()):
        log.info("left out: %s; report.md there has more", in_words(left_out, named))
    if read := sum((Counter(source["found"].get(READING, {})) for source in counts), Counter[str]()):
        log.info("as read: %s; report.md there has more", "; ".join(_by_kind(read)))


def _by_kind(notes: Counter[str]) -> Iterator[str]:
    """Yield each kind of notes with its count, or with the names that it is about, each with its count."""
    kinds: dict[str, Counter[str]] = {}
    for note, number in notes.items():
        what, _, name = note.partition(": ")
        kinds.setdefault(what, Counter())[name] += number
    for what, names in kinds.items():
        yield f"{what}: {names['']}" if "" in names else f"{what}: {in_words(names, {}, most=LISTED)}"


Selected = tuple[list[ScannedChunk], Selection]


@contextmanager
def _selected(
    work: Path,
    scanner: Scanner,
    sources: list[Source],
    tasks: list[ScanTask],
    rules: Rules,
    settings: StageSettings,
    *,
    grows: bool,
) -> Iterator[Selected]:
    """Scan and find duplicates; reads as far as the limits require, and further if duplicates leave too few prompts.

    `grows`: the first source has no more rows than needed, and is read whole."""
    processes = settings.processes or cpu_count()
    enough = Enough(sources, limit=None if rules.traffic else settings.limit)  # the mix draws from all rows
    if grows:
        enough.wanted[0] = None
    while True:
        chunks = list(scan(tasks, scanner, enough=enough, processes=processes))
        if not any(chunk.summary["prompts"] for chunk in chunks) and not grows:
            raise nothing_left(sources, chunks)
        with closing(Selection(work / "selection", chunks, threads=processes)) as selection:
            selection.apply(rules.duplicates, sources)
            if len(chunks) < len(tasks) and enough.raised(selection.kept(len(sources))):
                continue
            yield chunks, selection
            return


def _grown(growing: GrowingSource, sources: list[Source], select: Callable[..., Any]) -> tuple[Source, int]:
    """Let the growing source, which is the first, add rows until enough are kept; return it and that number."""
    others = 0
    if len(sources) > 1:
        with select(sources, first=1) as (chunks, selection):
            if not (others := sum(selection.kept(len(sources)))):
                raise nothing_left(sources[1:], chunks)
    wanted = growing.wanted(others)
    while True:
        source = growing.source()
        kept, refused = 0, Counter[str]()
        if source.files:
            with select([replace(source, limit=wanted), *sources[1:]]) as (chunks, selection):
                kept, refused = selection.kept(len(sources))[0], selection.refused(0)
                refused += sum((Counter(each.summary["rejected"]) for each in chunks if each.source == 0), Counter())
        if kept >= wanted:
            return source, wanted
        growing.grow(kept, wanted, refused)


def _write(
    work: Path, sources: list[Source], select: Callable[..., Any], rules: Rules, settings: StageSettings
) -> tuple[dict[str, Counts], dict | None]:
    """Write the selected prompts to `work`/made; return their counts by source, and the report of the traffic mix."""
    sample = rules.sample_cells(rules.traffic) if rules.traffic else Counter()
    with select(sources) as (chunks, selection):
        report = selection.draw(rules.traffic, sample) if rules.traffic else None
        if settings.limit is not None:
            selection.limit(settings.limit)
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
