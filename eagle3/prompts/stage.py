"""The stage `prompts`: sources → DIR/prompts/{prompts.jsonl, rejects.jsonl, ledger.json, report.md, …}, resumable, and
the same files in DIR/held_out/prompts for the prompts that are held out.

Rows are scanned in chunks (scan.py), duplicates and the mix are selected over all chunks (selection.py), then the files
are written (ledger.py, report.py), ledger.json last. A killed run resumes from DIR/prompts/.work.
"""

import logging
import shutil
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from loky import cpu_count

from eagle3.errors import InputError
from eagle3.prompts.chunks import READING, ScannedChunk
from eagle3.prompts.ledger import (
    LISTED,
    Counts,
    current_ledger,
    in_words,
    make_ledger,
    merged,
    nothing_left,
    total,
    write_prompts,
)
from eagle3.prompts.reading.sources import Source, configured_sources, require_unique_names
from eagle3.prompts.report import write_report
from eagle3.prompts.rules import Rules
from eagle3.prompts.scan import Enough, KnownScanner, Scanner, in_order, scan, scan_tasks
from eagle3.prompts.selection import HELD_OUT, KNOWN, Selection
from eagle3.secrets import public
from eagle3.settings.parts import plain
from eagle3.settings.prompts import PromptSettings
from eagle3.storage.files import read_json, sha256_file
from eagle3.storage.records import write_sealed_json

log = logging.getLogger(__name__)

FORMAT = 17  # raise it when the same rows would give other prompts, so that older prompts are made again


class GrowingSource(Protocol):
    """A source whose rows are made while the stage runs, as many as pass what the stage checks. It comes before all
    others, so that the limit of all prompts does not cut it off."""

    def source(self) -> Source:
        """Return the source with the files that it has now, without a limit."""

    def wanted(self, others: int) -> int:
        """Return how many of its prompts are to be kept, next to `others` of the other sources."""

    def grow(self, kept: int, wanted: int, refused: Counter[str]) -> None:
        """Add files, because `wanted` prompts are not reached: `kept` of the rows so far are, the others were `refused`
        for these reasons. Raises InputError if more rows do not help."""


