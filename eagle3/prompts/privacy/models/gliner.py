"""GLiNER: a model that is asked for kinds in words, so that it may find street addresses and passwords in prose."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from eagle3.errors import InputError, require_packages
from eagle3.prompts.privacy.models.names import NameModel, described
from eagle3.prompts.privacy.recogniser import Action

DOOR = "prompts/privacy/model=gliner"
SPECIAL = 8  # tokens around labels and text
FILES = ("model.safetensors", "tokenizer.json", "tokenizer_config.json")


class GlinerModel(NameModel):
    """A GLiNER in a local folder, with safetensors; nothing is fetched, and code that it names is never run.

    `labels` gives each entity of `actions` the words that the model is asked with; `window` and `overlap` are words.
    """

    def __init__(
        self,
        *,
        path: str,
        threshold: float,
        window: int,
        overlap: int,
        actions: Mapping[str, Action],
        labels: Mapping[str, str],
    ):
        asked = {entity: labels[entity] for entity in actions if entity in labels}
        super().__init__(path=path, actions=actions, labels={entity: [words] for entity, words in asked.items()})
        require_packages("gliner", extra="gliner", needed_by=DOOR)
        self.threshold, self.window, self.overlap = threshold, window, overlap
        self.asked = list(asked.values())
        if unasked := sorted(set(actions) - set(labels)):
            raise InputError(
                f"prompts.privacy.model.actions.{unasked[0]} has no words to ask the model with; give them: "
                f"'+prompts.privacy.model.labels.{unasked[0]}=its name in plain words'"
            )
        self._check_folder(described(self.path, "gliner_config.json", "a GLiNER (save_pretrained)"))

    def _check_folder(self, config: dict) -> None:
        """Refuse what the library would fetch, unpickle, or run as code of the model's own."""
        missing = [name for name in FILES if not (self.path / name).is_file()]
        if missing or not config.get("encoder_config"):
            what = missing[0] if missing else "encoder_config in its gliner_config.json"
            raise InputError(f"prompts.privacy.model.path={self.path} holds no {what}; save the model with it")
        if "auto_map" in json.dumps(config) + (self.path / "tokenizer_config.json").read_text():
            raise InputError(
                f"prompts.privacy.model.path={self.path} names code of its own (auto_map), which is not run"
            )
        if self.window > (longest := int(config.get("max_len", self.window))):
            raise InputError(
                f"prompts.privacy.model.window={self.window} is more than the model reads: {longest} words"
            )

    def _load(self) -> Any:
        from gliner import GLiNER

        return GLiNER.from_pretrained(str(self.path), local_files_only=True).eval()

    def _labelled(self, text: str) -> Iterator[tuple[str, int, int]]:
        words = list(self._loaded.data_processor.words_splitter(text))
        for first, last in self._pieces([word for word, _, _ in words]):
            start, end = words[first][1], words[last - 1][2]
            found = self._loaded.predict_entities(text[start:end], self.asked, threshold=self.threshold)
            yield from ((each["label"], start + each["start"], start + each["end"]) for each in found)

    def _pieces(self, words: list[str]) -> Iterator[tuple[int, int]]:
        """Yield from and to which word is read at a time: the library cuts off more words or tokens than it takes."""
        tokenizer = self._loaded.data_processor.transformer_tokenizer
        asked = sum(len(tokenizer.tokenize(words)) + 1 for words in self.asked)  # a mark before each
        room = tokenizer.model_max_length - asked - SPECIAL
        tokens = (
            Counter(tokenizer(words, is_split_into_words=True, truncation=False, verbose=False).word_ids())
            if words
            else {}
        )
        first = 0
        while first < len(words):
            last, taken = first, 0
            while last < len(words) and last - first < self.window and taken + tokens[last] <= room:
                taken += tokens[last]
                last += 1
            last = max(last, first + 1)
            yield first, last
            first = last if last == len(words) else max(last - self.overlap, first + 1)
