"""Chooses the samples of a training: by the rules, by what the loss mask leaves, then training or validation."""

import logging
import math
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from eagle3.data.mix import SampleFilter
from eagle3.errors import InputError
from eagle3.features.loss_mask import AllTurns
from eagle3.features.sample import Sample
from eagle3.features.samples import Samples
from eagle3.features.source import FeatureSource, MadeOnDemand, as_setting
from eagle3.features.turns import find_anchors, teacher_positions
from eagle3.progress import Bar
from eagle3.settings.training import PackSettings

log = logging.getLogger(__name__)


class ChosenSamples(NamedTuple):
    """Samples below `val_fraction` of the store's split validate. All samples of a prompt are on one side."""

    train: Samples
    val: Samples
    val_fraction: float


def choose_samples(
    source: FeatureSource,
    rules: SampleFilter,
    loss_mask: AllTurns,
    settings: PackSettings,
) -> ChosenSamples:
    loss_mask.check(source.made_from)
    store = as_setting(source.location)
    selected = rules.select(source.samples, source.location)
    fitting = loss_mask.select(selected)
    if not isinstance(fitting, Samples):
        raise InputError(
            f"loss_mask={type(loss_mask).__name__}: its select returns {type(fitting).__name__}; return Samples, e.g. "
            f"samples.take(positions)"
        )
    samples = fitting[: settings.limit_samples]
    if type(loss_mask) is not AllTurns:  # the index counts anchors of unmasked answers only
        read = source.without_features if isinstance(source, MadeOnDemand) else source.read
        found = map(read, Bar(samples, desc="count anchors under the loss mask"))
        masked = (_masked(sample, loss_mask) for sample in found)
        counted = np.array([_count_anchors(sample, loss_mask) for sample in masked], np.int32)
        if np.array_equal(counted, selected.anchors[: settings.limit_samples]):
            log.warning(
                "loss_mask=%s changes nothing: no answer of %s contains what it leaves out (features.reasoning "
                "names the markers of reasoning)",
                type(loss_mask).__name__, store,
            )  # fmt: skip
        samples = replace(samples, anchors=counted)
    trained = samples.take(samples.anchors > 0)
    if left_out := len(selected) - len(fitting) + len(samples) - len(trained):
        log.info(
            "loss_mask=%s leaves nothing to train in %d of %d samples: they are left out",
            type(loss_mask).__name__, left_out, len(selected),
        )  # fmt: skip
    if not len(trained):
        raise InputError(
            f"loss_mask={type(loss_mask).__name__} leaves nothing to train in the "
            f"{len(selected)} samples of {store}; choose another loss_mask"
        )
    _check_lengths(trained, settings.pack_tokens)
    return _split(trained, settings.val_fraction, store)


def _masked(sample: Sample, loss_mask: AllTurns) -> Sample:
    turns = loss_mask(sample)
    whole_numbers = isinstance(turns, Tensor) and not (turns.is_floating_point() or turns.dtype == torch.bool)
    if not whole_numbers or turns.shape != sample.turns.shape:
        returned = f"{turns.dtype} {list(turns.shape)}" if isinstance(turns, Tensor) else type(turns).__name__
        raise InputError(
            f"loss_mask={type(loss_mask).__name__} returns {returned} for sample {sample.id}, which has "
            f"{len(sample.turns)} tokens; return a tensor like sample.turns, with some tokens set to 0"
        )
    return replace(sample, turns=turns)


def _count_anchors(sample: Sample, loss_mask: AllTurns) -> int:
    if bool((teacher_positions(sample.turns) & ~sample.has_teacher).any()):
        raise InputError(
            f"loss_mask={type(loss_mask).__name__} marks tokens of sample {sample.id} that have no teacher; return "
            f"sample.turns with some tokens set to 0, or make features with features.teachers=all"
        )
    return len(find_anchors(sample.turns))


def _check_lengths(samples: Samples, pack_tokens: int) -> None:
    longest = samples[int(samples.tokens.argmax())].entry
    if longest.tokens > pack_tokens:
        too_long = int((samples.tokens > pack_tokens).sum())
        raise InputError(
            f"data.pack_tokens={pack_tokens} is too small for {too_long} samples (the longest, "
            f"{longest.id}: {longest.tokens} tokens); set data.pack_tokens={longest.tokens} or more, or leave "
            f"them out with data.max_tokens={pack_tokens}"
        )


def _split(samples: Samples, val_fraction: float, store: str) -> ChosenSamples:
    # If there are only a few prompts, none may be below the fraction: then the lowest one validates.
    fraction = max(val_fraction, math.nextafter(float(samples.split.min()), 1))
    validates = samples.split < fraction
    train, val = samples.take(~validates), samples.take(validates)
    if not len(train):
        smaller = " or a smaller data.val_fraction" if np.ptp(samples.split) else ": the only one validates"
        raise InputError(
            f"data.val_fraction={val_fraction} leaves none of the {len(samples)} samples of {store} for training; "
            f"use more prompts{smaller}"
        )
    return ChosenSamples(train, val, fraction)
