"""Identity of a target, which features, heads and checkpoints record and compare."""

import hashlib
import re
from dataclasses import dataclass, fields, replace
from pathlib import Path

from eagle3.errors import InputError
from eagle3.settings.precomputing import TargetSettings
from eagle3.storage.records import Record

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True, kw_only=True)
class TargetIdentity(Record):
    """Name and revision tell where the model was found, the hashes which model it is.

    `precision` is what its weights are stored in: a quantisation, else a dtype. None: an earlier version recorded it,
    whose `weights_hash` is of other samples and is not compared."""

    name: str
    revision: str | None
    config_hash: str
    tokenizer_hash: str
    template_hash: str | None
    weights_hash: str
    precision: str | None = None

    @property
    def known_as(self) -> str:
        """The name, with the commit of a hub model."""
        return self.name if self.revision is None else f"{self.name} (target.revision={self.revision})"

    def with_template(self, template_hash: str | None) -> "TargetIdentity":
        """Return the identity with the chat template that is in use, which may come from a file."""
        return replace(self, template_hash=template_hash)


COMPARED = tuple(field.name for field in fields(TargetIdentity) if field.name.endswith("_hash"))


def is_hub_id(name: str) -> bool:
    """Say whether a target's name is that of a repository on the Hugging Face Hub, not of a folder here."""
    return HUB_ID.fullmatch(name) is not None and not Path(name).exists()


def public_name(name: str) -> str:
    """Return a target's name without the folder that it is in here, which is of this machine alone."""
    return name if is_hub_id(name) else Path(name).name


def recorded_settings(settings: TargetSettings, recorded: TargetIdentity) -> TargetSettings:
    """Return the `target` keys, with the recorded path and revision where no path is set."""
    if settings.path is not None:
        return settings
    return replace(settings, path=recorded.name, revision=recorded.revision)


def template_hash(template: str | None) -> str | None:
    return None if template is None else hashlib.sha256(template.encode()).hexdigest()


def differences(one: TargetIdentity, other: TargetIdentity, parts: tuple[str, ...] = COMPARED) -> list[str]:
    """Return in words which of the parts differ."""
    earlier = None in (one.precision, other.precision)
    compared = [part for part in parts if not (earlier and part == "weights_hash")]
    return [part.removesuffix("_hash") for part in compared if getattr(one, part) != getattr(other, part)]


def other_precision(trained: TargetIdentity, served: TargetIdentity) -> str | None:
    """Say how the served target differs where it may be the trained one in another precision, else None. The files do
    not tell whether both are one model."""
    same = trained.precision in (None, served.precision)
    if same or trained.tokenizer_hash != served.tokenizer_hash:
        return None
    differing = " and ".join(differences(trained, served, ("config_hash", "weights_hash")))
    if not differing:
        return None
    return (
        f"the head was trained on {trained.name} in {trained.precision}, this target is {served.name} in "
        f"{served.precision} ({differing} differ): if it is the same model, measure how well the head drafts for it; "
        f"if it is another fine-tune, give the target of the training"
    )


def require_same_target(
    expected: TargetIdentity, actual: TargetIdentity, *, expected_from: str, actual_from: str
) -> None:
    """Raise InputError unless both are one model; folders may differ, what they hold may not."""
    if differing := differences(expected, actual):
        raise InputError(
            f"{expected_from} was made with target {expected.known_as}, {actual_from} is {actual.known_as}: "
            f"they differ in {', '.join(differing)}; use the same target, tokenizer and chat template, or make "
            f"{expected_from} again with this one"
        )
