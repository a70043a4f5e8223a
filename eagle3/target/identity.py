"""Identity of a target, which features, heads and checkpoints record and compare."""

import hashlib
import re
from dataclasses import dataclass, fields, replace
from pathlib import Path

from eagle3.errors import InputError
from eagle3.storage.records import Record

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True, kw_only=True)
class TargetIdentity(Record):
    """Name and revision tell where the model was found, the hashes which model it is."""

    name: str
    revision: str | None
    config_hash: str
    tokenizer_hash: str
    template_hash: str | None
    weights_hash: str

    def with_template(self, template_hash: str | None) -> "TargetIdentity":
        """Return the identity with the chat template that is in use, which may come from a file."""
        return replace(self, template_hash=template_hash)


COMPARED = tuple(field.name for field in fields(TargetIdentity) if field.name.endswith("_hash"))


def is_hub_id(name: str) -> bool:
    """Say whether a target's name is that of a repository on the Hugging Face Hub, not of a folder here."""
    return HUB_ID.fullmatch(name) is not None and not Path(name).exists()


def template_hash(template: str | None) -> str | None:
    return None if template is None else hashlib.sha256(template.encode()).hexdigest()


def require_same_target(
    expected: TargetIdentity, actual: TargetIdentity, *, expected_from: str, actual_from: str
) -> None:
    """Raise InputError unless both are one model; folders may differ, what they hold may not."""
    differing = [part.removesuffix("_hash") for part in COMPARED if getattr(expected, part) != getattr(actual, part)]
    if differing:
        raise InputError(
            f"{expected_from} was made with target {expected.name}, {actual_from} is {actual.name}: "
            f"they differ in {', '.join(differing)}; use the same target, tokenizer and chat template, or make "
            f"{expected_from} again with this one"
        )
