"""Accept length of a head by our own decoder, compared with the one that its export measured."""

import math
from dataclasses import asdict, dataclass, fields

import numpy as np

from eagle3.answers.chat import Chat
from eagle3.decoding.paired import Gains, accept_length
from eagle3.decoding.speculate import Measurement, measure
from eagle3.errors import InputError
from eagle3.head_files.files import HeadFiles
from eagle3.head_files.finding import Finding
from eagle3.head_files.format import draft_head
from eagle3.head_files.record import HeadRecord, MeasuredAcceptLength
from eagle3.serving.check.prompts import (
    Conversations,
    PromptSet,
    longest_prompt,
    question_prompts,
    validation_prompts,
    with_history,
)
from eagle3.serving.report import with_error
from eagle3.settings.serving import CheckSettings, Decoding, Turns
from eagle3.storage.files import sha256_json
from eagle3.target.model import Target

CHECK = "accept_length"
SAME_MEASUREMENT = ("prompts_hash", *(each.name for each in fields(Decoding)))


@dataclass(frozen=True, kw_only=True)
class Measurer(CheckSettings):
    """Measures heads against one target, on the conversations `asked` if there are any."""

    target: Target
    chat: Chat
    decoding: Decoding
    asked: Conversations | None
    turns: Turns
    limit: int | None

    @property
    def room(self) -> int:
        """Tokens of the longest prompt."""
        how = self.decoding
        return longest_prompt(self.target.text_config, max_new_tokens=how.max_new_tokens, steps=how.steps)

    def prompts(self, record: HeadRecord | None) -> PromptSet:
        """Take those asked for; else of the record's validation, if its store is there; else the questions."""
        if self.asked is not None:
            return with_history(self.target, self.asked, max_new_tokens=self.decoding.max_new_tokens)
        if record is not None:
            try:
                return validation_prompts(record.origin, turns=self.turns, limit=self.limit, max_length=self.room)
            except InputError:
                pass  # the head was copied without its store
        return question_prompts(self.chat, self.questions, turns=self.turns, max_length=self.room)

    def measured(self, files: HeadFiles, prompts: PromptSet, *, lossless: bool = False) -> MeasuredAcceptLength:
        """Decode with the head in the dtype that the target was loaded in. `lossless`: see `measure`."""
        layers = files.served_layers(len(self.target.layers))
        head, settings = draft_head(files, self.target.embedding.dtype), asdict(self.decoding)
        result = measure(self.target, head, layers, prompts.prompts, progress="decode", lossless=lossless, **settings)
        return self.summary(result, prompts)

    def summary(self, result: Measurement, prompts: PromptSet) -> MeasuredAcceptLength:
        accepted = np.array([sum(answer.accepted) for answer in result.decoded], float)
        verifications = np.array([answer.verifications for answer in result.decoded], float)
        conversations = np.array(prompts.conversations)
        return MeasuredAcceptLength(
            accept_length=result.accept_length,
            standard_error=accept_length(Gains(accepted, verifications, conversations)).standard_error,
            accept_length_kept=result.accept_length_kept,
            per_depth=result.per_depth,
            lossless=result.lossless,
            tokens=result.tokens,
            verifications=result.verifications,
            seconds=result.seconds,
            conversations=prompts.num_conversations,
            turns=prompts.turns,
            prompts=len(prompts.prompts),
            prompts_from=prompts.origin,
            from_validation=prompts.from_validation,
            prompts_hash=sha256_json(prompts.prompts),
            left_out=dict(prompts.left_out),
            dtype=str(self.target.embedding.dtype).removeprefix("torch."),
            **asdict(self.decoding),
        )

    def finding(self, result: MeasuredAcceptLength, record: HeadRecord | None) -> Finding:
        """Find an error below the least useful accept length, or where the export measured something else."""
        window = f" draft_window={result.draft_window}" if result.draft_window else ""
        left_out = "".join(f", left out: {number} ({reason})" for reason, number in result.left_out.items())
        summary = (
            f"{with_error(result.accept_length, result.standard_error)} at steps={result.steps} topk={result.topk}"
            f"{window} on {result.prompts} prompts of {result.conversations} conversations ({result.prompts_from}, "
            f"prompts.turns={result.turns}{left_out})"
        )
        if result.accept_length < self.min_accept_length:
            fix = (
                "if the other checks pass, the head is of another target, or needs more training or the traffic "
                "that is served"
            )
            return Finding(CHECK, "error", f"{summary}: check.min_accept_length is {self.min_accept_length}; {fix}")
        exported = record.accept_length if record else None
        if exported is None or any(getattr(result, name) != getattr(exported, name) for name in SAME_MEASUREMENT):
            return Finding(CHECK, "ok", summary)
        summary += f"; the export measured {exported.accept_length:.3f} on the same"
        # In half precision, or from one dtype to another, near-ties flip: other answers, a matter of sampling.
        exact = result.dtype == exported.dtype == "float32"
        noise = 0 if exact else math.inf if result.standard_error is None else 2 * result.standard_error
        allowed = self.max_difference * exported.accept_length + noise
        if abs(result.accept_length - exported.accept_length) <= allowed:
            return Finding(CHECK, "ok", summary)
        beyond = "" if exact else " by more than two standard errors"
        limit = f"they differ by more than check.max_difference={self.max_difference}{beyond}"
        return Finding(
            CHECK, "error", f"{summary}; {limit}: a file of the head or the target has changed, export again"
        )
