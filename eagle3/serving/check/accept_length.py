"""Accept length of a head by our own decoder, and whether it is what the training promised."""

import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from eagle3.answers.chat import Chat
from eagle3.decoding.jackknife import standard_error
from eagle3.decoding.speculate import Measurement, measure
from eagle3.errors import InputError
from eagle3.prompts import Source
from eagle3.serving.check.finding import Finding
from eagle3.serving.check.prompts import PromptSet, file_prompts, question_prompts, validation_prompts
from eagle3.serving.check.settings import Decoding
from eagle3.serving.head.format import load_head
from eagle3.storage import sha256_json
from eagle3.target.model import Target

CHECK = "accept_length"


SAME_MEASUREMENT = ("prompts_hash", *(field.name for field in fields(Decoding)))


@dataclass(frozen=True, kw_only=True)
class Judge:
    """Measures heads against one target, on the prompts of `source` if there is one."""

    target: Target
    chat: Chat
    decoding: Decoding
    source: Source | None
    limit: int | None
    questions: list[str]
    min_accept_length: float
    max_difference: float

    @property
    def max_prompt_length(self) -> int:
        """Longest prompt that leaves room for the answer and the drafts behind it."""
        context = self.target.text_config.max_position_embeddings
        return context - self.decoding.max_new_tokens - self.decoding.steps - 1

    def prompts(self, training: dict[str, Any] | None) -> PromptSet:
        """Of the source; else validation prompts of the head's own store if it is still there; else the questions."""
        if self.source is not None:
            return file_prompts(self.chat, self.source, limit=self.limit, max_length=self.max_prompt_length)
        if training is not None:
            try:
                return validation_prompts(training["store"], limit=self.limit, max_length=self.max_prompt_length)
            except InputError:
                pass  # the head has travelled without its store
        return question_prompts(self.chat, self.questions, max_length=self.max_prompt_length)

    def measured(self, head: Path, prompts: PromptSet) -> dict[str, Any]:
        return self.facts(self.decoded(head, prompts), prompts)

    def decoded(self, head: Path, prompts: PromptSet, *, capture_layers: list[int] | None = None) -> Measurement:
        """Decode with the head in the dtype that the target was loaded in.

        Other `capture_layers` than config.json's are indices into `hidden_states`."""
        loaded = load_head(head, num_layers=len(self.target.layers), dtype=self.target.embedding.dtype)
        layers, settings = capture_layers or loaded.capture_layers, asdict(self.decoding)
        return measure(self.target, loaded.head, layers, prompts.prompts, progress="decode", **settings)

    def facts(self, result: Measurement, prompts: PromptSet) -> dict[str, Any]:
        """Plain values for JSON, without any text."""
        drafted = [answer for answer in result.decoded if answer.verifications]  # the others have no part in the ratio
        error = standard_error(lambda answers: Measurement([*answers], None, 0.0).accept_length, drafted)
        return {
            "accept_length": result.accept_length,
            "standard_error": error if math.isfinite(error) else None,  # over prompts; JSON has no infinity
            "accept_length_kept": result.accept_length_kept,
            "per_depth": result.per_depth,
            "lossless": result.lossless,
            "tokens": result.tokens,
            "verifications": result.verifications,
            "seconds": result.seconds,
            "prompts": len(prompts.prompts),
            "prompts_from": prompts.origin,
            "from_validation": prompts.from_validation,
            "prompts_hash": sha256_json(prompts.prompts),
            "left_out": dict(prompts.left_out),
            "dtype": str(self.target.embedding.dtype).removeprefix("torch."),
            **asdict(self.decoding),
        }

    def judged(self, result: dict[str, Any], training: dict[str, Any] | None) -> Finding:
        """An error below the least useful accept length, or where the training's record says something else."""
        value = result["accept_length"]
        error = "" if result["standard_error"] is None else f" ± {result['standard_error']:.3f}"
        summary = (
            f"{value:.3f}{error} at steps={result['steps']} topk={result['topk']} "
            f"on {result['prompts']} prompts ({result['prompts_from']})"
        )
        if value < self.min_accept_length:
            way_out = (
                "if the other checks are well, the head is of another target, or needs more training or the traffic "
                "that is served"
            )
            return Finding(CHECK, "error", f"{summary}: check.min_accept_length is {self.min_accept_length}; {way_out}")
        compared, fault = self._compared(result, training or {})
        return Finding(CHECK, "error" if fault else "ok", "; ".join(filter(None, (summary, compared, fault))))

    def _compared(self, result: dict[str, Any], training: dict[str, Any]) -> tuple[str, str]:
        """What the result is compared with, and what is wrong ("": nothing).

        In float32 the export's measurement gave the same tokens. In half precision, or from one dtype to another,
        near-ties flip, and then the answers, and how often they are drafted, are others: a matter of sampling."""
        value, recorded = result["accept_length"], training.get("accept_length")
        error = math.inf if result["standard_error"] is None else result["standard_error"]
        if recorded is not None and all(recorded.get(key) == result[key] for key in SAME_MEASUREMENT):
            told = f"the export measured {recorded['accept_length']:.3f} on the same"
            exact = result["dtype"] == recorded.get("dtype") == "float32"
            allowed = self.max_difference * recorded["accept_length"] + (0 if exact else 2 * error)
            if abs(value - recorded["accept_length"]) > allowed:
                beyond = "" if exact else " by more than two standard errors"
                return told, f"{self._limit}{beyond}: a file of the head or the target has changed, export again"
            return told, ""
        simulated = (training.get("simulated_accept_length") or {}).get(str(result["steps"]))
        if simulated is None or not comparable_with_training(result):
            return "", ""
        told = f"validation during training simulated {simulated:.3f}"
        if value + 2 * error < simulated * (1 - self.max_difference):
            why = (
                "the files are not what was trained, or the target does not answer as in training (template, sampling)"
            )
            return told, f"{self._limit} by more than two standard errors: {why}"
        return told, ""

    @property
    def _limit(self) -> str:
        return f"they differ by more than check.max_difference={self.max_difference}"


def comparable_with_training(result: dict[str, Any]) -> bool:
    """Validation walks a chain along held-out answers; a draft is right if it is the target's first choice."""
    return result["from_validation"] and result["topk"] == 1 and result["temperature"] == 0
