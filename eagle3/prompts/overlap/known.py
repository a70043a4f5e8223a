"""Prompts that earlier runs have kept: a store that grows by another beside it holds none of them twice."""

from pathlib import Path

import numpy as np

from eagle3.errors import InputError
from eagle3.prompts.checks import Verdict
from eagle3.prompts.overlap.signatures import text_hash
from eagle3.prompts.overlap.words import compared_text
from eagle3.prompts.reading.prompt import Prompt
from eagle3.storage.files import read_jsonl


class KnownCheck:
    """Refuses a prompt that says what one of `folders`, each the `out_dir` of an earlier run, has kept."""

    name = "known"

    def __init__(self, folders: list[str]):
        self.folders = folders
        for path in self.files():
            if not path.is_file():
                raise InputError(
                    f"prompts.duplicates.known={self.folders}: {path} does not exist; name folders that earlier runs "
                    f"had as their out_dir"
                )
        self.hashes = [
            np.unique(
                np.fromiter((text_hash(compared_text(row["messages"])) for row in read_jsonl(path)), dtype=np.uint64)
            )
            for path in self.files()
        ]

    def files(self) -> list[Path]:
        """List what it reads: prompts are made again when one of them changes."""
        return [Path(folder) / "prompts" / "prompts.jsonl" for folder in self.folders]

    def __call__(self, prompt: Prompt) -> Verdict:
        found = np.uint64(text_hash(compared_text(prompt.messages)))
        for folder, hashes in zip(self.folders, self.hashes, strict=True):
            place = np.searchsorted(hashes, found)
            if place < len(hashes) and hashes[place] == found:
                return Verdict(reason=f"known: {folder} has it")
        return Verdict()
