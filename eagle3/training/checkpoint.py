"""Writes Lightning's checkpoints of a draft head whole, and copies them."""

import io
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.plugins import TorchCheckpointIO
from torch.utils.serialization import config as torch_format

from eagle3.errors import InputError
from eagle3.storage.files import atomic_write
from eagle3.storage.folder import open_folder, write_file
from eagle3.training.checkpoint_file import COMMENT_LENGTH, sha256_comment

OWNER = "run.json"  # in the folder of copies: the run that they are of, and its latest start


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint under a temporary name first, so that a full disk or a kill leaves the previous one intact.

    torch does not verify the checksums of a checkpoint's ZIP archive. They take the most time and are left out, so
    `unzip -t` reports errors. Instead, the archive's comment, the end of the file, is the sha256 of what comes before.

    `copies` is a bucket or folder to which every checkpoint is written before saving returns, while its run.json is of
    the version `claimed` (copies.py).
    """

    def __init__(self, copies: str | None = None) -> None:
        self.copies = open_folder(copies, setting="checkpoint_copies") if copies else None
        self.claimed: str | None = None
        # The checkpoint that the run resumes from, if it is in memory: Lightning does not read it again.
        self.read_already: dict[str, Any] | None = None

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        content, self.read_already = self.read_already, None
        return content or super().load_checkpoint(path, map_location, weights_only)

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        buffer = io.BytesIO()  # torch hides the error of a full disk
        with torch_format.patch("save.compute_crc32", False):  # type: ignore[attr-defined]
            torch.save(checkpoint, buffer)
        content = buffer.getbuffer()
        content[-2:] = COMMENT_LENGTH.to_bytes(2, "little")  # an archive without a comment ends with its length
        with ThreadPoolExecutor(1) as executor, atomic_write(Path(path)) as file:
            comment = executor.submit(sha256_comment, content)
            file.write(content)
            file.write(comment.result())
        if self.copies:
            self.require_claimed()
            write_file(self.copies, Path(path).name, b"".join((content, comment.result())))

    def remove_checkpoint(self, path: str | Path) -> None:
        super().remove_checkpoint(path)
        if self.copies:
            self.require_claimed()
            self.copies.delete(Path(path).name)

    def require_claimed(self) -> None:
        """Raise InputError if another process writes the copies now."""
        if self.copies and self.copies.version(OWNER) != self.claimed:
            raise InputError(
                f"checkpoint_copies={self.copies.location} is written by another process since this training started "
                f"({OWNER} there names it); stop one of them, or give each run a folder of its own"
            )
