"""Writes prompts.jsonl and rejects.jsonl from the scanned chunks, and counts for the ledger."""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from eagle3.prompts.chunks import ScannedChunk
from eagle3.prompts.reading.sources import Source
from eagle3.prompts.selection import Selection
from eagle3.storage.files import atomic_write, json_line


@dataclass
class Counts:
    """Counts of the rows of one source."""

    rows: int = 0
    prompts: int = 0
    rejected: Counter[str] = field(default_factory=Counter)  # by reason
    licenses: Counter[str] = field(default_factory=Counter)  # of the prompts
    origins: Counter[str] = field(default_factory=Counter)  # the prompts' own `source`
    found: dict[str, Counter[str]] = field(default_factory=dict)  # counts of each check, e.g. entities

    def add_scan(self, summary: dict) -> None:
        self.rows += summary["rows"]
        for check, counts in summary["counts"].items():
            self.found.setdefault(check, Counter()).update(counts)

    def keep(self, row: dict) -> None:
        self.prompts += 1
        self.licenses[row["license"]] += 1
        self.origins[row["origin"]] += 1


def write_prompts(
    folder: Path, sources: list[Source], chunks: list[ScannedChunk], selection: Selection
) -> dict[str, Counts]:
    """Write the files, in the order of the sources, and count by source."""
    counts = {source.name: Counts() for source in sources}
    lines = 0  # of the file, before the chunk
    with atomic_write(folder / "rejects.jsonl") as rejects, atomic_write(folder / "prompts.jsonl") as prompts:
        for number, chunk in enumerate(chunks):
            name = sources[chunk.source].name
            count, reasons = counts[name], selection.reasons(number)
            count.add_scan(chunk.summary)
            lines = 0 if chunk.summary["start"] == 0 else lines
            for index, row in enumerate(chunk.rows()):
                reason = row["reason"] or reasons.get(index)
                if reason is None:
                    prompts.write(row["record"])
                    count.keep(row)
                    continue
                count.rejected[reason] += 1
                place = {"file": chunk.summary["file"], "line": lines + row["line"]}
                rejects.write(json_line({"id": row["id"], "source": name, **place, "reason": reason}))
            lines += chunk.summary["lines"]
    return counts
