"""The files of OUT/answers: finished and pending prompts, and the settings that made the answers."""

import logging
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from eagle3.answers.dialogue import UNFINISHED
from eagle3.answers.rows import AnsweredRow, AnswerError
from eagle3.errors import MAKE_PROMPTS, InputError
from eagle3.settings.flat import differences
from eagle3.storage.files import append_lines, read_jsonl, sha256_file, write_whole
from eagle3.storage.records import (
    AnyRecord,
    Record,
    parse_record,
    parse_sealed,
    read_sealed_json,
    sealed_bytes,
    sealed_line,
    unseal,
)
from eagle3.target.identity import TargetIdentity, require_same_target

log = logging.getLogger(__name__)

MAKE_ANSWERS = "python precompute.py target.path=TARGET out_dir=DIR 'stages=[answers]'"
ANSWERS = "answers.jsonl"
LISTED = 3  # reasons in the log, the commonest
RECORDED_LATER = ("special_tokens", "target_stop_ids")  # of Chat.settings: earlier versions did not record them
Answered = tuple[list[AnsweredRow], list[AnswerError]]  # rows and errors of one prompt


@dataclass(frozen=True, kw_only=True)
class MadeWith(Record):
    """The settings that decide the answers, apart from the prompts. Imported answers have no sampling."""

    answers: str  # the answerer's name
    chat: dict[str, Any]
    sampling: dict[str, Any] | None
    seed: int | None
    on_length: str | None


@dataclass(frozen=True, kw_only=True)
class AnswerCounts(Record):
    """Totals of the stage; `finish_reasons` and `errors` count turns by reason."""

    prompts: int
    rows: int
    turns: int
    answer_tokens: int
    finish_reasons: dict[str, int]
    errors: dict[str, int]

    @property
    def cut(self) -> int:
        """Answers that did not end by themselves, also those that sampling.on_length dropped."""
        return self.finish_reasons.get("length", 0) + self.errors.get(UNFINISHED, 0)


@dataclass(frozen=True, kw_only=True)
class FileSeal(Record):
    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class AnswersManifest(Record):
    FORMAT_VERSION: ClassVar[int] = 5
    FOUND_IN: ClassVar[str] = "answers, DIR/answers"

    format_version: int
    target: TargetIdentity
    made_with: MadeWith
    prompts_sha256: str
    complete: bool
    counts: AnswerCounts | None  # of a complete stage
    files: dict[str, FileSeal] | None  # of a complete stage, by name

    def identity(self) -> dict[str, Any]:
        """Return what decides the answers, apart from the target: those that come later belong to the same folder."""
        return {**asdict(self.made_with), "prompts_sha256": self.prompts_sha256}


