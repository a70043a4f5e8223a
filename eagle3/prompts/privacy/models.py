"""Names, places and organisations, which no pattern can tell: found by a model from a local folder, or by presidio.

The libraries are imported where they are used, and models are loaded in the process that reads with them: a `Privacy`
is pickled to worker processes.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from eagle3.errors import InputError, require_packages
from eagle3.prompts.privacy.recogniser import Action, Span

MODEL_ENTITIES = frozenset({"PERSON", "LOCATION", "ORGANIZATION"})

# What the usual models call them.
LABELS = {
    **dict.fromkeys(("PERSON", "PER", "NAME", "GIVENNAME", "SURNAME", "FIRSTNAME", "LASTNAME"), "PERSON"),
    **dict.fromkeys(("LOCATION", "LOC", "GPE", "FAC", "CITY", "STREET"), "LOCATION"),
    **dict.fromkeys(("ORGANIZATION", "ORGANISATION", "ORG", "COMPANY", "COMPANYNAME"), "ORGANIZATION"),
}
WINDOW, OVERLAP = 20_000, 500  # characters that are read at a time; what is on an edge is whole in one of the two


class NameModel(ABC):
    """Finds PERSON, LOCATION and ORGANIZATION. `actions` gives each its action; a model must know all that it names."""

    def __init__(self, *, path: str, actions: Mapping[str, Action]):
        self.path = Path(path).expanduser()
        self.actions = dict(actions)
        self._loaded: Any = None

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_loaded": None}

    def find(self, text: str) -> Iterator[tuple[str, Span]]:
        """Yield entity and place of all that is found; a text of any length is read whole, in windows."""
        if self._loaded is None:
            self._loaded = self._load()
        for offset, window in windows(text):
            for label, start, end in self._labelled(window):
                entity = entity_of(label)
                if entity in self.actions:
                    yield entity, Span(offset + start, offset + end)

    def files(self) -> list[Path]:
        """List all that `path` holds: prompts are made again when one of them changes."""
        return _files_in(self.path)

    @abstractmethod
    def _load(self) -> Any:
        """Return the model, kept as self._loaded."""

    @abstractmethod
    def _labelled(self, text: str) -> Iterable[tuple[str, int, int]]:
        """Yield the model's own label, start and end of each entity."""

    def _check_labels(self, labels: Iterable[str], folder: object) -> None:
        labels = sorted(set(labels))
        unknown = sorted(set(self.actions) - {entity_of(label) for label in labels})
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


def entity_of(label: str) -> str | None:
    """Return PERSON for B-PER, LOCATION for GPE, and None for what is none of the three."""
    name = label.upper()
    return LABELS.get(name[2:] if name[:2] in ("B-", "I-", "E-", "S-", "L-", "U-") else name)


class SpacyModel(NameModel):
    """A spaCy pipeline with named entities, as saved by `nlp.to_disk` (or unpacked from a model package)."""

    def __init__(self, *, path: str, actions: Mapping[str, Action]):
        super().__init__(path=path, actions=actions)
        require_packages("spacy", extra="spacy", needed_by="prompts/privacy/model=spacy")
        meta = _described(self.path, "meta.json", "a spaCy pipeline (nlp.to_disk)")
        self._check_labels([label for labels in meta.get("labels", {}).values() for label in labels], path)

    def _load(self) -> Any:
        import spacy

        return spacy.load(self.path)

    def _labelled(self, text: str) -> Iterable[tuple[str, int, int]]:
        return [(entity.label_, entity.start_char, entity.end_char) for entity in self._loaded(text).ents]


class HuggingFaceModel(NameModel):
    """A Hugging Face token classifier: config, tokenizer and safetensors weights; code in the folder is never run.

    Texts longer than the model's context are read in pieces that overlap by `stride` tokens.
    """

    def __init__(self, *, path: str, stride: int, actions: Mapping[str, Action]):
        super().__init__(path=path, actions=actions)
        self.stride = stride
        config = _described(self.path, "config.json", "a token classification model (save_pretrained)")
        self._check_labels(config.get("id2label", {}).values(), path)

    def _load(self) -> Any:
        from transformers import AutoModelForTokenClassification, AutoTokenizer, TokenClassificationPipeline, logging

        logging.disable_progress_bar()  # one for each worker process would be drawn
        model = AutoModelForTokenClassification.from_pretrained(
            self.path, use_safetensors=True, local_files_only=True, trust_remote_code=False
        )
        tokenizer = AutoTokenizer.from_pretrained(self.path, local_files_only=True, trust_remote_code=False)
        context = getattr(model.config, "max_position_embeddings", tokenizer.model_max_length)
        tokenizer.model_max_length = min(tokenizer.model_max_length, context)
        return TokenClassificationPipeline(
            model=model, tokenizer=tokenizer, aggregation_strategy="simple", stride=self.stride
        )

    def _labelled(self, text: str) -> Iterable[tuple[str, int, int]]:
        found = self._loaded(text) if text.strip() else []
        return [(entity["entity_group"], entity["start"], entity["end"]) for entity in found]


class PresidioModel(NameModel):
    """Microsoft presidio's analyzer; `path` is a configuration file of its NlpEngineProvider, which names the model."""

    def __init__(self, *, path: str, language: str, score_threshold: float, actions: Mapping[str, Action]):
        super().__init__(path=path, actions=actions)
        require_packages("presidio_analyzer", extra="presidio", needed_by="prompts/privacy/model=presidio")
        self.language, self.score_threshold = language, score_threshold
        if not self.path.is_file():
            raise InputError(f"prompts.privacy.model.path={path} is no file; give a presidio NLP engine configuration")

    def files(self) -> list[Path]:
        """Return the configuration, and the folders that it names."""
        import yaml

        texts = _texts_in(yaml.safe_load(self.path.read_text()))
        return [self.path, *(file for text in texts if Path(text).is_dir() for file in _files_in(Path(text)))]

    def _load(self) -> Any:
        from presidio_analyzer import AnalyzerEngine
        from presidio_analyzer.nlp_engine import NlpEngineProvider

        engine = NlpEngineProvider(conf_file=self.path).create_engine()
        return AnalyzerEngine(nlp_engine=engine, supported_languages=[self.language])

    def _labelled(self, text: str) -> Iterable[tuple[str, int, int]]:
        found = self._loaded.analyze(
            text, language=self.language, entities=sorted(self.actions), score_threshold=self.score_threshold
        )
        return [(result.entity_type, result.start, result.end) for result in found]


def _files_in(path: Path) -> list[Path]:
    return sorted(file for file in path.rglob("*") if file.is_file())


def _texts_in(value: Any) -> Iterator[str]:
    """Yield every text among the values of a configuration."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _texts_in(part)


def _described(folder: Path, name: str, what: str) -> dict:
    try:
        return json.loads((folder / name).read_text())
    except (OSError, ValueError) as error:
        raise InputError(
            f"prompts.privacy.model.path={folder} holds no readable {name} ({type(error).__name__}); give the "
            f"local folder of {what}"
        ) from None
