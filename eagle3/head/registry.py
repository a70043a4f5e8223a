"""The kinds of heads by name. A kind of your own subclasses `Eagle3` (docs/how-to/own-head-kind.md)."""

from eagle3.errors import InputError
from eagle3.head.eagle3 import EAGLE3, Eagle3

_KINDS: dict[str, Eagle3] = {EAGLE3.name: EAGLE3}


def register(kind: Eagle3) -> None:
    """Make a kind known under its name, which its configs have in KIND."""
    _KINDS[kind.name] = kind


def kind_named(name: str) -> Eagle3:
    if name not in _KINDS:
        raise InputError(
            f"a head of kind {name} is none of {', '.join(sorted(_KINDS))}; import the module that registers it"
        )
    return _KINDS[name]


def kind_of_architecture(architectures: list[str] | None) -> Eagle3 | None:
    return next((kind for kind in _KINDS.values() if [kind.architecture] == architectures), None)
