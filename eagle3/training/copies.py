"""The folder or bucket of `checkpoint_copies`: it belongs to one run, and one process at a time writes to it.

RUN/run_id has the id of a run, which survives moving the folder. COPIES/run.json has the same id, and is replaced at
each start of the run: a process whose run.json was replaced writes no more.

A lock tells whether the process of an earlier start still runs, but not in a bucket. There it renews COPIES/alive.json
until it ends; a start waits to see whether that file changes, so no two clocks are compared. A process that ends, or is
told to, deletes the file. One that was killed leaves it, and costs the next start the wait.
"""

import json
import logging
import platform
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from threading import Event, Thread
from uuid import uuid4

from eagle3.errors import InputError
from eagle3.storage.files import write_whole
from eagle3.storage.folder import LocalFolder, open_folder, write_file
from eagle3.storage.lock import hold
from eagle3.storage.records import Record, parse_record, record_bytes
from eagle3.training.checkpoint import OWNER
from eagle3.training.loggers import kept_id

log = logging.getLogger(__name__)

RUN_ID, ALIVE = "run_id", "alive.json"
RENEWED, WATCHED = 20.0, 90.0  # seconds: alive.json is written every 20, and a start watches it for 90


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

    def require_ended(self) -> None:
        """Raise InputError if the process that wrote the copies last still runs."""
        if not self.folder.remote or self.owner is None:
            return
        seen = self.folder.version(ALIVE)
        here = (self.owner.host, self.owner.run_dir) == (platform.node(), str(self.run_dir))  # and its lock is ours
        if seen is None or here:
            return
        log.info(
            "checkpoint_copies=%s: waiting up to %.0f s to see whether %s still runs",
            self.place, WATCHED, self._last_start(),
        )  # fmt: skip
        until = time.monotonic() + WATCHED
        while time.monotonic() < until:
            time.sleep(min(RENEWED, WATCHED) / 10)
            if self.folder.version(ALIVE) not in (seen, None):
                raise InputError(
                    f"checkpoint_copies={self.place} is written by {self._last_start()}, which still runs; stop that "
                    f"one first, or give each run a folder of its own"
                )

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
        if self.folder.remote:
            self._renew(owner.writer)  # first: whoever sees the new owner sees that it runs
        try:
            write_file(self.folder, OWNER, record_bytes(owner), instead_of=self.version)
        except FileExistsError:
            self.look()
            raise InputError(f"checkpoint_copies={self.place} {self._owned()} just now; {self._remedy()}") from None
        self.version = self.folder.version(OWNER)
        self.claimed.callback(self._release)
        if self.folder.remote:
            ended = Event()
            renewing = Thread(target=self._keep_renewing, args=(owner.writer, ended), daemon=True)
            renewing.start()
            self.claimed.callback(renewing.join, RENEWED)  # else its last file may come after _release
            self.claimed.callback(ended.set)
        return self.version

    def _keep_renewing(self, writer: str, ended: Event) -> None:
        while not ended.wait(RENEWED):
            with suppress(OSError, InputError):  # the next time, or the next checkpoint, which says what is wrong
                self._renew(writer)

    def _renew(self, writer: str) -> None:
        write_file(self.folder, ALIVE, json.dumps({"writer": writer, "at": time.time()}).encode())

    def _release(self) -> None:
        """Leave nothing of a training that ended before its first checkpoint, and no sign of one that ended."""
        try:
            if self.folder.version(OWNER) != self.version:
                return
            if not self.has_checkpoints():
                self.folder.delete(OWNER)
            self.folder.delete(ALIVE)
        except (OSError, InputError) as error:  # not raised: it would hide why the training ends
            log.warning("%s (the next start with these copies may wait for %.0f s)", error, WATCHED)

    def _owned(self) -> str:
        return f"is used by another run ({self._last_start()})"

    def _last_start(self) -> str:
        assert self.owner is not None
        return f"{self.owner.run_dir} on {self.owner.host}, since {self.owner.since}"

    def _remedy(self) -> str:
        lost = "" if self.has_checkpoints() else f", or delete {self.place}/{OWNER} if that run has ended"
        return f"give each run a folder of its own{lost}"
