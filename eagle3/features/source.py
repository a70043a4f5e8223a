"""Interface for sources of features, which training reads.

Shapes: V target vocabulary, H hidden size.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

from jaxtyping import Float, Int
from torch import Tensor

from eagle3.errors import InputError
from eagle3.features.manifest import MadeFrom
from eagle3.features.sample import Sample
from eagle3.features.samples import SampleRef, Samples
from eagle3.target.facts import TargetConfig

TargetWeights = tuple[Float[Tensor, "V H"], Float[Tensor, "V H"]]  # embedding, lm_head


REQUESTS = 32  # at once, to a store that is read over a network


def as_setting(location: str | list[str]) -> str:
    """Return a source's location as `data.path` takes it on a command line."""
    return location if isinstance(location, str) else f"[{','.join(location)}]"


class FeatureSource(Protocol):
    """Samples of one target, whose sizes are all known before any of them is read.

    The plan of an epoch depends on `samples` and their order alone, so both are the same in every process and after
    every restart. What is missing, damaged or of another target is an InputError that names it.
    """

    @property
    def location(self) -> str | list[str]:
        """Path or URL, or several; appears in messages, checkpoints and exported heads."""

    @property
    def made_from(self) -> MadeFrom:
        """The settings of the store, which packs and loss masks depend on."""

    @property
    def target_config(self) -> TargetConfig: ...

    @property
    def samples(self) -> Samples: ...

    @property
    def remote(self) -> bool:
        """Reading waits for a network, so that samples of a pack are worth reading at once."""

    @property
    def answer_counts(self) -> Int[Tensor, " V"]:
        """Count of each target token in the answers."""

    @property
    def fingerprint(self) -> str:
        """A hash of everything that decides what training sees."""

    def describe(self) -> dict[str, Any]:
        """Return counts and settings as plain values, for logs."""

    def read(self, ref: SampleRef) -> Sample:
        """Read one sample; called from several threads at once."""

    def target_weights(self) -> TargetWeights:
        """Return the target's embedding and `lm_head`, one tensor where they are tied."""

    def verify(self, *, rank: int = 0, world_size: int = 1) -> None:
        """Compare this rank's share with its hashes; an InputError names the first file that differs."""


class MadeOnDemand:
    """Base of a `FeatureSource` whose features are made when they are asked for."""

    def ahead(self, refs: Iterator[SampleRef], *, keep: bool) -> AbstractContextManager[None]:
        """Ask for samples that will be read inside the block, in about this order; `keep` them for the next time."""
        raise NotImplementedError

    def without_features(self, ref: SampleRef) -> Sample:
        """Return a sample's tokens and turns, as far as loss masks need it."""
        raise NotImplementedError


class NoFeatures(InputError):
    """The target refuses one sample; others can be made."""
