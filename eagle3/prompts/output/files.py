"""The files of the stage: prompts.jsonl and rejects.jsonl from the scanned chunks, with the counts for the ledger."""

import heapq
import json
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from eagle3.prompts.pool import OrderedPool
from eagle3.prompts.reading.sources import Source
from eagle3.prompts.scan import SHOWN_CHARACTERS, whole_text
from eagle3.prompts.selection import Selection
from eagle3.prompts.spool import Scanned, ScannedChunk
from eagle3.storage.files import atomic_write, json_line

FEW = 16  # chunks that a process has to have to be worth its start


@dataclass
class Counts:
    """What became of the rows of one source."""

    rows: int = 0
    prompts: int = 0
    rejected: Counter[str] = field(default_factory=Counter)  # by reason
    licenses: Counter[str] = field(default_factory=Counter)  # of the prompts
    origins: Counter[str] = field(default_factory=Counter)  # the prompts' own `source`
    found: dict[str, Counter[str]] = field(default_factory=dict)  # what each check counted, e.g. entities

    def add_scan(self, summary: dict) -> None:
        self.rows += summary["rows"]
        for check, counts in summary["counts"].items():
            self.found.setdefault(check, Counter()).update(counts)

    def add(self, other: "Counts") -> None:
        self.rows += other.rows
        self.prompts += other.prompts
        for own, more in (
            (self.rejected, other.rejected),
            (self.licenses, other.licenses),
            (self.origins, other.origins),
        ):
            own.update(more)
        for check, found in other.found.items():
            self.found.setdefault(check, Counter()).update(found)

    def keep(self, prompt: dict) -> None:
        self.prompts += 1
        self.licenses[prompt["license"] or ""] += 1
        self.origins[prompt["source"]] += 1


class Judged(NamedTuple):
    """A row of a chunk: its line there, from 1, and either its prompt's text or the reason against it."""

    line: int
    id: str | None
    reason: str | None
    text: bytes
    shown: str | None  # of a refused row, in the sample of them


class Task(NamedTuple):
    """A chunk, the number of lines before it in its file, and why each of its prompts is not kept."""

    number: int
    chunk: ScannedChunk
    lines: int
    reasons: list[str | None]


def write_prompts(
    folder: Path, sources: list[Source], scanned: Scanned, selection: Selection, *, refused_sample: int, processes: int
) -> dict[str, Counts]:
    """Write the files whole, in the order of the sources, and count by source.

    refused_sample: rows of each reason in refused_sample.jsonl, which the owner of the run alone may read.
    """
    counts = {source.name: Counts() for source in sources}
    shown: Counter[str] = Counter()
    names = [source.name for source in sources]
    with (
        atomic_write(folder / "rejects.jsonl") as rejects,
        atomic_write(folder / "refused_sample.jsonl") as sample,
        atomic_write(folder / "prompts.jsonl") as prompts,
        OrderedPool(PartWriter(folder, names, refused_sample), min(processes, len(scanned.chunks) // FEW)) as workers,
    ):
        for task, part in workers(_tasks(scanned, selection)):
            counts[names[task.chunk.source]].add(part.counts)
            for path, file in ((part.prompts, prompts), (part.rejects, rejects)):
                with path.open("rb") as written:
                    shutil.copyfileobj(written, file)
                path.unlink()
            for row in part.sample:
                if shown[row["reason"]] < refused_sample:
                    shown[row["reason"]] += 1
                    sample.write(json_line(row))
    (folder / "refused_sample.jsonl").chmod(0o600)
    return counts


def _tasks(scanned: Scanned, selection: Selection) -> Iterator[Task]:
    lines = 0
    for number, (chunk, numbers) in enumerate(scanned.parts()):
        lines = 0 if chunk.summary["start"] == 0 else lines
        yield Task(number, chunk, lines, selection.reasons(numbers))
        lines += chunk.summary["lines"]


class Part(NamedTuple):
    """What a chunk adds to the files, and to the sample if there is room."""

    prompts: Path
    rejects: Path
    sample: list[dict]
    counts: Counts


class PartWriter:
    """Writes what one chunk adds; sent to every worker once."""

    def __init__(self, folder: Path, names: list[str], refused_sample: int):
        self.folder = folder
        self.names = names  # of the sources
        self.refused_sample = refused_sample

    def __call__(self, task: Task) -> Part:
        chunk, name = task.chunk, self.names[task.chunk.source]
        part = Part(self.folder / f"prompts.{task.number}", self.folder / f"rejects.{task.number}", [], Counts())
        part.counts.add_scan(chunk.summary)
        with part.prompts.open("wb") as prompts, part.rejects.open("wb") as rejects:
            for row in heapq.merge(_passed(chunk, task.reasons, part.counts), _refused(chunk)):
                if row.reason is None:
                    prompts.write(row.text)
                    continue
                part.counts.rejected[row.reason] += 1
                place = {"file": chunk.summary["file"], "line": task.lines + row.line}
                rejects.write(json_line({"id": row.id, "source": name, **place, "reason": row.reason}))
                if row.shown is not None and part.counts.rejected[row.reason] <= self.refused_sample:
                    part.sample.append({"reason": row.reason, "source": name, **place, "text": row.shown})
        return part


def _passed(chunk: ScannedChunk, reasons: list[str | None], count: Counts) -> Iterator[Judged]:
    lines = chunk.rows()["line"].tolist()
    for line, reason, text in zip(lines, reasons, chunk.lines(), strict=True):
        prompt = json.loads(text)
        if reason is None:
            count.keep(prompt)
            yield Judged(line, None, None, text, None)
        else:
            yield Judged(line, prompt["id"], reason, text, whole_text(prompt)[:SHOWN_CHARACTERS])


def _refused(chunk: ScannedChunk) -> Iterator[Judged]:
    for row in chunk.rejects():
        yield Judged(row["line"], row["id"], row["reason"], b"", row.get("text"))
