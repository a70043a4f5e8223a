"""Secrets found by kingfisher (the extra `kingfisher`), a binary that reads many texts in one call.

It works offline: nothing is validated, updated or sent. The texts are in a temporary folder that only its owner can
enter, each in its own file, so that the findings in one do not depend on the others.
"""

import json
import os
import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from eagle3.errors import InputError, install_command
from eagle3.prompts.privacy.recogniser import Span

KEY = "prompts.privacy.kingfisher"
PACKAGE = "package"
OLDEST, NEWEST = (2, 14), (3, 0)  # versions whose report can be read; NEWEST is excluded
FOUND_NOTHING, FOUND = 0, 200  # exit codes
# Report every finding, including repeated ones; ignore comments in texts that ask to be skipped; unpack nothing.
ARGUMENTS = (
    "--format=jsonl", "--quiet", "--no-validate", "--no-update-check", "--no-dedup", "--no-ignore",
    "--no-extract-archives", "--git-history=none", "--confidence=low", "--jobs=1",
)  # fmt: skip
NEEDED_FROM_ENVIRONMENT = ("HOME", "PATH", "TMPDIR", "XDG_CACHE_HOME", "KF_RULE_CACHE_DIR")  # no webhooks, no proxies
SECONDS = 600
NO_MAGIC = b"\n"  # before each text, so that none starts like another kind of file
ENCODED = re.compile(rb"[A-Za-z0-9+/=_-]*")


class Kingfisher:
    """path: of the binary, or PACKAGE for the binary of the installed package kingfisher-bin."""

    entity = "SECRET"

    def __init__(self, path: str):
        self.path = _installed() if path == PACKAGE else str(Path(path).expanduser())
        self.version  # noqa: B018 a missing or unsupported binary is reported before the first row is read
        self._found: dict[str, list[Span]] = {}

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_found": {}}

    @cached_property
    def version(self) -> str:
        try:
            told = self._run("--version").stdout.decode(errors="replace")
        except OSError as error:
            raise InputError(
                f"{KEY}={self.path} cannot be run ({type(error).__name__}); name kingfisher's binary, or {PACKAGE} "
                f"and {install_command('kingfisher')}"
            ) from None
        version = re.fullmatch(r"kingfisher (\d+)\.(\d+)\.\S+", told.strip())
        if version is None or not OLDEST <= (int(version[1]), int(version[2])) < NEWEST:
            raise InputError(
                f"{KEY}={self.path} calls itself {told.strip()[:40]!r}; kingfisher from "
                f"{'.'.join(map(str, OLDEST))} and below {NEWEST[0]} is read: {install_command('kingfisher')}"
            )
        return told.split()[1]

    def made_with(self) -> str:
        return f"kingfisher {self.version}"

    def look_ahead(self, texts: Iterable[str]) -> None:
        """Read these texts in one call and keep their findings for `find`, replacing earlier ones."""
        known = [text for text in dict.fromkeys(texts) if text]
        self._found = dict(zip(known, self._find_all(known), strict=True)) if known else {}

    def find(self, text: str) -> list[Span]:
        if text and text not in self._found:
            self.look_ahead([text])
        return self._found.get(text, [])

    def _find_all(self, texts: Sequence[str]) -> list[list[Span]]:
        data = [NO_MAGIC + text.encode() for text in texts]
        spans: list[list[Span]] = [[] for _ in texts]
        with tempfile.TemporaryDirectory(prefix="eagle3-kingfisher-") as folder:  # of mode 0700
            for number, content in enumerate(data):
                (Path(folder) / str(number)).write_bytes(content)
            findings = list(self._findings(folder, len(data)))
        for finding in findings:
            number = int(Path(finding["path"]).name)
            spans[number].append(_in_characters(data[number], *_place(data[number], finding)))
        return [sorted(set(found)) for found in spans]

    def _findings(self, folder: str, texts: int) -> Iterator[dict[str, Any]]:
        try:
            ended = self._run("scan", folder, *ARGUMENTS)
            lines = [json.loads(line) for line in ended.stdout.splitlines()]
        except (OSError, ValueError, subprocess.TimeoutExpired) as error:  # its report may have secrets
            raise _broken(self.version, type(error).__name__) from None
        scanned = sum(
            part["stats"]["blobs_scanned"]
            for line in lines
            if "audit" in line
            for part in line["audit"]["repositories"]
        )
        if ended.returncode not in (FOUND_NOTHING, FOUND) or scanned != texts:
            raise _broken(self.version, f"exit code {ended.returncode}, {scanned} of {texts} texts read")
        yield from (line["finding"] for line in lines if "finding" in line)

    def _run(self, *arguments: str) -> subprocess.CompletedProcess[bytes]:
        environment = {name: os.environ[name] for name in NEEDED_FROM_ENVIRONMENT if name in os.environ}
        return subprocess.run(
            [self.path, *arguments], capture_output=True, stdin=subprocess.DEVNULL, env=environment, timeout=SECONDS
        )


def _installed() -> str:
    try:
        from kingfisher import get_binary_path

        return get_binary_path()
    except (ImportError, OSError):
        raise InputError(
            f"{KEY} needs the package kingfisher-bin; install it ({install_command('kingfisher')}), name "
            f"a binary, or go without: {KEY}=null"
        ) from None


def _broken(version: str, what: str) -> InputError:
    return InputError(
        f"{KEY}: kingfisher {version} did not read the texts ({what}); check that TMPDIR has space and is not in a git "
        f"repository, or go without: {KEY}=null"
    )


def _place(data: bytes, finding: dict[str, Any]) -> tuple[int, int]:
    """Return start and end of a finding in bytes.

    Its line counts from 1, its column from 0 and in bytes. For decoded text it is a position inside the encoded text.
    """
    start = 0
    for _ in range(finding["line"] - 1):
        start = data.index(b"\n", start) + 1
    start = min(start + finding["column_start"], len(data) - 1)
    snippet = finding["snippet"].encode()
    if snippet and data.startswith(snippet, start):
        return start, start + len(snippet)
    before = ENCODED.match(data[:start][::-1]).end()  # type: ignore[union-attr]
    return start - before, ENCODED.match(data, start).end()  # type: ignore[union-attr]


def _in_characters(data: bytes, start: int, end: int) -> Span:
    """Return the span in the text without NO_MAGIC; an empty span becomes one character."""
    before = len(data[:start].decode(errors="ignore"))
    inside = len(data[start:end].decode(errors="ignore"))
    first = max(0, before - len(NO_MAGIC))
    return Span(first, max(first + 1, before + inside - len(NO_MAGIC)))
