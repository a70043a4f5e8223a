"""Compares an exported head with the trained one on the same stored answers, so that only a fault makes a difference.

Both follow the first answers to held-out prompts, up to `max_new_tokens`, in chains; a draft is right if it is the
answer's own token. The trained head drafts by the unroll, from the stored features, as in validation. The exported one
drafts as in decoding, from states that the target gives here. A wrong layer, norm, vocabulary map or RoPE, and a target
that is not the one of the training, cost accept length on one side only.

Shapes: K steps, R anchors: places where a round may begin.
"""

import math
from collections.abc import Iterator
from dataclasses import replace

import torch

from eagle3.data.pack import pack_samples
from eagle3.decoding.paired import Gains, accept_length, difference
from eagle3.decoding.replay import Answered, record
from eagle3.decoding.speculate import Speculator, load_speculator
from eagle3.errors import InputError
from eagle3.features.sample import Sample
from eagle3.features.turns import find_answer_spans
from eagle3.head.head import Head
from eagle3.head.kernels import KernelPlan
from eagle3.head.registry import kind_named
from eagle3.head.simulate_decoding import rounds_of_turn
from eagle3.head_files.files import HeadFiles
from eagle3.head_files.finding import Finding
from eagle3.progress import Bar
from eagle3.serving.check.accept_length import Measurer
from eagle3.serving.check.prompts import held_out_samples
from eagle3.serving.report import with_error
from eagle3.target.model import Target

CHECK = "as_trained"


def check_as_trained(files: HeadFiles, measurer: Measurer, trained: Head | None = None) -> Finding:
    """Compare a head with the `trained` one; None: the head as it is in the files, which are those of the export."""
    if files.record is None:
        return Finding(CHECK, "skipped", "nothing in the folder says which answers the head was trained on")
    target, steps = measurer.target, measurer.decoding.steps
    speculator = load_speculator(target, files)
    trained = (trained or speculator.head).to(target.device)
    then, now = [], []
    try:
        samples = first_answers(held_out_samples(files.record.origin), measurer)
        for sample in Bar(samples, desc="as trained", unit="answer", total=measurer.limit):
            then.append(unrolled(trained, target, sample, steps))
            now.append(replayed(speculator, sample, steps))
    except InputError as reason:  # the head was copied without its store, which is not to be made again for this
        return Finding(CHECK, "skipped", str(reason).partition("; ")[0])
    if not then:
        return Finding(CHECK, "skipped", "no held-out answer of the training has two tokens and fits")
    return judged(measurer, *(Gains.of_rounds(rounds, range(len(rounds))) for rounds in (now, then)))


def judged(measurer: Measurer, now: Gains, then: Gains) -> Finding:
    """Find a warning if the head drafts worse than the trained one by more than `check.max_difference` and by more than
    two standard errors of the paired difference; an error if it lost more than half of the trained one's gain."""
    served, trained, change = accept_length(now), accept_length(then).value, difference(now, then)
    how = measurer.decoding
    summary = (
        f"{with_error(served.value, served.standard_error)} at steps={how.steps} along the first {how.max_new_tokens} "
        f"tokens of {len(now.accepted)} stored answers, {trained:.3f} as it was trained"
    )
    noise = math.inf if change.standard_error is None else 2 * change.standard_error
    if -change.value <= max(measurer.max_difference * trained, noise):
        return Finding(CHECK, "ok", summary)
    limit = f"that is less by more than check.max_difference={measurer.max_difference} and two standard errors"
    why = "the files are not what was trained, or the target here is not the one of the training"
    return Finding(CHECK, "error" if -change.value > (trained - 1) / 2 else "warning", f"{summary}: {limit}: {why}")


def first_answers(samples: Iterator[Sample], measurer: Measurer) -> Iterator[Sample]:
    """Take the first `limit` samples whose prompt and answer fit, with no answer but the first, cut to
    `max_new_tokens`."""
    found = 0
    for sample in samples:
        begin, end = next(iter(find_answer_spans(sample.turns)), (0, 0))
        end = min(end, begin + measurer.decoding.max_new_tokens)
        if not (0 < begin <= measurer.room and end - begin > 1):
            continue
        position = torch.arange(len(sample.turns))
        yield replace(sample, turns=((begin <= position) & (position < end)).long())
        found += 1
        if found == measurer.limit:
            return


@torch.inference_mode()
def unrolled(head: Head, target: Target, sample: Sample, steps: int) -> list[int]:
    """Return how many drafts each round of the answer accepts, by the unroll from the stored features."""
    kind = kind_named(head.kind)
    batch = kind.prepare(pack_samples([sample], anchors_in_step=1, samples_in_step=1), steps).to(target.device)
    states = batch.pack.aux_hidden_states.to(target.embedding.dtype)
    batch = replace(batch, pack=replace(batch.pack, aux_hidden_states=states))
    outputs = kind.unroll(head, target.embedding, batch, steps, KernelPlan())
    drafts = head.draft_ids[torch.stack([head.logits(output).argmax(-1) for output in outputs])]  # (K, R)
    ids, step = batch.pack.input_ids, torch.arange(steps, device=target.device)[:, None]
    right = drafts == ids[(batch.anchors + 2 + step).clamp(max=len(ids) - 1)]
    accepted = (right & (step < batch.anchor_steps)).long().cumprod(0).sum(0)  # (R,)
    return rounds_of_turn(accepted.tolist())


def replayed(speculator: Speculator, sample: Sample, steps: int) -> list[int]:
    """Return the same by decoding, from the target's own states."""
    [(begin, end)] = find_answer_spans(sample.turns)
    ids = sample.input_ids.tolist()
    answer = Answered(ids[:begin], ids[begin:end], beyond=[0] * steps, stopped=False)
    [places] = record(speculator, [answer], steps=steps, topks=[1]).places[1]
    accepted = (places[:, steps - 1] < steps).sum(1)  # (R,)
    left = torch.arange(len(accepted), 0, -1)  # tokens of the answer: drafts past its end do not count
    return rounds_of_turn(torch.minimum(accepted, left).tolist())
