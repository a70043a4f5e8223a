"""The files of the stage: prompts.jsonl and rejects.jsonl from the scanned chunks, with the counts for the ledger."""

import heapq
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from eagle3.prompts.overlap.duplicates import Fate
from eagle3.prompts.reading.sources import Source
from eagle3.prompts.scan import SHOWN_CHARACTERS, whole_text
from eagle3.prompts.selection import Selection
from eagle3.prompts.spool import Scanned, ScannedChunk
from eagle3.storage.files import atomic_write, json_line


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


def write_prompts(
    folder: Path, sources: list[Source], scanned: Scanned, selection: Selection, *, refused_sample: int
) -> dict[str, Counts]:
    """Write the files whole, in the order of the sources, and count by source.

    refused_sample: rows of each reason in refused_sample.jsonl, which the owner of the run alone may read.
    """
    counts = {source.name: Counts() for source in sources}
    shown: Counter[str] = Counter()
    with (
        atomic_write(folder / "rejects.jsonl") as rejects,
        atomic_write(folder / "refused_sample.jsonl") as sample,
        atomic_write(folder / "prompts.jsonl") as prompts,
    ):
        lines = 0  # of the file, before the chunk
        for chunk, numbers in scanned.parts():
            name = sources[chunk.source].name
            count, lines = counts[name], 0 if chunk.summary["start"] == 0 else lines
            count.add_scan(chunk.summary)
            for row in heapq.merge(_passed(chunk, numbers.start, selection, count), _refused(chunk)):
                if row.reason is None:
                    prompts.write(row.text)
                else:
                    count.rejected[row.reason] += 1
                    place = {"file": chunk.summary["file"], "line": lines + row.line}
                    rejects.write(json_line({"id": row.id, "source": name, **place, "reason": row.reason}))
                    if row.shown is not None and shown[row.reason] < refused_sample:
                        shown[row.reason] += 1
                        sample.write(json_line({"reason": row.reason, "source": name, **place, "text": row.shown}))
            lines += chunk.summary["lines"]
    (folder / "refused_sample.jsonl").chmod(0o600)
    return counts


def _passed(chunk: ScannedChunk, first: int, selection: Selection, count: Counts) -> Iterator[Judged]:
    lines = chunk.rows()["line"]
    for number, (line, text) in enumerate(zip(lines, chunk.lines(), strict=True), first):
        prompt = json.loads(text)
        if selection.choice.fate[number] == Fate.KEPT:
            count.keep(prompt)
            yield Judged(int(line), None, None, text, None)
        else:
            yield Judged(int(line), prompt["id"], selection.reason(number), text, whole_text(prompt)[:SHOWN_CHARACTERS])


def _refused(chunk: ScannedChunk) -> Iterator[Judged]:
    for row in chunk.rejects():
        yield Judged(row["line"], row["id"], row["reason"], b"", row.get("text"))
