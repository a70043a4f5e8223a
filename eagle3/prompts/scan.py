"""The scan: each chunk of the sources → a scratch file of checked rows, by several processes, in one fixed order.

A worker opens its chunk by itself, so that rows do not travel between processes.
"""

import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow

from eagle3.progress import Bar
from eagle3.prompts.checks import Check
from eagle3.prompts.chunks import ChunkWriter, ScannedChunk
from eagle3.prompts.overlap.signatures import Signer
from eagle3.prompts.pool import in_order
from eagle3.prompts.privacy import Privacy
from eagle3.prompts.reading.formats import BLANK, Chunk, chunk_rows, cut
from eagle3.prompts.reading.prompt import Prompt, Refused, texts_of
from eagle3.prompts.reading.rows import read_prompt
from eagle3.prompts.reading.sources import Source, file_name, file_state
from eagle3.prompts.traffic.mix import TrafficMix
from eagle3.storage.files import sha256_json

log = logging.getLogger(__name__)

SHOWN_CHARACTERS = 500  # of a row in the sample of refused rows
GROUP_ROWS, GROUP_CHARACTERS = 4096, 4_000_000  # limits of a group that is checked together; its last row may be longer


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


class Row(NamedTuple):
    line: int
    found: Prompt | Refused  # before the checks


@dataclass(frozen=True, kw_only=True)
class Scanner:
    """Reads, checks and signs the rows of one chunk; sent to every worker once.

    checks: of each source, in order; the first reason counts. privacy: hashes ids and sources that are personal data,
    and masks the sample of refused rows, which shows `refused_sample` rows of each reason.
    """

    folder: Path
    sources: list[Source]
    checks: list[list[Check]]
    privacy: Privacy
    signer: Signer
    traffic: TrafficMix | None
    keep_answers: bool
    refused_sample: int

    def __call__(self, task: ScanTask) -> ScannedChunk:
        return self.finished(task) or self.scanned(task)

    def finished(self, task: ScanTask) -> ScannedChunk | None:
        """Return this chunk's file from an earlier run that was stopped; a damaged one is scanned again."""
        path = self._path(task)
        try:
            return ScannedChunk.read(path, task.source, verify=True) if path.exists() else None
        except (OSError, ValueError, KeyError, TypeError, pyarrow.ArrowException) as damaged:
            log.warning("%s is damaged (%s): the chunk is scanned again", path, type(damaged).__name__)
            return None

    def scanned(self, task: ScanTask) -> ScannedChunk:
        checks = self.checks[task.source]
        counts: dict[str, Counter[str]] = {check.name: Counter() for check in checks}
        with ChunkWriter(self._path(task), self.signer.bands) as writer:
            for group in in_groups(self._rows(task, writer)):
                found = checked([row.found for row in group], checks, counts)
                # After the licence check, which needs the row's own `source`.
                self._write(writer, group, [self._with_safe_names(each) for each in found])
            writer.finish(file=file_name(task.chunk.file), start=task.chunk.start, counts=counts)
        return ScannedChunk.read(self._path(task), task.source, verify=False)

    def _path(self, task: ScanTask) -> Path:
        return self.folder / f"{task.key}.parquet"

    def _rows(self, task: ScanTask, writer: ChunkWriter) -> Iterator[Row]:
        source = self.sources[task.source]
        for line, value in chunk_rows(task.chunk, source.shape.columns):
            writer.lines = line
            if value is not BLANK:
                yield Row(line, read_prompt(value, source, keep_answers=self.keep_answers))

    def _write(self, writer: ChunkWriter, group: list[Row], found: list[Prompt | Refused]) -> None:
        shown = self._shown(Counter(writer.rejected), group, found)
        for row, result in zip(group, found, strict=True):
            if isinstance(result, Refused):
                writer.reject(row.line, result.id, result.reason, shown.get(row.line))
            else:
                cell = self.traffic.cell(result) if self.traffic else None
                writer.keep(row.line, result, self.signer(result), cell)
        writer.flush()

    def _shown(self, rejected: Counter[str], group: list[Row], found: list[Prompt | Refused]) -> dict[int, str]:
        """Return, by line, the beginning of the first refused rows of each reason.

        The whole text is masked before it is cut: a finding that is cut might not be found.
        """
        texts = {}
        for row, result in zip(group, found, strict=True):
            if isinstance(result, Refused):
                if isinstance(row.found, Prompt) and rejected[result.reason] < self.refused_sample:
                    texts[row.line] = "\n\n".join(row.found.texts())
                rejected[result.reason] += 1
        masked = self.privacy.masked(list(texts.values())) if texts else []
        return {line: text[:SHOWN_CHARACTERS] for line, text in zip(texts, masked, strict=True)}

    def _with_safe_names(self, found: Prompt | Refused) -> Prompt | Refused:
        if isinstance(found, Refused):
            return Refused(found.reason, self.privacy.safe_id(found.id)) if found.id else found
        return found._replace(id=self.privacy.safe_id(found.id), source=self._safe_source(found.source))

    @cached_property
    def _safe_source(self) -> Any:
        return lru_cache(1024)(self.privacy.safe_source)  # many rows share one


def shown_text(prompt: dict[str, Any]) -> str:
    """Return the beginning of a written prompt's texts, for the sample of refused rows."""
    return "\n\n".join(texts_of(prompt))[:SHOWN_CHARACTERS]


def in_groups(rows: Iterable[Row]) -> Iterator[list[Row]]:
    """Yield groups of rows, limited in number and in size."""
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
    """Return each prompt as the checks leave it, or the first reason against it; add to `counts` of the checks."""
    for check in checks:
        if isinstance(check, Privacy):
            check.look_ahead(found for found in group if isinstance(found, Prompt))
        group = [found if isinstance(found, Refused) else _checked(found, check, counts[check.name]) for found in group]
    return group


def _checked(found: Prompt, check: Check, counts: Counter[str]) -> Prompt | Refused:
    verdict = check(found)
    if verdict.counts:
        counts.update(verdict.counts)
    return verdict.prompt or found if verdict.reason is None else Refused(verdict.reason, found.id)


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
        for task, chunk in in_order(scanner, needed, processes=min(processes, len(tasks))):
            if not enough(task.source):
                enough.passing[task.source] += chunk.summary["prompts"]
                rows += chunk.summary["rows"]
                yield chunk
            rate = rows / max(progress.format_dict["elapsed"], 1e-9)
            progress.set_postfix_str(f"{rate:,.0f} rows/s", refresh=False)
            progress.update(task.chunk.size)
