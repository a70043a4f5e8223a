"""Token classifiers in a local folder: of Hugging Face, or exported to ONNX, which runs without PyTorch."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from eagle3.errors import InputError, require_packages
from eagle3.prompts.privacy.models.names import NameModel, described
from eagle3.prompts.privacy.recogniser import Action

TOKENS, OVERLAP = 128, 32  # read at a time by an ONNX model; what is on an edge is whole in one of the two


class HuggingFaceModel(NameModel):
    """A Hugging Face token classifier: config, tokenizer and safetensors weights; code in the folder is never run.

    Texts longer than the model's context are read in pieces that overlap by `stride` tokens.
    """

    def __init__(self, *, path: str, stride: int, actions: Mapping[str, Action], labels: Mapping[str, Sequence[str]]):
        super().__init__(path=path, actions=actions, labels=labels)
        self.stride = stride
        config = described(self.path, "config.json", "a token classification model (save_pretrained)")
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


class OnnxModel(NameModel):
    """A token classifier exported to ONNX: config.json, tokenizer.json and the graph `file`, quantised or not.

    Tokens count whose label is at least `threshold` likely; neighbours of one entity are one finding.
    """

    def __init__(
        self,
        *,
        path: str,
        file: str,
        threshold: float,
        actions: Mapping[str, Action],
        labels: Mapping[str, Sequence[str]],
    ):
        super().__init__(path=path, actions=actions, labels=labels)
        require_packages("onnxruntime", "tokenizers", extra="onnx", needed_by="prompts/privacy/model=onnx")
        self.file, self.threshold = file, threshold
        config = described(self.path, "config.json", "a token classification model with an ONNX graph")
        self.id2label = {int(index): label for index, label in config.get("id2label", {}).items()}
        self._check_labels(self.id2label.values(), path)
        for name in (file, "tokenizer.json"):
            if not (self.path / name).is_file():
                raise InputError(
                    f"prompts.privacy.model.path={path} holds no {name}; give the folder of the model, and its graph "
                    f"as prompts.privacy.model.file"
                )

    def _load(self) -> Any:
        import onnxruntime
        from tokenizers import Tokenizer

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1  # there is a process for each core
        graph = onnxruntime.InferenceSession(self.path / self.file, options, providers=["CPUExecutionProvider"])
        tokenizer = Tokenizer.from_file(str(self.path / "tokenizer.json"))
        tokenizer.no_padding()
        tokenizer.enable_truncation(TOKENS, stride=OVERLAP)
        return graph, tokenizer

    def _labelled(self, text: str) -> Iterator[tuple[str, int, int]]:
        _, tokenizer = self._loaded
        encoding = tokenizer.encode(text)
        for piece in (encoding, *encoding.overflowing):
            found: _Finding | None = None
            for token in self._tokens(piece):
                if found and self._continues(found, token, text):
                    found = found._replace(end=token.end)
                    continue
                if found:
                    yield found
                found = token
            if found:
                yield found

    def _continues(self, found: "_Finding", token: "_Finding", text: str) -> bool:
        """Tell whether a token goes on with what was found before: the same entity, and nothing but blanks between."""
        same = self.entity_of(found.label) == self.entity_of(token.label)
        return same and not text[found.end : token.start].strip(" ")

    def _tokens(self, encoding: Any) -> Iterator["_Finding"]:
        """Yield label and place of the tokens of a piece that are part of an entity."""
        import numpy as np

        graph, _ = self._loaded
        inputs = {
            "input_ids": encoding.ids,
            "attention_mask": encoding.attention_mask,
            "token_type_ids": encoding.type_ids,
        }
        wanted = {each.name: np.array([inputs[each.name]]) for each in graph.get_inputs()}
        [logits] = graph.run(None, wanted)[0]  # (tokens, labels)
        exponentials = np.exp(logits - logits.max(-1, keepdims=True))
        probabilities = exponentials / exponentials.sum(-1, keepdims=True)
        for (start, end), index, sure in zip(encoding.offsets, logits.argmax(-1), probabilities.max(-1), strict=True):
            label = self.id2label[int(index)]
            if end > start and sure >= self.threshold and self.entity_of(label):
                yield _Finding(label, start, end)


class _Finding(NamedTuple):
    label: str
    start: int
    end: int
