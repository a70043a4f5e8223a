"""Settings as conf/ has them, changed where a test needs it."""

from dataclasses import replace
from functools import cache
from typing import Any

from eagle3.compose import compose_run
from eagle3.data.mix import SampleFilter
from eagle3.settings.engine import LaunchSettings
from eagle3.settings.parts import Part
from eagle3.settings.precomputing import CaptureSettings, PrecomputeRun, Sampling, ServedSettings, TargetSettings
from eagle3.settings.training import TrainRun


@cache
def _precompute() -> PrecomputeRun:
    return compose_run("precompute", "out_dir=DIR", "answers=sglang", "features=sglang")


@cache
def _train() -> TrainRun:
    return compose_run("train", "data.path=DIR", "run_dir=RUN")


def launch(**changes: Any) -> LaunchSettings:
    return replace(_precompute().launch, **changes)


def target(**changes: Any) -> TargetSettings:
    return replace(_precompute().target, **changes)


def served(**changes: Any) -> ServedSettings:
    return replace(_precompute().answers.read(ServedSettings), **changes)


def capture(**changes: Any) -> CaptureSettings:
    engine = _precompute().features.engine
    assert engine is not None
    return replace(engine, **changes)


def sampling(**changes: Any) -> Sampling:
    return replace(_precompute().sampling.only(Sampling), **changes)


def sample_filter(**changes: Any) -> SampleFilter:
    return replace(_train().data.read(SampleFilter), **changes)


def part(group: str, **changes: Any) -> Part:
    """The default option of a group, e.g. `optim`."""
    return getattr(_train(), group).with_keys(**changes)
