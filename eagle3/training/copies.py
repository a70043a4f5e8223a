"""The folder or bucket of `checkpoint_copies`: it belongs to one run, and one process at a time writes to it.

RUN/run_id has the id of a run, which survives moving the folder. COPIES/run.json has the same id, and is replaced at
each start of the run: a process whose run.json was replaced writes no more.
"""

import platform
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from uuid import uuid4

from eagle3.errors import InputError
from eagle3.storage.files import write_whole
from eagle3.storage.folder import LocalFolder, open_folder, write_file
from eagle3.storage.lock import hold
from eagle3.storage.records import Record, parse_record, record_bytes
from eagle3.training.checkpoint import OWNER
from eagle3.training.loggers import kept_id

RUN_ID = "run_id"


@dataclass(frozen=True, kw_only=True)
class Owner(Record):
    """Content of run.json."""

    id: str
    writer: str  # other at each start
    run_dir: str
    host: str
    since: str


class Copies:
    """`checkpoint_copies` of a run. Only the first rank looks at its owner."""

    def __init__(self, place: str, run_dir: Path) -> None:
        self.place, self.run_dir = place.rstrip("/"), run_dir
        self.folder = open_folder(place, setting="checkpoint_copies")
        self.version: str | None = None  # of run.json
        self.owner: Owner | None = None
        self.claimed = ExitStack()

    def look(self) -> None:
        """Read who owns the folder; `claim` fails if that has changed since."""
        self.version = self.folder.version(OWNER)
        if self.version is not None:
            remedy = "delete it if no training writes there"
            content = bytes(open_folder(self.place, setting="checkpoint_copies").read(OWNER))  # not mapped earlier
            self.owner = parse_record(content, Owner, source=f"{self.place}/{OWNER}", remedy=remedy)

    def has_checkpoints(self) -> bool:
        return bool(self.folder.names("*.ckpt"))

    def of_this_run(self) -> bool:
        """Tell whether the owner is this run: by its id, or by its folder if a kill lost that before the first save."""
        path = self.run_dir / RUN_ID
        if self.owner is None or path.is_file():
            return self.owner is not None and self.owner.id == path.read_text()
        return self.owner.run_dir == str(self.run_dir) and not self.has_checkpoints()

    def require_free(self) -> None:
        """Raise InputError if the folder is another run's."""
        if self.owner and not self.of_this_run():
            raise InputError(f"checkpoint_copies={self.place} {self._owned()}; {self._remedy()}")

    def claim(self) -> str | None:
        """Make the folder this run's, and this process the one that writes; return the version of run.json."""
        if isinstance(self.folder, LocalFolder):
            self.claimed.enter_context(hold(self.folder.path))
        own = self.run_dir / RUN_ID
        if self.owner:
            write_whole(own, self.owner.id.encode())
        owner = Owner(
            id=kept_id(own) or "",
            writer=uuid4().hex,
            run_dir=str(self.run_dir),
            host=platform.node(),
            since=datetime.now(UTC).isoformat("T", "seconds"),
        )
        try:
            write_file(self.folder, OWNER, record_bytes(owner), instead_of=self.version)
        except FileExistsError:
            self.look()
            raise InputError(f"checkpoint_copies={self.place} {self._owned()} just now; {self._remedy()}") from None
        self.version = self.folder.version(OWNER)
        self.claimed.callback(self._release)
        return self.version

    def _release(self) -> None:
        """Leave nothing of a training that ended before its first checkpoint."""
        if not self.has_checkpoints() and self.folder.version(OWNER) == self.version:
            self.folder.delete(OWNER)

    def _owned(self) -> str:
        assert self.owner is not None
        return f"is used by another run ({self.owner.run_dir} on {self.owner.host}, since {self.owner.since})"

    def _remedy(self) -> str:
        lost = "" if self.has_checkpoints() else f", or delete {self.place}/{OWNER} if that run has ended"
        return f"give each run a folder of its own{lost}"
