"""Candidate draft settings and what our decoder predicts for them before any server starts."""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace

from eagle3.decoding.paired import Gains, accept_length
from eagle3.decoding.replay import Recording, answer_all, record
from eagle3.decoding.speculate import load_speculator, nothing_verified, require_topk
from eagle3.draft_shape import Shape, most_draft_tokens
from eagle3.errors import InputError
from eagle3.head_files.files import read_files
from eagle3.progress import Bar
from eagle3.serving.check.prompts import Conversations, PromptSet, with_history
from eagle3.settings.serving import AnswerSettings, TuneRun
from eagle3.target.model import Target, load_target, unload

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Gain:
    """Tokens gained per verification: `accept_length` as SGLang counts it, and `tokens` that reach the answer.

    They differ in the last verification of an answer, which may accept more drafts than there is room for.
    `standard_error`, of the accept length, is over conversations, `prompts` counts those of all their turns."""

    accept_length: float
    tokens: float
    standard_error: float | None = None
    prompts: int | None = None

    def predicted_speed_up(
        self, setting: Shape, *, concurrency: int, compute_bound_tokens: float, step: float
    ) -> float:
        """Return the assumed speed-up over the plain target.

        A forward pass reads the weights once and computes for each token of all requests; both take equally long at
        `compute_bound_tokens`. A draft step takes `step` forward passes of the plain target."""
        computing = concurrency / (compute_bound_tokens + concurrency)
        verification = 1 + computing * (setting.draft_tokens - 1) + step * setting.steps
        return self.tokens / verification


def all_settings(
    *, steps: Sequence[int], topk: Sequence[int], draft_tokens: Sequence[int], draft_vocab_size: int
) -> list[Shape]:
    """Return chains of `steps`, and the trees of these sizes that can hold a path of `steps` and can be filled."""
    require_topk(max(topk), draft_vocab_size, setting="tune.topk")
    found = {
        Shape(depth, width, tokens)
        for depth in steps
        for width in topk
        for tokens in ([depth + 1] if width == 1 else draft_tokens)
        if depth < tokens <= most_draft_tokens(depth, width)
    }
    if not found:
        raise InputError(
            f"tune.steps={[*steps]} tune.topk={[*topk]} tune.draft_tokens={[*draft_tokens]} holds no tree: it has from "
            f"steps + 1 to 1 + topk + (steps - 1)·topk² draft_tokens"
        )
    return sorted(found)


def decoder_gains(run: TuneRun, conversations: Conversations, stop_ids: frozenset[int]) -> dict[Shape, Gain]:
    """Replay every setting on the target's own answers to all turns of these conversations.

    The target is loaded for this alone: the servers that are timed next need the GPU's memory."""
    try:
        target = replace(load_target(**vars(run.target)), stop_ids=stop_ids)
        most, rows = run.max_new_tokens, run.tune.batch_size
        prompts = with_history(target, conversations, max_new_tokens=most, batch_size=rows)
        log.info("%s, left out: %s", prompts, prompts.left_out or "none")
        return _replayed(run, target, prompts)
    finally:
        unload()


def _replayed(run: TuneRun, target: Target, prompts: PromptSet) -> dict[Shape, Gain]:
    settings, speculator, most = run.tune, load_speculator(target, read_files(run.head)), max(run.tune.steps)
    topk = [1] if settings.loads else settings.topk  # servers change the steps of chains only
    candidates = all_settings(
        steps=settings.steps,
        topk=topk,
        draft_tokens=settings.draft_tokens,
        draft_vocab_size=speculator.head.config.draft_vocab_size,
    )
    sampling = {**asdict(run.only(AnswerSettings)), "batch_size": settings.batch_size}
    answers = answer_all(target, prompts.prompts, beyond=most, progress="answers", **sampling)
    bar, window = Bar(answers, desc="replay", unit="prompt"), settings.draft_window
    recording = record(speculator, bar, steps=most, topks=sorted(set(topk)), draft_window=window)
    return replayed_gains(recording, prompts.conversations, candidates)


def replayed_gains(recording: Recording, conversations: Sequence[int], settings: Iterable[Shape]) -> dict[Shape, Gain]:
    """Return what our decoder would measure with each setting, up to rounding (see replay.py). `conversations` has the
    number of each answer's."""
    gains = {}
    for setting in settings:
        answers = recording.replay_each(**setting._asdict())
        found = Gains.of_rounds([each.gained for each in answers], conversations)
        if not found.verifications.any():
            raise nothing_verified(len(answers))
        length = accept_length(found)
        per_verification = sum(each.tokens for each in answers) / float(found.verifications.sum())
        gains[setting] = Gain(length.value, per_verification, length.standard_error, len(answers))
    return gains
