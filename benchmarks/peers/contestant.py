"""What the trainers of race.py train on: the same packs in the same order, and the seconds of the steps."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from step_cost import timed
from train_step import device

from eagle3.data.datamodule import FeatureData
from eagle3.data.plan import PlannedPack, plan_epoch
from eagle3.features.sample import Sample
from eagle3.features.split import hash64
from eagle3.settings.training import TrainRun

WARM_UP = 3  # steps
PACKS_ON_DEVICE = 32  # at a time
TRAINED = "model.train_lm_head=true"  # as SpecForge does


class Contestant(Protocol):
    def batch(self, samples: list[Sample]) -> Any:
        """Return what `step` takes, on the device."""

    def step(self, batch: Any) -> None:
        """Forward, backward and optimizer step."""

    def save(self, folder: Path) -> None:
        """Write the head in SGLang's format."""


def planned(data: FeatureData, run: TrainRun, *, alone: bool) -> list[list[PlannedPack]]:
    """Return the packs of every epoch, the same for all trainers; `alone`: one sample each, in the same order."""
    one_rank = {"pack_tokens": data.settings.pack_tokens, "world_size": 1, "accumulate": 1}
    plans = [
        [*plan_epoch(data.train_samples, **one_rank, shuffle_seed=hash64(run.seed, epoch))[0]]
        for epoch in range(run.trainer.keys["max_epochs"])
    ]
    if alone:
        return [[replace(pack, samples=(ref,)) for pack in plan for ref in pack.samples] for plan in plans]
    return plans


def trained(
    make: Callable[[], Contestant], data: FeatureData, plans: Sequence[Sequence[PlannedPack]], head: Path
) -> dict[str, Any]:
    """Train a contestant, save it, and return the seconds of its steps."""

    def batches(contestant: Contestant, packs: Sequence[PlannedPack]) -> list[Any]:
        return [contestant.batch([data.read(ref) for ref in pack.samples]) for pack in packs]

    def steps(contestant: Contestant, batches: list[Any]) -> None:
        for batch in batches:
            contestant.step(batch)

    contestant = make()  # compiles what is compiled once, for the one that is trained
    steps(contestant, batches(contestant, plans[0][:WARM_UP]))
    contestant, seconds, done = make(), 0.0, 0
    for plan in plans:
        for first in range(0, len(plan), PACKS_ON_DEVICE):
            there = batches(contestant, plan[first : first + PACKS_ON_DEVICE])
            seconds += timed(partial(steps, contestant, there), 1, device())
            done += len(there)
            del there  # or the next packs would lie on the device, too
            print(f"{done} steps, {seconds:.1f} s", flush=True)
    head.mkdir(parents=True, exist_ok=True)
    contestant.save(head)
    return {"epochs": len(plans), "steps": done, "seconds": seconds, "head": str(head)}
