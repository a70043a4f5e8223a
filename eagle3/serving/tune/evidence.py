"""What settings gain, known before any of them is timed: replayed by our decoder, or counted by one server."""

import gc
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from eagle3.decoding.replay import record
from eagle3.decoding.speculate import Speculator
from eagle3.errors import InputError
from eagle3.head.eagle3 import EAGLE3
from eagle3.head_files.format import load_head
from eagle3.serving.check.settings import Answering
from eagle3.serving.tune.predict import Gain, Setting, all_settings, chain_gains, replayed_gains
from eagle3.serving.tune.timing import LoadTiming, Timer
from eagle3.settings.serving import TuneSettings
from eagle3.target.model import Target, load_target


def decoder_gains(
    settings: TuneSettings,
    target_settings: Mapping[str, Any],
    head: Path,
    prompts: Sequence[list[int]],
    answering: Answering,
) -> dict[Setting, Gain]:
    """Replay every setting on the target's own answers to these prompts.

    The target is loaded for this alone: what comes next may be a server, which needs the GPU's memory."""
    try:
        return _replayed(settings, load_target(**target_settings), head, prompts, answering)
    finally:
        gc.collect()
        torch.cuda.empty_cache()


def _replayed(
    settings: TuneSettings, target: Target, head: Path, prompts: Sequence[list[int]], answering: Answering
) -> dict[Setting, Gain]:
    loaded = load_head(head, num_layers=len(target.layers), dtype=target.embedding.dtype)
    kind = loaded.head.config.KIND
    if kind != EAGLE3.name:
        raise InputError(
            f"tune.evidence=decoder grows trees of {EAGLE3.name} heads, and {head} is of kind {kind}; take "
            "tune.evidence=server"
        )
    candidates = all_settings(
        steps=settings.steps,
        topk=settings.topk,
        draft_tokens=settings.draft_tokens,
        draft_vocab_size=loaded.head.config.draft_vocab_size,
    )
    recording = record(
        Speculator(target, loaded.head, loaded.capture_layers),
        prompts,
        steps=max(settings.steps),
        topks=sorted(set(settings.topk)),
        batch_size=settings.batch_size,
        progress="replay",
        **asdict(answering),
    )
    return replayed_gains(recording, candidates)


def server_gains(settings: TuneSettings, timer: Timer) -> tuple[dict[Setting, Gain], dict[Setting, LoadTiming]]:
    """Time the longest chain on a server; return what every chain gains by its counts, and that timing."""
    chains = all_settings(steps=settings.steps, topk=[1], draft_tokens=[], draft_vocab_size=1)
    timing = timer(chains[-1])
    assert timing.gain is not None
    return chain_gains(timing.per_depth, timing.gain, chains), {chains[-1]: timing}
