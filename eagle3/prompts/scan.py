"""The scan: each chunk of the sources → a scratch file of checked rows, by several processes, in one fixed order.

A worker opens its chunk by itself, so that rows do not travel between processes.
"""

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loky import ProcessPoolExecutor

from eagle3.errors import MAKE_PROMPTS, InputError
from eagle3.progress import Bar
from eagle3.prompts.chunks import READING, RowsByLine, ScannedChunk, kept_row, write_chunk
from eagle3.prompts.overlap.duplicates import known_prompt
from eagle3.prompts.reading.formats import BLANK, Chunk, chunk_rows, cut
from eagle3.prompts.reading.prompt import Check, Prompt, Refused, is_unicode
from eagle3.prompts.reading.rows import read_prompt
from eagle3.prompts.reading.shapes import build_layout
from eagle3.prompts.reading.sources import Source, file_name, file_state
from eagle3.prompts.rules import Rules
from eagle3.storage.files import sha256_json

AHEAD = 2  # tasks per process that may wait for an earlier one
ONE_THREAD = {"OMP_NUM_THREADS": "1"}  # per worker: there is one process per core
LONGEST_NAME = 120  # characters of a licence, source, role or column in the ledger
IDLE_SECONDS = 60  # then a worker ends by itself: its parent may have been killed with -9


@dataclass(frozen=True)
class ScanTask:
    """One chunk of one source. `key` changes with everything that its result depends on."""

    source: int
    chunk: Chunk
    key: str


def scan_tasks(sources: Iterable[tuple[list[str], list[Any]]], chunk_bytes: int) -> list[ScanTask]:
    """Cut the files of each source into chunks, in their order. The second of each pair is what else, apart from the
    files, the results depend on."""
    return [
        ScanTask(number, chunk, sha256_json([*state, chunk.start, chunk.end])[:32])
        for number, (files, depends_on) in enumerate(sources)
        for file in files
        for state in [[*depends_on, file_state(file)]]
        for chunk in cut(file, chunk_bytes)
    ]


class Scanner:
    """Reads, checks and signs the rows of one chunk; sent to every worker once."""

    def __init__(self, folder: Path, sources: list[Source], rules: Rules, *, keep_answers: bool):
        self.folder, self.sources, self.keep_answers = folder, sources, keep_answers
        self.checks = [rules.checks(source) for source in sources]  # in order; the first reason counts
        self.privacy, self.signer, self.traffic = rules.privacy, rules.signer, rules.traffic

    def __call__(self, task: ScanTask) -> ScannedChunk:
        path = self.folder / f"{task.key}.parquet"
        if not path.exists():  # else it is from an earlier run that was stopped, and complete: it has its name
            self.scan(task, path)
        return ScannedChunk.read(path, task.source)

    def scan(self, task: ScanTask, path: Path) -> None:
        counts: dict[str, Counter[str]] = {}
        summary = {"file": file_name(task.chunk.file), "start": task.chunk.start, "counts": counts}
        write_chunk(path, self.signer.bands, self.rows(task, counts), summary)

    def rows(self, task: ScanTask, counts: dict[str, Counter[str]]) -> RowsByLine:
        """Yield the rows to write by line, and fill `counts` by check."""
        source, checks = self.sources[task.source], self.checks[task.source]
        counts |= {READING: Counter(), **{check.name: Counter() for check in checks}}
        for line, value in chunk_rows(task.chunk, source.shape):
            row = None
            if value is not BLANK:
                found = read_prompt(value, source, keep_answers=self.keep_answers)
                if isinstance(found, Prompt):
                    counts[READING].update(self._note(*note) for note in found.notes)
                row = self._row(checked(found, checks, counts))
            yield line, row

    def _row(self, found: Prompt | Refused) -> dict[str, Any]:
        """Return a row to write. Its names are made safe only here: the licence check needs the row's own `source`."""
        if isinstance(found, Refused):
            id, name = found.id and self.privacy.safe_id(found.id), found.name and self._safe(found.name)
            return {"id": id or None, "reason": found.reason, "name": name or None}
        found = found._replace(id=self.privacy.safe_id(found.id), source=self.privacy.safe_source(found.source))
        return kept_row(found, self.signer(found), self.traffic.cell(found) if self.traffic else None)

    def _note(self, what: str, name: str | None) -> str:
        return what if name is None else f"{what}: {self._safe(name)}"

    def _safe(self, name: str) -> str:
        """Return a name of a row, such as its licence, as it may be written: a long one is a text, which is cut."""
        name = self.privacy.safe_source(" ".join(name.split()))
        name = name if len(name) <= LONGEST_NAME else f"{name[:LONGEST_NAME]}…"
        return name if is_unicode(name) else repr(name)


