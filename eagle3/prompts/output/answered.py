"""Prompts with answers are not replaced by other prompts; the error names the settings that differ."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from eagle3.errors import MAKE_PROMPTS, InputError
from eagle3.storage.files import read_json, sha256_file
from eagle3.storage.records import read_sealed_json

NAMED_DIFFERENCES, LONGEST_VALUE = 5, 120  # in an error
NAMES = {  # of inputs that have no config key of their own
    "prompts.format": "version of the rules",
    "prompts.keep_answers": "answers is imported",
    "prompts.rules": "prompts",
    "prompts.files": "a file of leaks, privacy or traffic",
}


def require_not_answered(folder: Path, prompts: Path, inputs: dict) -> None:
    """Raise InputError if the answers next to `folder` are to other prompts than those in the new file `prompts`."""
    answers = folder.parent / "answers"
    if not (answers / "manifest.json").exists():
        return
    answered = read_json(answers / "manifest.json", made_by="precompute.py 'stages=[answers]'")
    if answered["prompts_sha256"] != sha256_file(prompts):
        changes = _changes_since(folder / "ledger.json", answered["prompts_sha256"], inputs)
        raise InputError(
            f"the answers in {answers} are to other prompts than these would be ({changes}), so {folder} stays as it "
            f"is; take another out_dir, continue with the prompts that are there ('stages=[answers,features]'), or "
            f"delete {answers} to generate answers again: those in it are lost"
        )


def _changes_since(ledger_path: Path, sha256: str, inputs: dict) -> str:
    """Return what differs from the inputs of the answered prompts, if the ledger still describes them."""
    ledger = read_sealed_json(ledger_path, made_by=MAKE_PROMPTS) if ledger_path.exists() else None
    old, new = (dict(_leaves(each)) for each in ((ledger or {}).get("inputs", {}), inputs))
    if ledger is None or ledger["sha256"] != sha256:
        return "what differs is not known"
    changes = [_difference(key, old.get(key), new.get(key)) for key in {**old, **new} if old.get(key) != new.get(key)]
    more = ["…"] if len(changes) > NAMED_DIFFERENCES else []
    return ", ".join([*changes[:NAMED_DIFFERENCES], *more]) or "what differs is not known"


def _difference(key: str, before: Any, now: Any) -> str:
    texts = [json.dumps(value, ensure_ascii=False) for value in (before, now)]
    return f"{key} changed" if max(map(len, texts)) > LONGEST_VALUE else f"{key}: {texts[0]} then, {texts[1]} now"


def _leaves(value: Any, key: str = "prompts") -> Iterator[tuple[str, Any]]:
    """Yield the inputs by config key."""
    if key == "prompts.sources":
        value = {f"[{number}]": source for number, source in enumerate(value)}
    if isinstance(value, dict):
        for name, part in value.items():
            inside = f"{key}.{name}".replace(".[", "[")
            yield from _leaves(part, NAMES.get(inside, inside))
    else:
        yield key, value
