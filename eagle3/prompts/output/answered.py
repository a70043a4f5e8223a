"""Prompts that are answered are not replaced by others, whose answers they are not; the error says what differs."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from eagle3.errors import MAKE_PROMPTS, InputError
from eagle3.storage.files import read_json, sha256_file
from eagle3.storage.records import read_sealed_json

NAMED_DIFFERENCES, LONGEST_VALUE = 5, 120  # in an error


def require_not_answered(folder: Path, prompts: Path, inputs: dict) -> None:
    """Refuse the new file `prompts` for `folder` when the responses beside `folder` answer others."""
    responses = folder.parent / "responses"
    if not (responses / "manifest.json").exists():
        return
    answered = read_json(responses / "manifest.json", made_by="precompute.py 'stages=[responses]'")
    if answered["prompts_sha256"] != sha256_file(prompts):
        changes = _changes_since(folder / "ledger.json", answered["prompts_sha256"], inputs)
        raise InputError(
            f"{responses} answers other prompts than these would be ({changes}), so {folder} stays as it is; take "
            f"another out_dir, go on with the prompts that are there ('stages=[responses,features]'), or delete "
            f"{responses} to answer again: its answers are lost"
        )


def _changes_since(ledger_path: Path, sha256: str, inputs: dict) -> str:
    """Return what differs from the inputs of the prompts that are answered, if the ledger is still theirs."""
    ledger = read_sealed_json(ledger_path, made_by=MAKE_PROMPTS) if ledger_path.exists() else None
    changes = _differences(ledger["inputs"], inputs) if ledger and ledger["sha256"] == sha256 else []
    more = ["…"] if len(changes) > NAMED_DIFFERENCES else []
    return ", ".join([*changes[:NAMED_DIFFERENCES], *more]) or "what differs is not known"


def _differences(before: dict, now: dict) -> list[str]:
    old, new = dict(_settings(before)), dict(_settings(now))
    return [_difference(key, old.get(key), new.get(key)) for key in {**old, **new} if old.get(key) != new.get(key)]


def _difference(key: str, before: Any, now: Any) -> str:
    texts = [json.dumps(value, ensure_ascii=False) for value in (before, now)]
    return f"{key} changed" if max(map(len, texts)) > LONGEST_VALUE else f"{key}: {texts[0]} then, {texts[1]} now"


def _settings(inputs: dict) -> Iterator[tuple[str, Any]]:
    """Yield what prompts were made from by config key, as far as there is one."""
    yield "version of the rules", inputs["format"]
    yield "answers is imported", inputs["keep_answers"]
    yield "prompts.limit", inputs["limit"]
    for number, source in enumerate(inputs["sources"]):
        for key in ("path", "name", "license", "limit", "id_prefix", "files"):
            yield f"prompts.sources[{number}].{key}", source[key]
    for group, settings in inputs["rules"].items():
        yield from _leaves("a file of leaks, privacy or traffic" if group == "files" else f"prompts.{group}", settings)


def _leaves(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for name, part in value.items():
            yield from _leaves(f"{key}.{name}", part)
    else:
        yield key, value
