"""Models behind libraries of their own: spaCy's pipelines, and Microsoft's presidio, which calls one of them."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from eagle3.errors import InputError, require_packages
from eagle3.prompts.privacy.models.names import NameModel, described, files_in
from eagle3.prompts.privacy.recogniser import Action

# Parts of a pipeline that name no entities; most of its time is theirs.
GRAMMAR = {"tagger", "parser", "senter", "attribute_ruler", "morphologizer", "lemmatizer", "trainable_lemmatizer"}
RULERS = {"entity_ruler", "span_ruler"}  # their patterns may ask for grammar


class SpacyModel(NameModel):
    """A spaCy pipeline with named entities, as saved by `nlp.to_disk` (or unpacked from a model package)."""

    def __init__(self, *, path: str, actions: Mapping[str, Action]):
        super().__init__(path=path, actions=actions)
        require_packages("spacy", extra="spacy", needed_by="prompts/privacy/model=spacy")
        meta = described(self.path, "meta.json", "a spaCy pipeline (nlp.to_disk)")
        self._check_labels([label for labels in meta.get("labels", {}).values() for label in labels], path)

    def _load(self) -> Any:
        import spacy

        pipeline = spacy.load(self.path)
        if not RULERS & set(pipeline.pipe_factories.values()):
            _without_grammar(pipeline)
        return pipeline

    def _labelled(self, text: str) -> Iterable[tuple[str, int, int]]:
        return [(entity.label_, entity.start_char, entity.end_char) for entity in self._loaded(text).ents]


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
        return [self.path, *(file for text in texts if Path(text).is_dir() for file in files_in(Path(text)))]

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


def _texts_in(value: Any) -> Iterator[str]:
    """Yield every text among the values of a configuration."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _texts_in(part)


def _without_grammar(pipeline: Any) -> None:
    """Take out what names no entities, and the shared layers that then serve nothing."""
    for name, factory in list(pipeline.pipe_factories.items()):
        if factory in GRAMMAR:
            pipeline.remove_pipe(name)
    for name in ("tok2vec", "transformer"):
        if name in pipeline.pipe_names and not pipeline.get_pipe(name).listening_components:
            pipeline.remove_pipe(name)