def checked(found: Prompt | Refused, checks: list[Check], counts: dict[str, Counter[str]]) -> Prompt | Refused:
    """Return a prompt as the checks leave it, or the first reason against it; add to `counts` of the checks."""
    for check in checks:
        if isinstance(found, Refused):
            break
        verdict = check(found)
        counts[check.name].update(verdict.counts)
        found = verdict.prompt or found if verdict.reason is None else Refused(verdict.reason, found.id, verdict.name)
    return found


class KnownScanner(Scanner):
    """Signs the prompts of a chunk that an earlier run kept; they are neither checked nor written again."""

    def __init__(self, scanner: Scanner):
        self.folder, self.signer, self.keep_answers = scanner.folder, scanner.signer, scanner.keep_answers

    def rows(self, task: ScanTask, counts: dict[str, Counter[str]]) -> RowsByLine:
        for line, value in chunk_rows(task.chunk, build_layout(None, None)):
            prompt = known_prompt(value, keep_answers=self.keep_answers)
            if prompt is None:
                raise InputError(
                    f"prompts.duplicates.known: {task.chunk.file} has a row that is no prompt of this stage; "
                    f"make it again: {MAKE_PROMPTS}"
                )
            yield line, kept_row(prompt, self.signer(prompt), None)


class Enough:
    """Tells when a source needs no more reading: once so many of its prompts passed as its limit or the total one."""

    def __init__(self, sources: list[Source], *, limit: int | None):
        self.limit = limit
        self.limits = [min(filter(None, (source.limit, limit)), default=None) for source in sources]
        self.wanted = list(self.limits)
        self.passing = [0] * len(sources)

    def __call__(self, source: int) -> bool:
        wanted = self.wanted[source]
        return wanted is not None and self.passing[source] >= wanted

    def raised(self, kept: list[int]) -> bool:
        """Want more of the sources of which fewer were kept than the limits allow; False if nothing is missing."""
        missing = [
            self(source) and limit is not None and found < limit
            for source, (found, limit) in enumerate(zip(kept, self.limits, strict=True))
        ]
        if not any(missing) or (self.limit is not None and sum(kept[: missing.index(True) + 1]) >= self.limit):
            return False  # all further rows come after the last prompt that the limit allows
        for source, is_missing in enumerate(missing):
            if is_missing:
                self.wanted[source] = 2 * self.passing[source]
        self.passing = [0] * len(self.passing)
        return True


def scan(tasks: list[ScanTask], scanner: Scanner, *, enough: Enough, processes: int) -> Iterator[ScannedChunk]:
    """Yield the chunks that are needed, in the order of `tasks`.

    Only `enough` and this order decide which chunks are used; a chunk that was scanned ahead in vain is left out.
    """
    rows = 0
    needed = (task for task in tasks if not enough(task.source))
    total = sum(task.chunk.size for task in tasks)
    with Bar(total=total, desc="prompts", unit="B", unit_scale=True) as progress:
        for task, chunk in in_order(scanner, needed, min(processes, len(tasks))):
            if not enough(task.source):
                enough.passing[task.source] += chunk.summary["prompts"]
                rows += chunk.summary["rows"]
                yield chunk
            rate = rows / max(progress.format_dict["elapsed"], 1e-9)
            progress.set_postfix_str(f"{rate:,.0f} rows/s", refresh=False)
            progress.update(task.chunk.size)


def in_order(scanner: Scanner, tasks: Iterable[ScanTask], processes: int) -> Iterator[tuple[ScanTask, ScannedChunk]]:
    """Yield each task with its chunk. The scanner is pickled to every process once; one process runs here.

    Takes a few `tasks` ahead of the chunks. Raises InputError if a process is killed.
    """
    if processes <= 1:
        yield from ((task, scanner(task)) for task in tasks)
        return
    # loky's workers do not import the entry script with its PyTorch, and a killed worker raises an error.
    pool = ProcessPoolExecutor(processes, timeout=IDLE_SECONDS, initializer=_start, initargs=(scanner,), env=ONE_THREAD)
    waiting: deque = deque()
    try:
        for task in tasks:
            waiting.append((task, pool.submit(_scan, task)))
            if len(waiting) > AHEAD * processes:
                task, future = waiting.popleft()
                yield task, future.result()
        for task, future in waiting:
            yield task, future.result()
    except BrokenProcessPool:
        raise InputError(
            f"a process was killed while it read prompts, most likely because memory ran out; finished chunks "
            f"are kept: run the same command with fewer of them, e.g. prompts.processes={processes // 2}"
        ) from None
    finally:
        pool.shutdown(kill_workers=True)


_of_this_process: Scanner | None = None


def _start(scanner: Scanner) -> None:
    global _of_this_process
    _of_this_process = scanner


def _scan(task: ScanTask) -> ScannedChunk:
    assert _of_this_process is not None
    return _of_this_process(task)
