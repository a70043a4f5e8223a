"""Prompts that earlier runs kept, so that a store trained together with theirs has none of them twice."""

from pathlib import Path

import numpy as np

from eagle3.errors import InputError
from eagle3.prompts.checks import Verdict
from eagle3.prompts.overlap.signatures import text_hash
from eagle3.prompts.overlap.words import compared_text
from eagle3.prompts.reading.prompt import Prompt
from eagle3.storage.files import read_jsonl


class KnownCheck:
    """Refuses a prompt that one of `folders`, each the `out_dir` of an earlier run, has kept."""

    name = "known"

    def __init__(self, folders: list[str]):
        self.folders = folders
        for path in self.files():
            if not path.is_file():
                raise InputError(
                    f"prompts.duplicates.known={self.folders}: {path} does not exist; name the out_dir of earlier runs"
                )
        self.hashes = [
            np.unique(
                np.fromiter((text_hash(compared_text(row["messages"])) for row in read_jsonl(path)), dtype=np.uint64)
            )
            for path in self.files()
        ]

    def files(self) -> list[Path]:
        """List the files read; if one changes, the prompts are made again."""
        return [Path(folder) / "prompts" / "prompts.jsonl" for folder in self.folders]

    def __call__(self, prompt: Prompt) -> Verdict:
        found = np.uint64(text_hash(compared_text(prompt.messages)))
        for folder, hashes in zip(self.folders, self.hashes, strict=True):
            place = np.searchsorted(hashes, found)
            if place < len(hashes) and hashes[place] == found:
                return Verdict(reason=f"known: {folder} has it")
        return Verdict()
