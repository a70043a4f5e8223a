"""Plans the epochs of a training, and the rest of an epoch that a run with other ranks began.

Example: one rank trains 3 packs of an epoch; the run is then resumed on two ranks.
1. The checkpoint has epoch=0, consumed=3, spread={ranks: 1, micro_batches: 1}, before=[].
2. The plan for one rank is made again, from the same seed. The samples of its first 3 packs are left out.
3. The samples that are left are planned for two ranks, from pack 0. The next checkpoint has
   spread={ranks: 2, …}, its own `consumed`, and before=[{spread: {ranks: 1, …}, consumed: 3}].
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from eagle3.data.loader import EpochPart
from eagle3.data.plan import EpochPlan, not_taken, plan_epoch
from eagle3.errors import InputError
from eagle3.features.samples import Samples
from eagle3.features.split import hash64

log = logging.getLogger(__name__)
Spread = dict[str, int]  # what a plan depends on besides seed and epoch: `ranks` and `micro_batches`


@dataclass(frozen=True)
class Trained:
    """What each rank has trained of an epoch: `consumed` packs of its present plan, after parts of earlier plans."""

    epoch: int = 0
    consumed: int = 0
    before: list[dict[str, Any]] = field(default_factory=list)  # of each earlier plan its `spread` and `consumed`

    @property
    def earlier(self) -> int:
        """Count the packs that a rank trained under the earlier plans."""
        return sum(plan["consumed"] for plan in self.before)


class Epochs:
    """`epoch_samples` returns the samples of the epoch with this seed."""

    def __init__(self, epoch_samples: Callable[[int], Samples], *, pack_tokens: int, seed: int) -> None:
        self.epoch_samples, self.pack_tokens, self.seed = epoch_samples, pack_tokens, seed
        self.resumed = Trained()
        self._part: EpochPart | None = None

    def part(self, epoch: int, spread: Spread, rank: int) -> EpochPart:
        """Plan this rank's part of the epoch, without samples that the run trained under other plans."""
        if self._part is None or self._part.epoch != epoch:
            seed, trained = hash64(self.seed, epoch), self.trained_before(epoch)
            samples = self.epoch_samples(seed)
            for plan in trained.before:
                samples = not_taken(samples, self._plans(samples, plan["spread"], seed), plan["consumed"])
            packs = self._plans(samples, spread, seed)[rank]
            self._part = EpochPart(epoch, packs, start=trained.consumed, earlier=trained.earlier)
        return self._part

    def packs_in_first(self, spread: Spread) -> int:
        """Count a rank's packs in the first epoch, planned as a whole; others may have a few more or less."""
        seed = hash64(self.seed, 0)
        return len(self._plans(self.epoch_samples(seed), spread, seed)[0])

    def trained_before(self, epoch: int) -> Trained:
        """Return what runs before this one trained of the epoch."""
        return self.resumed if epoch == self.resumed.epoch else Trained()

    def resume(self, state: dict[str, Any], spread: Spread) -> None:
        """Resume at a checkpoint's state; with another spread, by a new plan for the samples that are left."""
        trained, then = Trained(state["epoch"], state["consumed"], state["before"]), state["spread"]
        if then != spread and state["consumed"] != state["packs"]:
            before = [*trained.before, {"spread": then, "consumed": trained.consumed}]
            trained = Trained(trained.epoch, 0, before)
            if trained.earlier % spread["micro_batches"]:
                raise InputError(
                    f"ckpt_path: that run stopped after pack {trained.earlier} of an epoch, in the middle of a step of "
                    f"trainer.accumulate_grad_batches={spread['micro_batches']}; resume with {then['micro_batches']}"
                )
            words = "ranks=%d and trainer.accumulate_grad_batches=%d"
            log.info(
                f"{words} instead of {words}: the rest of the epoch is planned again", *spread.values(), *then.values()
            )
        self.resumed, self._part = trained, None

    def _plans(self, samples: Samples, spread: Spread, seed: int) -> list[EpochPlan]:
        return plan_epoch(
            samples,
            pack_tokens=self.pack_tokens,
            world_size=spread["ranks"],
            accumulate=spread["micro_batches"],
            shuffle_seed=seed,
        )