def as_recorded(chat: dict[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """Return Chat.settings of now, without those that the version which recorded `before` did not know."""
    return {key: value for key, value in chat.items() if key in before or key not in RECORDED_LATER}


def read_answers(folder: Path) -> AnswersManifest:
    path = folder / "manifest.json"
    if not path.exists():
        raise InputError(f"{path} does not exist; make it with: {MAKE_ANSWERS}")
    return parse_sealed(
        path.read_bytes(), AnswersManifest, source=str(path), remedy=f"delete {folder} and run: {MAKE_ANSWERS}"
    )


def require_whole(folder: Path, manifest: AnswersManifest) -> None:
    """Raise InputError unless the files of a complete stage are those that its manifest was written for."""
    for name, expected in (manifest.files or {}).items():
        path = folder / name
        actual = file_seal(path) if path.is_file() else None
        if actual != expected:
            held = "is missing" if actual is None else f"holds {actual.bytes} bytes with sha256 {actual.sha256[:12]}…"
            raise InputError(
                f"{path} {held}, and the stage ended with {expected.bytes} bytes, {expected.sha256[:12]}…: it is "
                f"damaged or was edited; bring it back, or delete {folder} and run: {MAKE_ANSWERS}"
            )


def file_seal(path: Path) -> FileSeal:
    return FileSeal(bytes=path.stat().st_size, sha256=sha256_file(path))


def read_rows(folder: Path) -> Iterator[AnsweredRow]:
    return (row for row, _ in _lines_and_ends(folder / ANSWERS, AnsweredRow))


def _lines_and_ends(path: Path, kind: type[AnyRecord]) -> Iterator[tuple[AnyRecord, int]]:
    """Read records of a file that was written by appending, and where the line of each ends: a last line cut short by a
    kill is left out."""
    end, remedy = 0, f"delete {path.parent} and run again"
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.endswith(b"\n"):
                end += len(line)
                source = f"{path} line {number}"
                content = unseal(line, source=source, remedy=remedy)
                yield parse_record(content, kind, source=source, remedy=remedy), end


def require_prompts_whole(prompts: Path, sha256: str) -> None:
    """Raise InputError unless prompts.jsonl is the file that the ledger next to it, if any, describes."""
    ledger = prompts.parent / "ledger.json"
    if ledger.exists() and read_sealed_json(ledger, made_by=MAKE_PROMPTS)["sha256"] != sha256:
        raise InputError(
            f"{prompts} does not have the sha256 that {ledger} says: it is damaged or was edited; make it again with: "
            f"{MAKE_PROMPTS}"
        )


class AnswerStore:
    """The folder of the answers stage, opened to continue it."""

    def __init__(
        self, out_dir: Path, target: TargetIdentity, made_with: MadeWith, *, prompt_limit: int | None = None
    ) -> None:
        """`prompt_limit`: most tokens of a prompt. Raises InputError if the folder has answers that were made with
        other settings. Without any answer, other settings begin the stage again."""
        self.prompts = out_dir / "prompts" / "prompts.jsonl"
        self.folder = out_dir / "answers"
        self.answers = self.folder / ANSWERS
        self.errors = self.folder / "errors.jsonl"
        if not self.prompts.is_file():
            raise InputError(f"{self.prompts} does not exist; make it with: {MAKE_PROMPTS}")
        self.manifest = AnswersManifest(
            format_version=AnswersManifest.FORMAT_VERSION,
            target=target,
            made_with=made_with,
            prompts_sha256=sha256_file(self.prompts),
            complete=False,
            counts=None,
            files=None,
        )
        require_prompts_whole(self.prompts, self.manifest.prompts_sha256)
        if (self.folder / "manifest.json").exists():
            self._continue(read_answers(self.folder))
        elif self.answers.exists() and self.answers.stat().st_size:
            raise InputError(
                f"{self.answers} has no manifest.json next to it, which says how these answers were made; bring it "
                f"back, or delete {self.folder} and run: {MAKE_ANSWERS}"
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        self.done = _keep_whole_prompts(self.answers)
        self.final = [
            each for each in self._read_errors() if each.prompt_id in self.done or _is_final(each, prompt_limit)
        ]
        self.done |= {error.prompt_id for error in self.final}
        self.begun = False
        self.prompt_count = self.pending = 0
        for prompt in read_jsonl(self.prompts):
            self.prompt_count += 1
            self.pending += prompt["id"] not in self.done
        self.kept = self.prompt_count - self.pending  # prompts whose answers or refusals are on disk

    def pending_prompts(self) -> Iterator[dict[str, Any]]:
        return (prompt for prompt in read_jsonl(self.prompts) if prompt["id"] not in self.done)

    def append(self, finished: Iterable[Answered]) -> None:
        """Add the rows and errors of prompts; errors first: those that a kill leaves without rows are dropped."""
        if not self.begun:
            self._begin()
        finished = list(finished)
        self._append(self.errors, [error for _, errors in finished for error in errors])
        rows = [replace(row, last_of_prompt=row is rows[-1]) for rows, _ in finished for row in rows]
        self._append(self.answers, rows)
        self.kept += sum(bool(rows) or not any(error.retry for error in errors) for rows, errors in finished)

    def _begin(self) -> None:
        """Say on disk that the stage is not complete. Until the first answer, other settings may be tried, and what
        was complete stays so."""
        self._write_manifest()
        write_whole(self.errors, b"".join(sealed_line(asdict(error)) for error in self.final))
        self.begun = True

    @contextmanager
    def telling_kept(self) -> Iterator[None]:
        """Log how many prompts are done if the stage is stopped."""
        try:
            yield
        except BaseException:
            log.info("%s: kept %d of %d prompts", self.folder, self.kept, self.prompt_count)
            raise

    def close(self) -> AnswerCounts:
        """Count what is on disk into the manifest."""
        counts = _count(self.answers, read_rows(self.folder), self._read_errors())
        if not counts.rows:
            imported = "drop answers=imported, or give rows with answers and run all stages with it"
            remedy = imported if self.manifest.made_with.sampling is None else "correct that and run again"
            raise InputError(f"{self.answers} is empty, nothing could be answered ({_listed(counts.errors)}); {remedy}")
        if counts.errors:
            log.warning(
                "%d turns or prompts gave no row (%s), see %s",
                sum(counts.errors.values()), _listed(counts.errors), self.errors,
            )  # fmt: skip
        self.errors.touch()
        files = {path.name: file_seal(path) for path in (self.answers, self.errors)}
        self.manifest = replace(self.manifest, complete=True, counts=counts, files=files)
        self._write_manifest()
        return counts

    def _write_manifest(self) -> None:
        write_whole(self.folder / "manifest.json", sealed_bytes(self.manifest))

    def _append(self, path: Path, rows: Sequence[AnsweredRow | AnswerError]) -> None:
        try:
            # `asdict` would copy every token first, which takes most of the time.
            append_lines(path, b"".join(sealed_line(vars(row)) for row in rows))
        except OSError as error:
            raise InputError(
                f"{path} cannot be written ({error.strerror}); make room and run again: it resumes where it stopped"
            ) from None

    def _read_errors(self) -> list[AnswerError]:
        return [error for error, _ in _lines_and_ends(self.errors, AnswerError)] if self.errors.exists() else []

    def _continue(self, before: AnswersManifest) -> None:
        made_with = self.manifest.made_with
        chat = as_recorded(made_with.chat, before.made_with.chat)
        self.manifest = replace(self.manifest, made_with=replace(made_with, chat=chat))
        try:
            self._require_same(before)
        except InputError:
            if self.answers.exists() and next(read_rows(self.folder), None) is not None:
                raise
            require_whole(self.folder, before)
            self.errors.unlink(missing_ok=True)  # refusals by the other settings
        else:
            require_whole(self.folder, before)
            self.manifest = replace(self.manifest, target=before.target)  # also where its folder has moved

    def _require_same(self, before: AnswersManifest) -> None:
        require_same_target(
            before.target, self.manifest.target, expected_from=str(self.folder), actual_from="target.path"
        )
        if changes := differences(before.identity(), self.manifest.identity()):
            remedy = f"choose another out_dir, or delete {self.folder}"
            raise InputError(f"{self.folder} was made with other settings ({changes}); {remedy}")


def _listed(reasons: dict[str, int]) -> str:
    more = f"; {len(reasons) - LISTED} more" if len(reasons) > LISTED else ""
    return "; ".join(f"{reason}: {number}" for reason, number in Counter(reasons).most_common(LISTED)) + more


def _is_final(error: AnswerError, prompt_limit: int | None) -> bool:
    """Tell whether a later run would be refused in the same way."""
    fits_now = error.prompt_tokens is not None and (prompt_limit is None or error.prompt_tokens <= prompt_limit)
    return not (error.retry or fits_now)


def _keep_whole_prompts(path: Path) -> set[str]:
    """Return the ids of prompts whose rows are all there; what a kill left of another one at the end is cut off."""
    done: set[str] = set()
    path.touch()
    whole = 0
    for row, end in _lines_and_ends(path, AnsweredRow):
        if row.prompt_id in done:
            raise _repeated(path, row)
        if row.last_of_prompt:
            done.add(row.prompt_id)
            whole = end
    os.truncate(path, whole)
    return done


def _repeated(source: Path, row: AnsweredRow) -> InputError:
    return InputError(f"{source}: duplicate row {row.id}; delete {source.parent} and run: {MAKE_ANSWERS}")


def _count(source: Path, rows: Iterable[AnsweredRow], errors: Iterable[AnswerError]) -> AnswerCounts:
    total: Counter[str] = Counter()
    prompts: set[str] = set()
    ids: set[str] = set()
    finish_reasons: Counter[str] = Counter()
    for row in rows:
        if row.id in ids:
            raise _repeated(source, row)
        ids.add(row.id)
        prompts.add(row.prompt_id)
        finish_reasons.update(row.finish_reasons)
        total["rows"] += 1
        total["turns"] += len(row.turns)
        total["answer_tokens"] += sum(end - start for start, end in row.turns)
    return AnswerCounts(
        prompts=len(prompts),
        rows=total["rows"],
        turns=total["turns"],
        answer_tokens=total["answer_tokens"],
        finish_reasons=dict(finish_reasons),
        errors=dict(Counter(error.kind for error in errors)),
    )
