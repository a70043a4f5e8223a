"""Chooses samples and how often each is used: rules that leave samples out, and a weight for each of several stores.

No store is rewritten, and only the index columns of samples are read. Shapes: N samples.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from eagle3.errors import InputError
from eagle3.features.samples import Samples
from eagle3.features.source import FeatureSource, as_setting
from eagle3.features.split import hash64, share_fractions
from eagle3.settings.training import SampleRules

log = logging.getLogger(__name__)

NAMED = 20  # sources listed in an error


@dataclass(frozen=True, kw_only=True)
class SampleFilter(SampleRules):
    """Decides whether a sample is used at all; a rule that is None leaves out nothing."""

    def select(self, samples: Samples, location: str | list[str]) -> Samples:
        """Return the samples that fit all rules. The log counts the others, each by the first rule that it breaks."""
        left, left_out = np.ones(len(samples), bool), {}
        for key, fits in self._set().items():
            against = left & ~fits(samples)
            left_out[key], left = int(against.sum()), left & ~against
        if not left_out:
            return samples
        counts = ", ".join(f"{count:,} by {key}" for key, count in left_out.items())
        if not left.any():
            raise InputError(
                f"the filters exclude all {len(samples):,} samples of data.path={as_setting(location)} ({counts}); "
                f"relax them"
            )
        log.info("%s: %d of %d samples are used; left out: %s", as_setting(location), left.sum(), len(samples), counts)
        return samples.take(left)

    def _set(self) -> dict[str, Callable[[Samples], np.ndarray]]:
        fits: dict[str, Callable[[Samples], np.ndarray]] = {
            "min_tokens": lambda samples: samples.tokens >= self.min_tokens,
            "max_tokens": lambda samples: samples.tokens <= self.max_tokens,
            "prompt_fraction": lambda samples: share_fractions(samples.split) < self.prompt_fraction,
            "only_sources": self._from_sources,
            "finished_only": lambda samples: samples.whole(),
        }
        values = {name: getattr(self, name) for name in fits}
        return {f"data.{name}={value}": fits[name] for name, value in values.items() if value not in (None, False)}

    def _from_sources(self, samples: Samples) -> np.ndarray:
        names, of_samples = samples.sources()
        wanted = self.only_sources or []
        if unknown := [name for name in wanted if name not in names]:
            more = f" and {len(names) - NAMED:,} others" if len(names) > NAMED else ""
            raise InputError(
                f"data.only_sources={wanted}: no prompt came from {', '.join(unknown)}; the sources are "
                f"{', '.join(sorted(names)[:NAMED])}{more}"
            )
        return np.isin(of_samples, [names.index(name) for name in wanted])


class Mixture:
    """Draws the samples of each epoch: from each store `weight` times as many as it has.

    A weight of 2.5 takes every sample twice, and half of them a third time."""

    def __init__(self, weights: list[float], samples: Samples, source: FeatureSource) -> None:
        stores = [source.location] if isinstance(source.location, str) else source.location
        if len(weights) != len(stores):
            raise InputError(
                f"data.weights={weights} has {len(weights)} weights, data.path={as_setting(source.location)} "
                f"{len(stores)} stores; give one weight per store, in their order"
            )
        store_of = np.zeros(len(samples.shards), np.int64)
        if len(stores) > 1:
            store_of[:] = [stores.index(shard.store) for shard in samples.shards]
        of_samples = store_of[samples.shard_numbers()]
        self.samples, self.weights = samples, weights
        self.places = [np.flatnonzero(of_samples == number) for number in range(len(stores))]
        for store, weight, places in zip(stores, weights, self.places, strict=True):
            log.info("%s: %d samples to train, %d in an epoch", store, len(places), round(weight * len(places)))

    def epoch(self, seed: int) -> Samples:
        """Return the samples of the epoch with this seed, by store. Raises InputError if none is left."""
        drawn = np.random.default_rng(hash64("weights", seed))
        taken: list[np.ndarray] = []
        for of_store, weight in zip(self.places, self.weights, strict=True):
            whole, more = divmod(round(weight * len(of_store)), max(1, len(of_store)))
            taken += [np.repeat(of_store, whole), drawn.choice(of_store, more, replace=False)]
        places = np.sort(np.concatenate(taken))
        if not len(places):
            raise InputError(f"data.weights={self.weights} leave no sample in an epoch; give larger weights")
        return self.samples.take(places)
