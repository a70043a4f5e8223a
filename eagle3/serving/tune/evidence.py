"""What settings gain before any of them is timed: replayed by our decoder, or counted by one server."""

import gc
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from eagle3.decoding.replay import record
from eagle3.decoding.speculate import Speculator
from eagle3.errors import InputError
from eagle3.serving.check.settings import Answering
from eagle3.serving.head.format import load_head
from eagle3.serving.tune.predict import Gain, Setting, all_settings, chain_gains, replayed_gains
from eagle3.serving.tune.timing import Timed, Timer
from eagle3.target.model import Target, load_target

EVIDENCE = ("decoder", "server")
LEAST = {"concurrency": 1, "batch_size": 1, "rows": 1, "timed": 0, "warmup": 0, "requests_per_place": 0}


@dataclass(frozen=True, kw_only=True)
class TuneSettings:
    """The keys of the same names in conf/serve/tune.yaml."""

    concurrency: int
    steps: list[int]
    topk: list[int]
    draft_tokens: list[int]
    evidence: str
    batch_size: int
    timed: int
    requests_per_place: int
    warmup: int
    timeout_s: float
    assumed: Mapping[str, float]
    rows: int

    def __post_init__(self) -> None:
        if self.evidence not in EVIDENCE:
            raise InputError(f"tune.evidence={self.evidence} is unknown; take one of: {', '.join(EVIDENCE)}")
        if self.evidence == "server" and self.timed < 1:
            raise InputError("tune.evidence=server times at least the longest chain; set tune.timed=1 or more")
        for name, least in LEAST.items():
            if getattr(self, name) < least:
                raise InputError(f"tune.{name}={getattr(self, name)} must be {least} or more")
        for name in ("steps", "topk", "draft_tokens"):
            values = getattr(self, name)
            if not isinstance(values, list) or any(not isinstance(one, int) or one < 1 for one in values):
                raise InputError(f"tune.{name}={values} must be a list of numbers from 1 up, e.g. tune.{name}=[4,8]")
        if not self.steps or not self.topk:
            raise InputError(f"tune.steps={self.steps} tune.topk={self.topk}: both need a number, e.g. tune.topk=[1]")
        for name, value in self.assumed.items():
            if value < 0:
                raise InputError(f"tune.assumed.{name}={value} must not be negative")


def decoder_gains(
    settings: TuneSettings,
    target_settings: Mapping[str, Any],
    head: Path,
    prompts: Sequence[list[int]],
    answering: Answering,
) -> dict[Setting, Gain]:
    """Of every setting, on the target's own answers to these prompts. The target is loaded for this alone: what comes
    next may be a server, which needs the GPU's memory."""
    try:
        return _replayed(settings, load_target(**target_settings), head, prompts, answering)
    finally:
        gc.collect()
        torch.cuda.empty_cache()


def _replayed(
    settings: TuneSettings, target: Target, head: Path, prompts: Sequence[list[int]], answering: Answering
) -> dict[Setting, Gain]:
    loaded = load_head(head, num_layers=len(target.layers), dtype=target.embedding.dtype)
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


def server_gains(settings: TuneSettings, timer: Timer) -> tuple[dict[Setting, Gain], dict[Setting, Timed]]:
    """Of every chain, by a server that runs the longest; and what was timed for that."""
    chains = all_settings(steps=settings.steps, topk=[1], draft_tokens=[], draft_vocab_size=1)
    timed = timer(chains[-1])
    assert timed.gain is not None
    return chain_gains(timed.per_depth, timed.gain, chains), {chains[-1]: timed}
