"""Names, places, organisations and what else no pattern can tell: found by a model from a local folder.

The libraries are imported where they are used, and models are loaded in the process that reads with them: a `Privacy`
is pickled to worker processes.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from eagle3.errors import InputError
from eagle3.prompts.privacy.recogniser import Action, Span

MODEL_ENTITIES = frozenset({"PERSON", "LOCATION", "ORGANIZATION"})  # what the strict policy asks of a model
ONLY_BY_MODEL = MODEL_ENTITIES | {"STREET_ADDRESS"}  # what no pattern here sees
IN_PROSE = "PASSWORD"  # patterns see only some of those that a sentence tells

# What the usual models call them, without underscores.
LABELS = {
    **dict.fromkeys(("PERSON", "PER", "NAME", "GIVENNAME", "SURNAME", "FIRSTNAME", "LASTNAME"), "PERSON"),
    **dict.fromkeys(("LOCATION", "LOC", "GPE", "FAC", "CITY", "STATE", "STREET", "STREETNAME"), "LOCATION"),
    **dict.fromkeys(("ORGANIZATION", "ORGANISATION", "ORG", "COMPANY", "COMPANYNAME"), "ORGANIZATION"),
}
WINDOW, OVERLAP = 20_000, 500  # characters that are read at a time; what is on an edge is whole in one of the two


class NameModel(ABC):
    """Finds PERSON, LOCATION, ORGANIZATION, and entities whose own `labels` are given.

    `actions` gives each its action; a model must know all that it names.
    """

    def __init__(self, *, path: str, actions: Mapping[str, Action], labels: Mapping[str, Sequence[str]] | None = None):
        self.path = Path(path).expanduser()
        self.actions = dict(actions)
        self.entities = {_plain(label): entity for entity, each in (labels or {}).items() for label in each}
        self._loaded: Any = None

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_loaded": None}

    def find(self, text: str) -> Iterator[tuple[str, Span]]:
        """Yield entity and place of all that is found; a text of any length is read whole, in windows."""
        if self._loaded is None:
            self._loaded = self._load()
        for offset, window in windows(text):
            for label, start, end in self._labelled(window):
                entity = self.entity_of(label)
                if entity in self.actions:
                    yield entity, Span(offset + start, offset + end)

    def files(self) -> list[Path]:
        """List all that `path` holds: prompts are made again when one of them changes."""
        return files_in(self.path)

    def entity_of(self, label: str) -> str | None:
        """Return PERSON for B-PER, LOCATION for GPE, and None for what is none of the entities."""
        name = _plain(label)
        return self.entities.get(name, LABELS.get(name))

    @abstractmethod
    def _load(self) -> Any:
        """Return the model, kept as self._loaded."""

    @abstractmethod
    def _labelled(self, text: str) -> Iterable[tuple[str, int, int]]:
        """Yield the model's own label, start and end of each entity."""

    def _check_labels(self, labels: Iterable[str], folder: object) -> None:
        labels = sorted(set(labels))
        unknown = sorted(set(self.actions) - {self.entity_of(label) for label in labels})
        if unknown:
            raise InputError(
                f"prompts.privacy.model.path={folder} knows no {', '.join(unknown)} (its labels: "
                f"{', '.join(labels)[:200]}); take another model, or with "
                f"prompts/privacy=patterns one action less: ~prompts.privacy.model.actions.{unknown[0]}"
            )


def windows(text: str) -> Iterator[tuple[int, str]]:
    """Yield pieces of a text with their places, cut at blanks where there are any: half a word may read like a name."""
    start = 0
    while True:
        end = len(text) if start + WINDOW >= len(text) else _after_blank(text, start + WINDOW)
        yield start, text[start:end]
        if end == len(text):
            return
        start = _after_blank(text, end - OVERLAP)


def _after_blank(text: str, position: int) -> int:
    blank = text.rfind(" ", position - OVERLAP, position)
    return position if blank < 0 else blank + 1


def _plain(label: str) -> str:
    name = label.upper()
    return (name[2:] if name[:2] in ("B-", "I-", "E-", "S-", "L-", "U-") else name).replace("_", "")


def files_in(path: Path) -> list[Path]:
    return sorted(file for file in path.rglob("*") if file.is_file())


def described(folder: Path, name: str, what: str) -> dict:
    try:
        return json.loads((folder / name).read_text())
    except (OSError, ValueError) as error:
        raise InputError(
            f"prompts.privacy.model.path={folder} holds no readable {name} ({type(error).__name__}); give the "
            f"local folder of {what}"
        ) from None
