"""Prompts that a classifier finds toxic: a sequence classifier of Hugging Face, from a local folder. Off by default."""

import json
from pathlib import Path
from typing import Any

from eagle3.errors import InputError
from eagle3.prompts.checks import Verdict
from eagle3.prompts.filters import user_turns
from eagle3.prompts.reading.prompt import Prompt

KEY = "prompts.toxicity"


class ToxicityCheck:
    """Refuses a prompt when `label` reaches `threshold` in a piece of the user turns.

    path: the folder (config, tokenizer, safetensors; code in it never runs). Pieces are as long as the model reads and
    overlap by `stride` tokens; they are scored one by one, so that no score depends on the texts beside it.
    """

    name = "toxicity"

    def __init__(self, *, path: str, label: str, threshold: float, stride: int):
        self.path = Path(path).expanduser()
        self.label = label
        self.threshold = threshold
        self.stride = stride
        self.label_id = self._label_id()
        self._loaded: Any = None

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_loaded": None}

    def __call__(self, prompt: Prompt) -> Verdict:
        text = "\n".join(user_turns(prompt))
        toxic = bool(text.strip()) and self.score(text) >= self.threshold
        return Verdict(reason=f"toxicity: {self.label}" if toxic else None)

    def score(self, text: str) -> float:
        """Return the probability of the label, the highest of all pieces."""
        import torch

        if self._loaded is None:
            self._loaded = self._load()
        model, tokenizer = self._loaded
        pieces = tokenizer(text, truncation=True, stride=self.stride, return_overflowing_tokens=True)["input_ids"]
        with torch.inference_mode():
            logits = torch.cat(
                [model(input_ids=torch.tensor([ids])).logits for ids in pieces]
            ).float()  # [pieces, labels]
        several = model.config.problem_type == "multi_label_classification" or logits.shape[1] == 1
        probabilities = logits.sigmoid() if several else logits.softmax(dim=1)
        return float(probabilities[:, self.label_id].max())

    def files(self) -> list[Path]:
        """List what the folder holds: prompts are made again when one of them changes."""
        return sorted(file for file in self.path.rglob("*") if file.is_file())

    def _label_id(self) -> int:
        try:
            labels = json.loads((self.path / "config.json").read_text())["id2label"]
            ids = {str(name): int(number) for number, name in labels.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(
                f"{KEY}.path={self.path} holds no config.json with labels ({type(error).__name__}); give the local "
                f"folder of a sequence classification model (save_pretrained)"
            ) from None
        if self.label not in ids:
            raise InputError(
                f"{KEY}.label={self.label} is no label of {self.path}; it has {', '.join(sorted(ids))[:200]}: name one"
            )
        return ids[self.label]

    def _load(self) -> Any:
        from transformers import AutoModelForSequenceClassification, AutoTokenizer, logging

        logging.disable_progress_bar()  # one for each worker process would be drawn
        model = AutoModelForSequenceClassification.from_pretrained(
            self.path, use_safetensors=True, local_files_only=True, trust_remote_code=False
        ).eval()
        tokenizer = AutoTokenizer.from_pretrained(self.path, local_files_only=True, trust_remote_code=False)
        context = getattr(model.config, "max_position_embeddings", tokenizer.model_max_length)
        tokenizer.model_max_length = min(tokenizer.model_max_length, context)
        return model, tokenizer
