"""The interface for features: a source in memory trains as a store of the same samples does."""

from pathlib import Path
from typing import Any

import pytest
import torch
from stores import MADE_FROM, TARGET_CONFIG, random_samples, write_store
from torch import Tensor
from training_runs import Run

from eagle3.features.index import SampleEntry
from eagle3.features.sample import Sample
from eagle3.features.samples import SampleRef, Samples
from eagle3.features.source import TargetWeights
from eagle3.features.split import split_fraction
from eagle3.features.turns import find_anchors

pytestmark = pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec.*")  # between Lightning and PyTorch


class InMemory:
    """A `FeatureSource` that reads nothing from disk."""

    location = fingerprint = "memory"
    remote = False
    made_from, target_config = MADE_FROM, TARGET_CONFIG

    def __init__(self, count: int) -> None:
        self.by_id = {sample.id: sample for sample in random_samples(count)}
        self.samples = Samples.of([SampleRef("memory", "", self._entry(sample)) for sample in self.by_id.values()])

    @property
    def answer_counts(self) -> Tensor:
        answers = torch.cat([sample.input_ids[sample.turns > 0] for sample in self.by_id.values()])
        return torch.bincount(answers, minlength=TARGET_CONFIG.vocab_size)

    def describe(self) -> dict[str, Any]:
        return {"samples": len(self.samples)}

    def read(self, ref: SampleRef) -> Sample:
        return self.by_id[ref.entry.id]

    def target_weights(self) -> TargetWeights:
        size = TARGET_CONFIG.vocab_size, TARGET_CONFIG.hidden_size
        weights = torch.randn(size, generator=torch.Generator().manual_seed(3))
        return weights, weights

    def verify(self, *, rank: int = 0, world_size: int = 1) -> None:
        pass

    @staticmethod
    def _entry(sample: Sample) -> SampleEntry:
        answers = int((sample.turns > 0).sum())
        length, anchors = len(sample.input_ids), len(find_anchors(sample.turns))
        return SampleEntry(sample.id, 0, 0, length, answers, anchors, split_fraction(sample.id), "")


def test_a_source_in_memory_trains_to_the_weights_of_a_store_of_the_same_samples(tmp_path):
    store = write_store(tmp_path / "features", random_samples(40))
    from_store = Run(tmp_path / "store", store, "trainer.max_epochs=1").fit()
    source = f"+data.source={{_target_: {__name__}.InMemory, count: 40}}"
    in_memory = Run(tmp_path / "memory", Path("nowhere"), "trainer.max_epochs=1", source.replace("+", "")).fit()
    assert from_store.trainer.global_step == in_memory.trainer.global_step > 3
    for name, weight in from_store.weights.items():
        assert torch.equal(weight, in_memory.weights[name]), name
