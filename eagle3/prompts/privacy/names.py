"""Names, places and street addresses, which no pattern finds: by a token classifier exported to ONNX.

Each process loads the model when it first uses it, because a `Privacy` is pickled to worker processes.
"""

import json
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, Unpack

import numpy as np

from eagle3.errors import InputError, require_packages
from eagle3.prompts.privacy.recogniser import Span
from eagle3.settings.prompts import NameModelSettings

REQUIRED = frozenset({"PERSON", "LOCATION"})  # the strict policy needs a model for these
ONLY_BY_MODEL = REQUIRED | {"ORGANIZATION", "STREET_ADDRESS"}  # no pattern finds them
IN_PROSE = "PASSWORD"  # patterns find only some of those in sentences

# Labels of common models → entities, without underscores.
LABELS = {
    **dict.fromkeys(("PERSON", "PER", "NAME", "GIVENNAME", "SURNAME", "FIRSTNAME", "LASTNAME"), "PERSON"),
    **dict.fromkeys(("LOCATION", "LOC", "GPE", "FAC", "CITY", "STATE", "STREET", "STREETNAME"), "LOCATION"),
    **dict.fromkeys(("ORGANIZATION", "ORGANISATION", "ORG", "COMPANY", "COMPANYNAME"), "ORGANIZATION"),
}
TOKENS, OVERLAP = 128, 32  # of a piece of text; an entity at an edge is complete in one of the two pieces
KEY = "prompts.privacy.model"


class NameModel:
    """A folder with config.json, tokenizer.json and the ONNX graph `file`, quantised or not.

    actions: by entity; only these are looked for. labels: the model's labels of entities that LABELS does not have. A
    token counts if the probability of its label is at least `threshold`; adjacent tokens of one entity are one
    finding. Raises InputError if the folder has no such model.
    """

    def __init__(self, **settings: Unpack[NameModelSettings]) -> None:
        require_packages("onnxruntime", "tokenizers", extra="onnx", needed_by="prompts/privacy/model=onnx")
        path, self.file, self.threshold = settings["path"], settings["file"], settings["threshold"]
        self.path, self.actions = Path(path), settings["actions"]
        for name in ("config.json", self.file, "tokenizer.json"):
            if not (self.path / name).is_file():
                raise InputError(
                    f"{KEY}.path={path} has no {name}; give the local folder of a token classification model, and its "
                    f"ONNX graph as {KEY}.file"
                )
        own = {_plain(label): entity for entity, labels in settings["labels"].items() for label in labels}
        id2label = json.loads((self.path / "config.json").read_text()).get("id2label", {})
        labels = {int(index): label for index, label in id2label.items()}
        # PERSON for B-PER, LOCATION for GPE, None for a label that is no entity.
        self.entities = {index: (LABELS | own).get(_plain(label)) for index, label in labels.items()}
        if unknown := sorted(set(self.actions) - set(self.entities.values())):
            raise InputError(
                f"{KEY}.path={path} does not know {', '.join(unknown)} (its labels: "
                f"{', '.join(sorted(labels.values()))[:200]}); name its labels in {KEY}.labels, or do not "
                f"look for them: ~{KEY}.actions.{unknown[0]}"
            )

    def find(self, text: str) -> Iterator[tuple[str, Span]]:
        """Yield entity and span of every finding; long texts are read in overlapping pieces."""
        _, tokenizer = self._loaded
        encoding = tokenizer.encode(text)
        for piece in (encoding, *encoding.overflowing):
            found: list[tuple[str, Span]] = []
            for entity, token in self._tokens(piece):
                last, span = found[-1] if found else (None, token)
                if last == entity and not text[span.end : token.start].strip(" "):
                    found[-1] = (entity, Span(span.start, token.end))
                else:
                    found.append((entity, token))
            yield from found

    def files(self) -> list[Path]:
        """List the files of the folder; if one changes, the prompts are made again."""
        return sorted(file for file in self.path.rglob("*") if file.is_file())

    @cached_property
    def _loaded(self) -> Any:
        """The graph and its tokenizer."""
        import onnxruntime
        from tokenizers import Tokenizer

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1  # there is one process per core
        graph = onnxruntime.InferenceSession(self.path / self.file, options, providers=["CPUExecutionProvider"])
        tokenizer = Tokenizer.from_file(str(self.path / "tokenizer.json"))
        tokenizer.no_padding()
        tokenizer.enable_truncation(TOKENS, stride=OVERLAP)
        return graph, tokenizer

    def _tokens(self, piece: Any) -> Iterator[tuple[str, Span]]:
        """Yield the tokens of a piece that belong to an entity in `actions`."""
        graph, _ = self._loaded
        inputs = {"input_ids": piece.ids, "attention_mask": piece.attention_mask, "token_type_ids": piece.type_ids}
        [logits] = graph.run(None, {each.name: np.array([inputs[each.name]]) for each in graph.get_inputs()})[0]
        exponentials = np.exp(logits - logits.max(-1, keepdims=True))  # (tokens, labels)
        probabilities = (exponentials / exponentials.sum(-1, keepdims=True)).max(-1)
        for (start, end), label, likely in zip(piece.offsets, logits.argmax(-1), probabilities, strict=True):
            entity = self.entities[int(label)]
            if entity is not None and entity in self.actions and end > start and likely >= self.threshold:
                yield entity, Span(start, end)


def _plain(label: str) -> str:
    name = label.upper()
    return (name[2:] if name[:2] in ("B-", "I-", "E-", "S-", "L-", "U-") else name).replace("_", "")
