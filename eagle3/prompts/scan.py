"""The scan: each chunk of the sources → a scratch file of checked rows, over several processes, in one order always.

A worker opens its chunk by itself, so that rows do not travel between processes.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow

from eagle3.progress import Bar
from eagle3.prompts.checks import Check, LooksAhead
from eagle3.prompts.chunks import ChunkWriter, ScannedChunk
from eagle3.prompts.overlap.signatures import Signer
from eagle3.prompts.pool import in_order
from eagle3.prompts.reading.conversation import Refused
from eagle3.prompts.reading.formats import BLANK, Chunk, chunk_rows, cut
from eagle3.prompts.reading.prompt import Prompt, texts_of
from eagle3.prompts.reading.rows import read_prompt
from eagle3.prompts.reading.sources import Source, file_name, file_state
from eagle3.prompts.traffic.mix import TrafficMix
from eagle3.storage.files import sha256_json

log = logging.getLogger(__name__)

SHOWN_CHARACTERS = 500  # of a row in the sample of refused rows
GROUP_ROWS, GROUP_CHARACTERS = 4096, 4_000_000  # of rows that are checked together; the last one may be of any size


@dataclass(frozen=True)
class ScanTask:
    """One chunk of one source. `key` changes with everything that its result depends on."""

    source: int
    chunk: Chunk
    key: str


def tasks_of(sources: list[Source], chunk_bytes: int, settings: Any) -> list[ScanTask]:
    """Cut the sources, in the order of their files. settings: what else the result of a chunk depends on."""
    tasks = []
    for number, source in enumerate(sources):
        for file in source.files:
            depends_on = [settings, source.inputs(), file_state(file)]
            for chunk in cut(file, chunk_bytes):
                tasks.append(ScanTask(number, chunk, sha256_json([*depends_on, chunk.start, chunk.end])[:32]))
    return tasks


@dataclass(frozen=True, kw_only=True)
class Scanner:
    """Reads, checks and signs the rows of one chunk; sent to every worker once.

    checks: of each source, in order; the first reason counts. safe_id, safe_source: hash what is personal data itself;
    masked: texts with every finding masked; refused_sample: rows of each reason that are shown.
    """

    folder: Path
    sources: list[Source]
    checks: list[list[Check]]
    safe_id: Callable[[str], str]
    safe_source: Callable[[str], str]
    signer: Signer
    traffic: TrafficMix | None
    keep_answers: bool
    refused_sample: int
    masked: Callable[[list[str]], list[str]]

    def __call__(self, task: ScanTask) -> ScannedChunk:
        return self.finished(task) or self.scanned(task)

    def finished(self, task: ScanTask) -> ScannedChunk | None:
        """Return the file that an earlier, stopped run left of this chunk; a damaged one is scanned again."""
        path = self._path(task)
        try:
            return ScannedChunk.read(path, task.source, verify=True) if path.exists() else None
        except (OSError, ValueError, KeyError, TypeError, pyarrow.ArrowException) as damaged:
            log.warning("%s is damaged (%s): the chunk is scanned again", path, type(damaged).__name__)
            return None

    def scanned(self, task: ScanTask) -> ScannedChunk:
        source, checks = self.sources[task.source], self.checks[task.source]
        counts: dict[str, Counter[str]] = {check.name: Counter() for check in checks}
        rows = Rows(task.chunk, source, keep_answers=self.keep_answers)
        with ChunkWriter(self._path(task), self.signer.bands) as writer:
            for group in in_groups(rows):
                found = checked([row.found for row in group], checks, counts)
                # After the licence check, which has to see the row's own `source`.
                self._write(writer, group, [self._with_safe_names(each) for each in found])
            writer.finish(
                {
                    "file": file_name(task.chunk.file),
                    "start": task.chunk.start,
                    "lines": rows.lines,
                    "rows": rows.rows,
                    "prompts": writer.prompts,
                    "rejected": writer.rejected,
                    "counts": counts,
                }
            )
        return ScannedChunk.read(self._path(task), task.source, verify=False)

    def _path(self, task: ScanTask) -> Path:
        return self.folder / f"{task.key}.parquet"

    def _write(self, writer: ChunkWriter, group: list["Row"], found: list[Prompt | Refused]) -> None:
        shown = self._shown(Counter(writer.rejected), group, found)
        for row, judged in zip(group, found, strict=True):
            if isinstance(judged, Refused):
                writer.reject(row.line, judged.id, judged.reason, shown.get(row.line))
            else:
                cell = self.traffic.cell(judged) if self.traffic else None
                writer.keep(row.line, judged, self.signer(judged), cell)
        writer.flush()

    def _shown(self, rejected: Counter[str], group: list["Row"], found: list[Prompt | Refused]) -> dict[int, str]:
        """Return by line what is shown of refused rows, for the first of each reason.

        The whole is masked, then cut: a finding that is cut might not be found.
        """
        texts = {}
        for row, judged in zip(group, found, strict=True):
            if isinstance(judged, Refused):
                if isinstance(row.found, Prompt) and rejected[judged.reason] < self.refused_sample:
                    texts[row.line] = "\n\n".join(row.found.texts())
                rejected[judged.reason] += 1
        masked = self.masked(list(texts.values())) if texts else []
        return {line: text[:SHOWN_CHARACTERS] for line, text in zip(texts, masked, strict=True)}

    def _with_safe_names(self, found: Prompt | Refused) -> Prompt | Refused:
        if isinstance(found, Refused):
            return Refused(found.reason, self.safe_id(found.id)) if found.id else found
        return found._replace(id=self.safe_id(found.id), source=self._safe_source(found.source))

    @cached_property
    def _safe_source(self) -> Callable[[str], str]:
        return lru_cache(1024)(self.safe_source)  # many rows share one


def shown_text(prompt: dict[str, Any]) -> str:
    """Return the texts of a written prompt, as far as the sample of refused rows shows them."""
    return "\n\n".join(texts_of(prompt))[:SHOWN_CHARACTERS]


class Row(NamedTuple):
    line: int
    found: Prompt | Refused  # as it was read


class Rows:
    """The rows of a chunk; `lines` and `rows` are how many there were, once all are read. Blank lines are no rows."""

    def __init__(self, chunk: Chunk, source: Source, *, keep_answers: bool):
        self.chunk = chunk
        self.source = source
        self.keep_answers = keep_answers
        self.lines = self.rows = 0

    def __iter__(self) -> Iterator[Row]:
        for line, value in chunk_rows(self.chunk, self.source.shape.columns):
            self.lines = line
            if value is not BLANK:
                self.rows += 1
                yield Row(line, read_prompt(value, self.source, keep_answers=self.keep_answers))


def in_groups(rows: Iterable[Row]) -> Iterator[list[Row]]:
    """Yield rows that are checked together, bounded in number and in size."""
    group: list[Row] = []
    characters = 0
    for row in rows:
        group.append(row)
        if isinstance(row.found, Prompt):
            characters += sum(map(len, row.found.texts()))
        if len(group) == GROUP_ROWS or characters >= GROUP_CHARACTERS:
            yield group
            group, characters = [], 0
    if group:
        yield group


def checked(
    group: list[Prompt | Refused], checks: list[Check], counts: dict[str, Counter[str]]
) -> list[Prompt | Refused]:
    """Return each prompt as the checks leave it, or the first reason against it; add what they count."""
    for check in checks:
        if isinstance(check, LooksAhead):
            check.look_ahead(found for found in group if isinstance(found, Prompt))
        group = [found if isinstance(found, Refused) else _judged(found, check, counts[check.name]) for found in group]
    return group


def _judged(found: Prompt, check: Check, counts: Counter[str]) -> Prompt | Refused:
    verdict = check(found)
    if verdict.counts:
        counts.update(verdict.counts)
    return verdict.prompt or found if verdict.reason is None else Refused(verdict.reason, found.id)


class Enough:
    """How many prompts each source has to hold until the rest of it is not read: its limit, or the one over all."""

    def __init__(self, sources: list[Source], *, limit: int | None):
        self.limit = limit
        self.limits = [min(filter(None, (source.limit, limit)), default=None) for source in sources]
        self.wanted = list(self.limits)
        self.passing = [0] * len(sources)

    def __call__(self, source: int) -> bool:
        wanted = self.wanted[source]
        return wanted is not None and self.passing[source] >= wanted

    def raised(self, kept: list[int]) -> bool:
        """Want more of the sources of which fewer were kept than the limits allow; False when nothing is missing."""
        missing = [
            self(source) and limit is not None and found < limit
            for source, (found, limit) in enumerate(zip(kept, self.limits, strict=True))
        ]
        if not any(missing) or (self.limit is not None and sum(kept[: missing.index(True) + 1]) >= self.limit):
            return False  # what more there is to read comes behind the last prompt that the limit allows
        for source, is_missing in enumerate(missing):
            if is_missing:
                self.wanted[source] = 2 * self.passing[source]
        self.passing = [0] * len(self.passing)
        return True


def scan(tasks: list[ScanTask], scanner: Scanner, *, enough: Enough, processes: int) -> Iterator[ScannedChunk]:
    """Yield the chunks that are needed, in the order of `tasks`.

    Which chunks are used depends on `enough` and their order alone: what processes scanned ahead in vain is left out.
    """
    rows = 0
    needed = (task for task in tasks if not enough(task.source))
    total = sum(task.chunk.size for task in tasks)
    with Bar(total=total, desc="prompts", unit="B", unit_scale=True) as progress:
        for task, chunk in in_order(scanner, needed, processes=min(processes, len(tasks))):
            if not enough(task.source):
                enough.passing[task.source] += chunk.summary["prompts"]
                rows += chunk.summary["rows"]
                yield chunk
            rate = rows / max(progress.format_dict["elapsed"], 1e-9)
            progress.set_postfix_str(f"{rate:,.0f} rows/s", refresh=False)
            progress.update(task.chunk.size)