def prepare_prompts(
    settings: PromptSettings,
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
    folder, held_out = Path(out_dir) / "prompts", Path(out_dir) / "held_out" / "prompts"
    folders = [folder] if settings.held_out is None else [folder, held_out]
    work = folder / ".work"
    made_by = {"format": FORMAT, "keep_answers": keep_answers, "rules": rules.inputs()}

    inputs = _inputs(made_by, found, settings)  # before the files are read: they may change meanwhile
    current = [ledger for each in folders if (ledger := current_ledger(each, inputs))]
    if len(current) == len(folders):
        for each, ledger in zip(folders, current, strict=True):
            log.info("prompts are up to date: %d in %s", ledger["prompts"], each)
        shutil.rmtree(work, ignore_errors=True)  # of a run that was killed while it removed it
        return current[0]
    _require_held_out_as_before(settings, held_out)
    scanner = Scanner(work / "chunks", found, rules, keep_answers=keep_answers)

    select = Select(work, scanner, rules, settings, made_by, grows=growing is not None)
    limited = found
    if growing is not None:
        found[0], limit = _grown(growing, found, select, folder)
        limited = [replace(found[0], limit=limit), *found[1:]]
    new = [work / "made", work / "made_held_out"][: len(folders)]
    counts, traffic = _write(new, limited, select)
    sets = [*zip(folders, new, counts, strict=True)]
    for each, made, _ in sets:
        _require_not_answered(each, made / "prompts.jsonl")
    now = _inputs(made_by, found, settings)
    if growing is not None:  # it is another one now
        inputs["sources"][0] = now["sources"][0]
    if now != inputs:
        log.warning("a source or its card changed while it was read; the next run makes the prompts again")
    ledgers = [_publish(each, made, found, count, traffic, rules, inputs) for each, made, count in sets]
    shutil.rmtree(work)
    for each, ledger in zip(folders, ledgers, strict=True):
        log.info("%d of %d rows are prompts: %s", ledger["prompts"], ledger["rows"], each)
    _log_details(ledgers[0]["sources"].values())
    _warn_of_few(ledgers[0])
    return ledgers[0]


def _inputs(made_by: dict[str, Any], found: list[Source], settings: PromptSettings) -> Any:
    """Return everything that the prompts depend on, as the ledger has it."""
    sources = [
        {**source.inputs(), "credit": source.terms.credit(), "limit": source.limit, "files": source.fingerprint()}
        for source in found
    ]
    counted = {"limit": settings.limit, "held_out": settings.held_out, "held_out_seed": settings.held_out_seed}
    return public({**made_by, **counted, "sources": sources})


def _require_held_out_as_before(settings: PromptSettings, held_out: Path) -> None:
    if settings.held_out is None and (held_out / "ledger.json").exists():
        raise InputError(
            f"prompts.held_out=null would train on the prompts that an earlier run held out in {held_out}; set "
            f"prompts.held_out as before, take another out_dir, or delete {held_out.parent}"
        )


def _warn_of_few(ledger: dict) -> None:
    """Warn if most prompts go to the held-out ones, or were known."""
    left_out = total(source["rejected"] for source in ledger["sources"].values())
    prompts, held_out = ledger["prompts"], left_out[HELD_OUT]
    known = sum(number for reason, number in left_out.items() if reason.startswith(KNOWN))
    if held_out > prompts:
        log.warning(
            "prompts.held_out: %d prompts are held out and only %d are left to train on; hold out fewer, e.g. "
            "prompts.held_out=0.1", held_out, prompts,
        )  # fmt: skip
    if known > prompts + held_out:
        log.warning(
            "prompts.duplicates.known: %d prompts repeat those of earlier runs and only %d are left; is a folder named "
            "there that has the same data?", known, prompts + held_out,
        )  # fmt: skip


def _log_details(counts: Collection[dict]) -> None:
    """Log one line of what was left out, and one of how rows were read; `counts` of the sources in the ledger."""
    named = merged(source["named"] for source in counts)
    if left_out := total(source["rejected"] for source in counts):
        log.info("left out: %s; report.md there has more", in_words(left_out, named))
    if read := total(source["found"].get(READING, {}) for source in counts):
        log.info("as read: %s; report.md there has more", "; ".join(_by_kind(read)))


def _by_kind(notes: Counter[str]) -> Iterator[str]:
    """Yield each kind of notes with its count, or with the names that it is about, each with its count."""
    kinds: dict[str, Counter[str]] = {}
    for note, number in notes.items():
        what, _, name = note.partition(": ")
        kinds.setdefault(what, Counter())[name] += number
    for what, names in kinds.items():
        yield f"{what}: {names['']}" if "" in names else f"{what}: {in_words(names, {}, most=LISTED)}"


@dataclass(frozen=True)
class Select:
    """Opens a selection among the rows of sources, with the rules and limits of one run of the stage."""

    work: Path
    scanner: Scanner
    rules: Rules
    settings: PromptSettings
    made_by: dict[str, Any]
    grows: bool  # the first source has no more rows than needed, and is read whole

    @contextmanager
    def __call__(self, sources: list[Source], *, first: int = 0) -> Iterator[tuple[list[ScannedChunk], Selection]]:
        """Scan the sources from number `first` on, and find duplicates; reads as far as the limits require, and further
        if duplicates leave too few prompts.
        """
        rules, settings = self.rules, self.settings
        processes, chunk_bytes = settings.processes or cpu_count(), int(settings.chunk_mb * 1e6)
        enough = Enough(sources, limit=None if rules.traffic else settings.limit)  # the mix draws from all rows
        if self.grows:
            enough.wanted[0] = None
        depends_on = [FORMAT, self.scanner.keep_answers, plain(rules.duplicates)]
        known_tasks = scan_tasks([([file], depends_on) for file in rules.known.values()], chunk_bytes)
        known_chunks = in_order(KnownScanner(self.scanner), known_tasks, min(processes, len(known_tasks)))
        known = [chunk for _, chunk in known_chunks]
        files = [(source.files, [[*self.made_by.values()], source.inputs()]) for source in sources]
        tasks = [task for task in scan_tasks(files, chunk_bytes) if task.source >= first]
        while True:
            chunks = list(scan(tasks, self.scanner, enough=enough, processes=processes))
            if not any(chunk.summary["prompts"] for chunk in chunks) and not self.grows:
                raise nothing_left(sources, chunks)
            folder = self.work / "selection"
            with closing(Selection(folder, chunks, known, [*rules.known], threads=processes)) as selection:
                selection.apply(rules.duplicates, sources)
                if len(chunks) < len(tasks) and enough.raised(selection.kept(len(sources))):
                    continue
                yield chunks, selection
                return


def _grown(growing: GrowingSource, sources: list[Source], select: Select, folder: Path) -> tuple[Source, int]:
    """Let the growing source, which is the first, add rows until enough are kept; return it and that number.

    Raises InputError before any row is added to those whose prompts, in `folder`, are answered.
    """
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
                refused += total(each.summary["rejected"] for each in chunks if each.source == 0)
        if kept >= wanted:
            return source, wanted
        if source.files:
            _require_not_answered(folder)
        growing.grow(kept, wanted, refused)


def _write(folders: list[Path], sources: list[Source], select: Select) -> tuple[list[dict[str, Counts]], dict | None]:
    """Write the selected prompts to the first folder, those that are held out to the second, if there is one; return
    the counts of each by source, and the report of the traffic mix.
    """
    rules, settings = select.rules, select.settings
    sample = rules.sample_cells(rules.traffic) if rules.traffic else Counter()
    with select(sources) as (chunks, selection):
        if not any(selection.kept(len(sources))):
            raise InputError(
                f"prompts.duplicates.known={rules.duplicates.known}: every prompt repeats one of these runs; take "
                f"other conversations, or leave out the run that has the same"
            )
        if modes := selection.other_modes(rules.duplicates.bands):
            log.info(
                "kept: %d prompts with the question of another one in another mode: they differ in system turns, "
                "tools, variables of the template or mode switches", modes,
            )  # fmt: skip
        report = selection.draw(rules.traffic, sample) if rules.traffic else None
        if settings.limit is not None:
            selection.limit(settings.limit)
        if settings.held_out is not None:
            _hold_out(selection, sum(selection.kept(len(sources))), rules, settings)
        counts = [
            write_prompts(folder, sources, chunks, selection, held_out=folder is not folders[0]) for folder in folders
        ]
        return counts, report


def _hold_out(selection: Selection, prompts: int, rules: Rules, settings: PromptSettings) -> None:
    """Hold out the number or the share of prompts.held_out. Raises InputError if one side would have none."""
    held_out = settings.held_out
    assert held_out is not None
    wanted = int(held_out) if held_out >= 1 else max(round(held_out * prompts), 1)
    found = selection.hold_out(wanted, rules.duplicates, settings.held_out_seed) if wanted < prompts else prompts
    if found in (0, prompts):
        raise InputError(
            f"prompts.held_out={held_out:g} would hold out {found} of {prompts} prompts, similar ones together, and "
            f"leave {prompts - found} to train on; set another share or number, or add other prompts"
        )
    if found < wanted:
        log.warning("prompts.held_out: %d instead of %d prompts, because similar ones stay together", found, wanted)


def _publish(
    folder: Path,
    made: Path,
    sources: list[Source],
    counts: dict[str, Counts],
    traffic: dict | None,
    rules: Rules,
    inputs: dict,
) -> dict:
    """Move the new files from `made` into `folder` and write their ledger and report."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "ledger.json").unlink(missing_ok=True)  # if the next lines are killed, it would describe other prompts
    for name in ("rejects.jsonl", "prompts.jsonl"):
        (made / name).replace(folder / name)
    ledger = public(make_ledger(folder, sources, counts, traffic, rules, inputs))
    write_report(folder, ledger)
    write_sealed_json(folder / "ledger.json", ledger)
    return ledger


def _require_not_answered(folder: Path, prompts: Path | None = None) -> None:
    """Raise InputError if there are answers next to `folder`, unless they are to the new file `prompts`."""
    answers = folder.parent / "answers"
    if not (answers / "manifest.json").exists():
        return
    manifest = read_json(answers / "manifest.json", made_by="precompute.py 'stages=[answers]'")
    if prompts is None or manifest.get("prompts_sha256") != sha256_file(prompts):
        raise InputError(
            f"the answers in {answers} are to other prompts than these would be, so {folder} stays as it is; "
            f"take another out_dir, continue with the prompts that are there ('stages=[answers,features]'), or delete "
            f"{answers} to generate answers again: those in it are lost"
        )
