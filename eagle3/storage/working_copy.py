"""An `out_dir` in a bucket: the stages work in a copy on this machine, and the bucket is what counts.

prompts/…                    the stage's files, when it has ended
responses/block-HASH         a piece of a file that still grows, by the sha256 of its bytes
responses/state-000007.json  which blocks each file is made of: the state that another machine goes on from
responses/responses.jsonl …  the stage's files, when it has ended; then there are no blocks
"""

import hashlib
import json
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eagle3.errors import InputError
from eagle3.storage.files import atomic_write
from eagle3.storage.folder import Storage, write_file
from eagle3.storage.place import open_folder

log = logging.getLogger(__name__)

BLOCK = 8 * 2**20  # bytes
LAST = ("ledger.json", "manifest.json")  # with which a stage's files are complete


def is_remote(out_dir: str) -> bool:
    return "://" in out_dir


def working_copy(out_dir: str) -> str:
    """Return the folder on this machine that `out_dir` is worked on in: itself, or of a bucket one below outputs/."""
    return f"outputs/copies/{out_dir.replace('://', '/').strip('/')}" if is_remote(out_dir) else out_dir


@dataclass
class Growing:
    """The hashes of a file's whole blocks, as long as it does nothing but grow."""

    inode: int = -1
    size: int = 0
    hashes: list[str] = field(default_factory=list)


class WorkingCopy:
    """Brings the stages' files from the bucket, and saves them there."""

    def __init__(self, url: str, *, every_s: float) -> None:
        self.url, self.folder, self.every_s = url.rstrip("/"), Path(working_copy(url)), every_s
        self.responses = self._storage("responses")
        self.number = 0  # of the latest state
        self.growing: dict[str, Growing] = {}
        self.saved_at = time.monotonic()

    def bring(self) -> None:
        """Make the copy what the bucket holds; what is here and was not saved there is dropped."""
        for stage in ("prompts", "responses"):
            folder, storage = self.folder / stage, self._storage(stage)
            folder.mkdir(parents=True, exist_ok=True)
            for path in folder.iterdir():
                if path.is_file() and path.name != ".lock":
                    path.unlink()
            for name, blocks in self._files(storage).items():
                with atomic_write(folder / name) as file:
                    for block in blocks:
                        known = block.partition("block-")[2] or None
                        file.write(storage.read(block, sha256=known))

    def _files(self, storage: Storage) -> dict[str, list[str]]:
        """Return the names of files, and of the objects that each is made of."""
        states = storage.names("state-*.json")
        if not states:
            return {name: [name] for name in storage.names("*") if not name.startswith(("block-", "."))}
        self.number = int(states[-1][len("state-") : -len(".json")])
        return json.loads(bytes(storage.read(states[-1])))

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Save the answers that there are, however the stage ends."""
        try:
            yield
        finally:
            self.save()

    def save_if_due(self) -> None:
        if time.monotonic() - self.saved_at >= self.every_s:
            self.save()

    def save(self) -> None:
        """Let the bucket hold the responses stage's files as they are now."""
        there = set(self.responses.names("block-*"))
        files: dict[str, list[str]] = {}
        # Rows before errors: of what is appended meanwhile there may be errors without rows, which a restart drops.
        for name in ("responses.jsonl", "errors.jsonl", "manifest.json"):
            path = self.folder / "responses" / name
            if path.exists():
                files[name] = self._blocks(path, there)
        self.number += 1
        try:
            content = json.dumps(files).encode()
            write_file(self.responses, f"state-{self.number:06d}.json", content, instead_of=None)
        except FileExistsError:
            raise InputError(
                f"out_dir={self.url}: another process answers for it at the same time; end one of the two"
            ) from None
        used = {block for blocks in files.values() for block in blocks}
        older = [name for name in self.responses.names("state-*.json") if name < f"state-{self.number:06d}.json"]
        for name in (*older, *sorted(there - used)):
            self.responses.delete(name)
        self.saved_at = time.monotonic()

    def _blocks(self, path: Path, there: set[str]) -> list[str]:
        """Return the names of a file's blocks; those that the bucket lacks are written."""
        known, facts = self.growing.setdefault(path.name, Growing()), path.stat()
        if facts.st_ino != known.inode or facts.st_size < known.size:
            known.hashes.clear()
        known.inode, known.size = facts.st_ino, facts.st_size
        names = [f"block-{digest}" for digest in known.hashes]
        with path.open("rb") as file:
            file.seek(len(known.hashes) * BLOCK)
            while content := file.read(min(BLOCK, facts.st_size - file.tell())):
                digest = hashlib.sha256(content).hexdigest()
                if f"block-{digest}" not in there:
                    write_file(self.responses, f"block-{digest}", content)
                names.append(f"block-{digest}")
                if len(content) == BLOCK:
                    known.hashes.append(digest)
        return names

    def finish(self, stage: str) -> None:
        """Write the files of a stage that has ended under their own names, and take its blocks away; "." is the folder
        above all stages."""
        storage = self._storage(stage)
        paths = [path for path in (self.folder / stage).iterdir() if path.is_file() and not path.name.startswith(".")]
        for path in sorted(paths, key=lambda path: (path.name in LAST, path.name)):
            pending = storage.create(path.name)
            try:
                with path.open("rb") as file:
                    while content := file.read(BLOCK):
                        pending.write(content)
                pending.commit()
            finally:
                pending.discard()
        for name in (*storage.names("state-*.json"), *storage.names("block-*")):
            storage.delete(name)
        log.info("%s: %d files are in %s", stage, len(paths), storage.location)

    def _storage(self, stage: str) -> Any:
        return open_folder(self.url if stage == "." else f"{self.url}/{stage}", setting="out_dir")
