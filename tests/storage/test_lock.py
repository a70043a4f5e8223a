"""A folder is written by one process at a time."""

import errno
import os
import subprocess
import sys

import pytest
from stores import ROOT

from eagle3.errors import InputError
from eagle3.messages import message_for_user
from eagle3.storage.lock import hold

HOLDS = """
import sys, time
from pathlib import Path
from eagle3.storage.lock import hold
with hold(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_folder_has_one_writer_and_a_killed_one_gives_it_back(tmp_path):
    folder = tmp_path / "new" / "folder"
    with subprocess.Popen([sys.executable, "-c", HOLDS, folder], stdout=subprocess.PIPE, cwd=ROOT) as other:
        assert other.stdout is not None and other.stdout.readline() == b"held\n"
        with pytest.raises(InputError, match=rf"is being written by process {other.pid} on .* since 20.*; wait for it"):
            hold(folder).__enter__()
        other.kill()
    with hold(folder):
        pass
    assert not (folder / ".lock.json").exists()


def test_a_file_system_without_locks_is_one_line(tmp_path, monkeypatch):
    def flock(file: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", flock)
    with pytest.raises(OSError, match="No locks available") as refused:
        hold(tmp_path).__enter__()
    assert message_for_user(refused.value).startswith(f"{tmp_path}/.lock: No locks available; the file system reported")
