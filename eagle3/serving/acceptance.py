"""Accept length of a head by our own decoder, and whether it is good enough."""

from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from eagle3.chat import Chat
from eagle3.errors import InputError
from eagle3.prompts import Source
from eagle3.serving.check import Finding, has_errors, run_checks, target_facts
from eagle3.serving.checkpoint import HeadFiles, load_head
from eagle3.serving.measured_prompts import PromptSet, file_prompts, question_prompts, validation_prompts
from eagle3.speculate import measure
from eagle3.storage import sha256_json
from eagle3.target import Target

CHECK = "accept_length"


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """How answers are drafted and decoded: the keys of the same names in conf/serve.yaml."""

    steps: int
    topk: int
    draft_tokens: int | None
    max_new_tokens: int
    temperature: float
    seed: int


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
    max_drop: float

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
        """Decode with the head in the dtype that the target was loaded in; plain values for JSON, without any text."""
        loaded = load_head(head, dtype=self.target.embedding.dtype)
        settings = asdict(self.decoding)
        result = measure(
            self.target, loaded.head, loaded.capture_layers, prompts.prompts, progress="decode", **settings
        )
        return {
            "accept_length": result.accept_length,
            "accept_length_kept": result.accept_length_kept,
            "per_depth": result.per_depth,
            "lossless": result.lossless,
            "tokens": result.tokens,
            "verifications": result.verifications,
            "seconds": result.seconds,
            "prompts": len(prompts.prompts),
            "prompts_from": prompts.origin,
            "prompts_hash": sha256_json(prompts.prompts),
            "left_out": dict(prompts.left_out),
            **settings,
        }

    def judged(self, result: dict[str, Any], training: dict[str, Any] | None) -> Finding:
        """An error below the least useful accept length, or below the export's on the same prompts and settings."""
        value = result["accept_length"]
        summary = (
            f"{value:.3f} at steps={result['steps']} topk={result['topk']} "
            f"on {result['prompts']} prompts ({result['prompts_from']})"
        )
        if value < self.min_accept_length:
            way_out = "if the other checks are well, train longer or on the traffic that is served"
            return Finding(CHECK, "error", f"{summary}: check.min_accept_length is {self.min_accept_length}; {way_out}")
        recorded = (training or {}).get("accept_length")
        same = ("prompts_hash", *(field.name for field in fields(Decoding)))
        if recorded is None or any(recorded[key] != result[key] for key in same):
            return Finding(CHECK, "ok", summary)
        compared = f"{summary}; the export measured {recorded['accept_length']:.3f} on the same"
        if value < recorded["accept_length"] * (1 - self.max_drop):
            return Finding(CHECK, "error", f"{compared}: a file of the head or the target has changed, export again")
        return Finding(CHECK, "ok", compared)


def check_head(files: HeadFiles, judge: Judge) -> list[Finding]:
    """Every check of a head that was exported some time ago, by this project or another."""
    findings = run_checks(files, target_facts(judge.target, judge.chat.settings["template_hash"]))
    if has_errors(findings):
        return [*findings, Finding(CHECK, "skipped", "mend the errors above first")]
    result = judge.measured(files.path, judge.prompts(files.training))
    return [*findings, judge.judged(result, files.training)]
