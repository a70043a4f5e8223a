"""The options of a multiple-choice question, from columns of their own → lines of the prompt."""

import re
from collections.abc import Sequence
from string import ascii_uppercase
from typing import Any, NamedTuple

from eagle3.prompts.reading.prompt import Refused
from eagle3.prompts.reading.shapes import Columns, is_empty, json_in

SUFFIX = re.compile(r"[ _]?(?:\d|[a-f])$", re.IGNORECASE)  # of a column that holds one of several options
OF_PYTHON = re.compile(r"\s*[\[{]\s*['\"]")  # a list or an object of texts, if it is no JSON
LABELLED = re.compile(r"\s*\(?(?:[A-Za-z]|\d{1,2})\s*[).:]")
OF_A_RESPONSE = ("message", "delta", "finish_reason", "logprobs")  # keys of a completion's `choices`
DISTRACTORS = ("distractor", "incorrect_answer")  # the latter GPQA's
LONGEST_LABEL = 2  # characters: A, 1, 12


class Options(NamedTuple):
    columns: tuple[str, ...]  # that they are from
    texts: list[str]
    lines: list[str]  # the texts with their labels

    def are_in(self, question: str) -> bool:
        """Tell whether a question lists them: each after a label, or at the start of a line."""
        return all(
            re.search(rf"(?:^|[\w][).:]|[-*•])\s*{re.escape(text)}", question, re.MULTILINE) for text in self.texts
        )


def read_options(columns: Columns) -> Options | None:
    """Return the options of a row; None if it has none. Raises Refused for what is none of the usual forms."""
    found = columns.found.get("choices", ())
    if not found:
        return None
    name, value = found[0]
    text, value = value, json_in(value)
    if value is None:  # not JSON
        if OF_PYTHON.match(text):
            raise Refused(f"row with {name} as Python writes them, not JSON")
        value = text
    if isinstance(value, dict | list):
        return _of_value(name, value)
    stem = SUFFIX.sub("", name)
    if stem == name:  # one text with all of them
        return Options((name,), [str(value)], [str(value).strip()])
    alike = [(other, str(each)) for other, each in found if SUFFIX.sub("", other) == stem and not _has_parts(each)]
    texts = [text for _, text in alike]
    if stem in DISTRACTORS:
        correct = columns.first("answer")
        if not isinstance(correct, str):
            raise Refused(f"row with {name} and no correct answer")
        texts = sorted({*texts, correct}, key=str.casefold)  # its place must not give the correct one away
    return Options(tuple(name for name, _ in alike), texts, _labelled(texts)) if len(texts) > 1 else None


def _of_value(name: str, value: dict | list) -> Options | None:
    labels: Sequence[Any] | None = None
    if isinstance(value, dict):  # {"text": […], "label": […]} or {"A": …, "B": …}
        texts, labels = value.get("text"), value.get("label")
        if not isinstance(texts, list):
            value = {label: text for label, text in value.items() if not is_empty(text)}  # filled in by tables
            texts, labels = list(value.values()), list(value)
            if any(len(label) > LONGEST_LABEL and not isinstance(text, str) for label, text in value.items()):
                return None  # settings of a request, as Ollama's {"num_ctx": 4096}
    elif all(isinstance(each, dict) for each in value):
        if any(key in each for each in value for key in OF_A_RESPONSE):
            return None
        texts, labels = [each.get("text") for each in value], [each.get("label") for each in value]
    else:
        texts = value
    if any(_has_parts(text) for text in texts):
        raise Refused(f"row with {name} that are no texts")
    texts = [str(text) for text in texts]
    if labels is not None and len(labels) == len(texts) and all(isinstance(label, str) for label in labels):
        return Options((name,), texts, [f"{label}. {text}" for label, text in zip(labels, texts, strict=True)])
    return Options((name,), texts, _labelled(texts))


def _has_parts(value: Any) -> bool:
    return not isinstance(value, str | int | float) or value != value  # NaN


def _labelled(texts: list[str]) -> list[str]:
    if all(map(LABELLED.match, texts)):
        return texts
    labels = ascii_uppercase if len(texts) <= len(ascii_uppercase) else range(1, len(texts) + 1)
    return [f"{label}. {text}" for label, text in zip(labels, texts, strict=False)]
