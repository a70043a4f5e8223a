"""Prompts with answers are not replaced by other prompts."""

from pathlib import Path

from eagle3.errors import InputError
from eagle3.storage.files import read_json, sha256_file


def require_not_answered(folder: Path, prompts: Path) -> None:
    """Raise InputError if the answers next to `folder` are to other prompts than those in the new file `prompts`."""
    manifest = folder.parent / "answers" / "manifest.json"
    if not manifest.exists():
        return
    answered = read_json(manifest, made_by="precompute.py 'stages=[answers]'")
    if answered["prompts_sha256"] != sha256_file(prompts):
        raise InputError(
            f"the answers in {manifest.parent} are to other prompts than these would be, so {folder} stays as it is; "
            f"take another out_dir, continue with the prompts that are there ('stages=[answers,features]'), or delete "
            f"{manifest.parent} to generate answers again: those in it are lost"
        )
