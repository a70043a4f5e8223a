"""The learning rate over a training. It follows the share of the training that is done, also after a resume.

A training has a length, counted in optimizer steps of its first start. A later start may have other steps: on another
number of ranks, or of another trainer.accumulate_grad_batches, a step is another share of an epoch.
"""

import math
from collections.abc import Callable

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


class ShareLR(LambdaLR):
    """Scales the learning rate by `scale(done, length)`. Its state, in every checkpoint, is plain numbers.

    `scale` must accept fractions of a step. Where a resume makes the training longer, so that the rate is higher at the
    share that is done, it rises to it over `warmup_fraction` of the part that is left.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        scale: Callable[[float, float], float],
        length: int,
        *,
        warmup_fraction: float = 0.0,
    ) -> None:
        self.length, self.warmup_fraction = float(length), warmup_fraction
        self.epoch: float | None = None  # length of an epoch; None before `start`
        self.first, self.done_at_first, self.per_step = 0, 0.0, 1.0  # from the step `first` on, each counts `per_step`
        self.rise_from = self.rise_to = self.rise_begin = 0.0  # the rate rises between these two, from this factor

        def factor(step: int) -> float:
            done = self.done(step)
            wanted = scale(done, self.length)
            if done >= self.rise_to:
                return wanted
            risen = min(1.0, (done + self.per_step - self.rise_from) / (self.rise_to - self.rise_from))
            return self.rise_begin + (wanted - self.rise_begin) * risen

        super().__init__(optimizer, factor)

    def done(self, step: int) -> float:
        """Return how much of the length is done before this step."""
        return self.done_at_first + (step - self.first) * self.per_step

    def start(self, steps_in_epoch: int, max_epochs: int, max_steps: int) -> str | None:
        """Plan the training as this start of it has it; -1 is no bound. Return what becomes of the rate of a resumed
        one if its plan has changed."""
        if self.epoch is None:
            self.epoch = float(steps_in_epoch)
        step, per_step = self.last_epoch, self.epoch / steps_in_epoch
        done = self.done(step)
        by_epochs = self.epoch * max_epochs if max_epochs >= 0 else math.inf
        length = min(by_epochs, done + (max_steps - step) * per_step if max_steps >= 0 else math.inf)
        same_length = math.isclose(length, self.length)
        if (same_length and math.isclose(per_step, self.per_step)) or done >= length:
            return None
        factor = self.lr_lambdas[0]
        before = factor(step)
        self.first, self.done_at_first, self.per_step = step, done, per_step
        if not same_length:
            self.length, self.rise_begin, self.rise_from, self.rise_to = length, before, done, done
            if factor(step) > before:
                self.rise_to += self.warmup_fraction * (length - done)
        for group, rate in zip(self.optimizer.param_groups, self.base_lrs, strict=True):
            group["lr"] = rate * factor(step)
        return self._in_words(before)

    def _in_words(self, before: float) -> str:
        step, factor, rate = self.first, self.lr_lambdas[0], self.base_lrs[0]
        rising = math.ceil(max(0.0, self.rise_to - self.done(step)) / self.per_step)
        last = step + math.ceil((self.length - self.done(step)) / self.per_step)
        top = f"{rate * factor(step + max(0, rising - 1)):.2e}"
        return (
            f"{self.done(step) / self.length:.0%} of the training is done; the learning rate, {rate * before:.2e} "
            f"before, {f'rises to {top} in {rising} steps' if rising else f'continues at {top}'} and ends at "
            f"{rate * factor(last):.2e} after step {last}"
        )
