"""`out_dir`: a local folder, or a bucket. Of a bucket the stages work in a copy on this machine, and the bucket counts.

prompts/…                    the stage's files, when it has ended
responses/block-HASH         a piece of a file that still grows, by the sha256 of its bytes
responses/state-000007.json  which blocks each file is made of: the state that another machine goes on from
responses/responses.jsonl …  the stage's files, when it has ended; then there are no blocks
"""

import hashlib
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
from eagle3.storage.records import Record, parse_sealed, sealed_bytes

log = logging.getLogger(__name__)

BLOCK = 8 * 2**20  # bytes
LAST = ("ledger.json", "manifest.json")  # with which a stage's files are complete


def working_copy(out_dir: str) -> str:
    """Return the folder on this machine that `out_dir` is worked on in: itself, or of a bucket one below outputs/."""
    return f"outputs/copies/{out_dir.replace('://', '/').strip('/')}" if "://" in out_dir else out_dir


def open_out_dir(out_dir: str, *, every_s: float) -> "OutDir":
    """Open a path or a URL; answers are saved to a bucket every `every_s` seconds."""
    return RemoteOutDir(out_dir, every_s=every_s) if "://" in out_dir else OutDir(out_dir)


class OutDir:
    """A local folder: what is written there is saved."""

    features: str | None = None  # where they go unless features.path says so; None: below the folder

    def __init__(self, out_dir: str) -> None:
        self.folder = Path(working_copy(out_dir))

    def bring(self) -> None:
        """Make the folder what was saved; what is here and was not saved is dropped."""

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Save the answers that there are, however the stage ends."""
        yield

    def save_if_due(self) -> None:
        """Save them now, unless that was done a short time ago."""

    def finish(self, stage: str) -> None:
        """Save the files of a stage that has ended; "." is the folder above all stages."""


@dataclass(frozen=True)
class State(Record):
    """What each file of the responses stage is made of: names of objects, in their order."""

    files: dict[str, list[str]]


@dataclass
class Growing:
    """The hashes of a file's whole blocks, as long as it does nothing but grow."""

    inode: int = -1
    size: int = 0
    hashes: list[str] = field(default_factory=list)


class RemoteOutDir(OutDir):
    """Brings the stages' files from a bucket, and saves them there."""

    def __init__(self, out_dir: str, *, every_s: float) -> None:
        super().__init__(out_dir)
        scheme, _, place = out_dir.partition("://")
        self.url = f"{scheme}://{place.rstrip('/')}"  # not all slashes: "s3:" would be a local folder
        self.every_s = every_s
        self.features = f"{self.url}/features"
        self.responses = self._storage("responses")
        self.number = 0  # of the state that this process has brought or written
        self.latest: Any = []
        self.brought = State({})
        self.growing: dict[str, Growing] = {}
        self.saved_at = time.monotonic()

    def bring(self) -> None:
        for stage in ("prompts", "responses"):  # in this order: the latter's state is the one that counts
            folder, storage = self.folder / stage, self._storage(stage)
            folder.mkdir(parents=True, exist_ok=True)
            for path in folder.iterdir():
                if path.is_file() and path.name != ".lock":
                    path.unlink()
            self.latest = latest(storage)
            self.number, self.brought = read_state(storage)
            for name, blocks in self.brought.files.items():
                with atomic_write(folder / name) as file:
                    for block in blocks:
                        known = block.partition("block-")[2] or None
                        file.write(storage.read(block, sha256=known))

    @contextmanager
    def saving(self) -> Iterator[None]:
        self._write(self.brought)  # a claim: whoever answered until now is found out when it saves
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
        self._write(State(files))
        used = {block for blocks in files.values() for block in blocks}
        for block in sorted(there - used):
            self.responses.delete(block)
        self.saved_at = time.monotonic()

    def _write(self, state: State) -> None:
        """Write the next state and delete the one before; InputError unless that one is the latest there."""
        name = f"state-{self.number + 1:06d}.json"
        try:
            if latest(self.responses) != self.latest:
                raise FileExistsError
            write_file(self.responses, name, sealed_bytes(state), instead_of=None)
        except FileExistsError:
            raise InputError(
                f"out_dir={self.url}: another process answers for it, or has answered; end one of the two and run "
                "the command again"
            ) from None
        self.responses.delete(f"state-{self.number:06d}.json")
        self.number, self.latest = self.number + 1, name

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
        """Write the stage's files under their own names, and take its blocks away."""
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

    def _storage(self, stage: str) -> Storage:
        return open_folder(self.url if stage == "." else f"{self.url}/{stage}", setting="out_dir")


def latest(storage: Storage) -> Any:
    """Return what changes when somebody else writes a stage's state or files: the latest state's name, or versions."""
    states = storage.names("state-*.json")
    return states[-1] if states else {name: storage.version(name) for name in whole_files(storage)}


def whole_files(storage: Storage) -> list[str]:
    return [name for name in storage.names("*") if not name.startswith(("block-", "."))]


def read_state(storage: Storage) -> tuple[int, State]:
    """Return the number of a stage's latest state and the state; of a stage that has ended 0, and its files."""
    states = storage.names("state-*.json")
    if not states:
        return 0, State({name: [name] for name in whole_files(storage)})
    source, way_out = f"{storage.location}/{states[-1]}", "delete it; the answers that it names are then given again"
    state = parse_sealed(bytes(storage.read(states[-1])), State, source=source, way_out=way_out)
    return int(states[-1][len("state-") : -len(".json")]), state
