"""A head that fits its target: what it takes from the target, and the weights that it starts with."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from stores import DRAFT_VOCAB, HIDDEN, TARGET_CONFIG, VOCAB, in_float32, open_store, random_sample, write_store

from eagle3.features.store import FeatureStore
from eagle3.head.build import build_head, initialise
from eagle3.head.draft_head import DraftHead

SETTINGS: dict[str, Any] = {
    "kind": "eagle3",
    "draft_vocab_size": DRAFT_VOCAB,
    "default_draft_vocab_size": 8,
    "lm_head_from_target": True,
    "rope_parameters": None,
    "num_heads": None,
    "num_kv_heads": None,
    "head_dim": None,
    "intermediate_size": None,
    "fc_norm": False,
    "norm_output": False,
}


@pytest.fixture
def store(tmp_path: Path) -> FeatureStore:
    samples = [in_float32(random_sample([0] + [1] * 12, seed=i, sample_id=f"p{i}#0")) for i in range(40)]
    return open_store(write_store(tmp_path / "features", samples))


def test_what_is_not_set_is_the_targets(store: FeatureStore) -> None:
    head = build_head(source=store, **SETTINGS | {"intermediate_size": 40})
    config = head.config
    assert (config.hidden_size, config.vocab_size, config.draft_vocab_size) == (HIDDEN, VOCAB, DRAFT_VOCAB)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (4, 2, 8)
    assert config.rope_parameters == TARGET_CONFIG.rope_parameters
    assert (config.intermediate_size, config.num_captured_layers) == (40, 3)
    counts = store.answer_counts
    assert counts[head.draft_ids].min() >= max(set(counts.tolist()) - set(counts[head.draft_ids].tolist()), default=0)
    assert build_head(source=store, **SETTINGS | {"draft_vocab_size": None}).config.draft_vocab_size == 8
    by_default = build_head(source=store).config
    assert by_default.fc_norm and by_default.norm_output and by_default.intermediate_size == 24


def test_lm_head_starts_as_the_targets_rows_of_the_draft_vocabulary_if_asked_to(store: FeatureStore) -> None:
    _, lm_head = store.target_weights()
    head = build_head(source=store, **SETTINGS)
    assert torch.equal(head.lm_head.weight, lm_head[head.draft_ids])
    other = build_head(source=store, **SETTINGS | {"lm_head_from_target": False})
    assert not torch.equal(other.lm_head.weight, lm_head[other.draft_ids])


def test_weights_start_with_a_standard_deviation_of_one_over_the_root_of_their_inputs(store: FeatureStore) -> None:
    torch.manual_seed(0)
    config = replace(build_head(source=store, **SETTINGS).config, hidden_size=256, intermediate_size=64)
    head = DraftHead(config, torch.arange(DRAFT_VOCAB))
    initialise(head, store, lm_head_from_target=False)
    weights = {name: each.weight.detach() for name, each in head.named_modules() if isinstance(each, torch.nn.Linear)}
    assert len(weights) == 9
    for name, weight in weights.items():
        assert float(weight.std()) * math.sqrt(weight.shape[1]) == pytest.approx(1, rel=0.1), name
        assert abs(float(weight.mean())) * math.sqrt(weight.shape[1]) < 0.1, name
    assert all((parameter == 1).all() for name, parameter in head.named_parameters() if "norm" in name)
