"""The files of OUT/target_prompts: samples in rounds of known size, each sample exactly once, and their settings."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from eagle3.answers.store import as_recorded
from eagle3.errors import InputError
from eagle3.settings.flat import differences
from eagle3.storage.files import append_lines, json_line, read_jsonl, sha256_file, write_jsonl, write_whole
from eagle3.storage.records import Record, parse_sealed, sealed_bytes
from eagle3.target.identity import TargetIdentity, require_same_target

Row = dict[str, Any]  # `number` and what WrittenPrompt.result has
FOLDER = "target_prompts"
SOURCE = "target"  # the name of the source of these prompts


def sample_id(number: int) -> str:
    return f"{number:07d}"


def prompt_id(number: int) -> str:
    """Return the id that the prompts stage gives to the sample."""
    return f"{SOURCE}/{sample_id(number)}"


def finished_rounds(out_dir: Path) -> list[Path]:
    return sorted((out_dir / FOLDER).glob("round-*.jsonl"))


@dataclass(frozen=True, kw_only=True)
class Round(Record):
    samples: int
    sha256: str | None  # of its file; None: some samples are missing


@dataclass(frozen=True, kw_only=True)
class SamplesManifest(Record):
    FORMAT_VERSION: ClassVar[int] = 1

    format_version: int
    target: TargetIdentity
    made_with: dict[str, Any]
    rounds: list[Round]


class SampleStore:
    """The folder, opened to continue it. Only its last round may be unfinished."""

    def __init__(self, out_dir: Path, target: TargetIdentity, made_with: dict[str, Any]) -> None:
        """Raises InputError if the samples in it were made with other settings, or are damaged."""
        self.folder = out_dir / FOLDER
        self.path = self.folder / "manifest.json"
        self.unfinished = self.folder / "unfinished.jsonl"
        self.remedy = f"choose another out_dir, or delete {self.folder} to sample again"
        self.manifest = SamplesManifest(
            format_version=SamplesManifest.FORMAT_VERSION, target=target, made_with=made_with, rounds=[]
        )
        if self.path.exists():
            before = parse_sealed(self.path.read_bytes(), SamplesManifest, source=str(self.path), remedy=self.remedy)
            self._require_same(before)
            self.manifest = before
            self._require_whole()

    @property
    def rounds(self) -> list[Round]:
        return self.manifest.rounds

    @property
    def files(self) -> list[Path]:
        """Return the files of finished rounds, in their order."""
        return [self._file(number) for number, each in enumerate(self.rounds) if each.sha256]

    @property
    def samples(self) -> int:
        return sum(each.samples for each in self.rounds)

    @property
    def is_unfinished(self) -> bool:
        return bool(self.rounds) and self.rounds[-1].sha256 is None

    def begin(self, samples: int) -> None:
        assert not self.is_unfinished
        self.unfinished.unlink(missing_ok=True)  # of a round that was finished and killed before this
        self._write([*self.rounds, Round(samples=samples, sha256=None)])

    def shorten(self, samples: int) -> None:
        """Let the unfinished round end after so many samples, or after the last one on disk if that is later."""
        begin = self.samples - self.rounds[-1].samples
        made = max((row["number"] + 1 - begin for row in self._rows()), default=0)
        shorter = min(self.rounds[-1].samples, max(samples, made))
        self._write([*self.rounds[:-1], replace(self.rounds[-1], samples=shorter)])

    def missing(self) -> list[int]:
        """Return the numbers of the unfinished round's samples that are not on disk."""
        done = {row["number"] for row in self._rows()}
        return [number for number in range(self.samples - self.rounds[-1].samples, self.samples) if number not in done]

    def append(self, rows: Iterable[Row]) -> None:
        append_lines(self.unfinished, b"".join(map(json_line, rows)))

    def finish(self) -> list[Row]:
        """Write the file of the round, in the order of its numbers, and return its rows."""
        rows = sorted(self._rows(), key=lambda row: row["number"])
        assert not self.missing()
        path = self._file(len(self.rounds) - 1)
        write_jsonl(path, rows)
        self._write([*self.rounds[:-1], replace(self.rounds[-1], sha256=sha256_file(path))])
        self.unfinished.unlink()
        return rows

    def _file(self, number: int) -> Path:
        return self.folder / f"round-{number:04d}.jsonl"

    def _rows(self) -> Iterator[Row]:
        """Read the unfinished round; what a kill left of a line at its end is cut off."""
        if not self.unfinished.exists():
            return
        content = self.unfinished.read_bytes()
        if not content.endswith(b"\n"):
            write_whole(self.unfinished, content[: content.rfind(b"\n") + 1])
        yield from read_jsonl(self.unfinished)

    def _write(self, rounds: list[Round]) -> None:
        self.manifest = replace(self.manifest, rounds=rounds)
        write_whole(self.path, sealed_bytes(self.manifest))

    def _require_same(self, before: SamplesManifest) -> None:
        require_same_target(
            before.target, self.manifest.target, expected_from=str(self.folder), actual_from="target.path"
        )
        now = self.manifest.made_with
        if changes := differences(before.made_with, now | {"chat": as_recorded(now["chat"], before.made_with["chat"])}):
            raise InputError(f"{self.folder} was made with other settings ({changes}); {self.remedy}")

    def _require_whole(self) -> None:
        for path, expected in zip(self.files, self.rounds, strict=False):
            if not path.is_file() or sha256_file(path) != expected.sha256:
                raise InputError(f"{path} is missing, damaged or was edited; bring it back, or {self.remedy}")
