"""A head that fits its target: what it takes from the target or from a head to start from, and its first weights."""

import logging
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import defaults
import pytest
import torch
from heads import make_head
from stores import DRAFT_VOCAB, HIDDEN, TARGET_CONFIG, VOCAB, in_float32, open_store, random_sample, write_store

from eagle3.errors import InputError
from eagle3.features.store import FeatureStore
from eagle3.head.build import StartHead, build_head, initialise
from eagle3.head.draft_head import DraftHead
from eagle3.head.draft_vocab import extended

SIZES = ("num_heads", "num_kv_heads", "head_dim", "intermediate_size")
SETTINGS: dict[str, Any] = {
    **{"draft_vocab_size": DRAFT_VOCAB, "default_draft_vocab_size": 8, "fc_norm": False, "norm_output": False},
    **{"kind": "eagle3", "lm_head_from_target": True, "train_lm_head": True},
    **dict.fromkeys(("rope_parameters", *SIZES)),  # None, as in conf/model/eagle3.yaml
}


@pytest.fixture
def store(tmp_path: Path) -> FeatureStore:
    samples = [in_float32(random_sample([0] + [1] * 12, seed=i, sample_id=f"p{i}#0")) for i in range(40)]
    return open_store(write_store(tmp_path / "features", samples))


def test_what_is_not_set_is_the_targets(store):
    head = build_head(source=store, **SETTINGS | {"intermediate_size": 40})
    config = head.config
    assert (config.hidden_size, config.vocab_size, config.draft_vocab_size) == (HIDDEN, VOCAB, DRAFT_VOCAB)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (4, 2, 8)
    assert config.rope_parameters == TARGET_CONFIG.rope_parameters
    assert (config.intermediate_size, config.num_captured_layers) == (40, 3)
    counts = store.answer_counts
    assert counts[head.draft_ids].min() >= max(set(counts.tolist()) - set(counts[head.draft_ids].tolist()), default=0)
    assert build_head(source=store, **SETTINGS | {"draft_vocab_size": None}).config.draft_vocab_size == 8
    by_default = defaults.part("model").build(source=store).config
    assert by_default.fc_norm and by_default.norm_output and by_default.intermediate_size == 24


def test_lm_head_starts_as_the_targets_rows_of_the_draft_vocabulary_if_asked_to(store):
    _, lm_head = store.target_weights()
    head = build_head(source=store, **SETTINGS)
    assert torch.equal(head.lm_head.weight, lm_head[head.draft_ids])
    other = build_head(source=store, **SETTINGS | {"lm_head_from_target": False})
    assert not torch.equal(other.lm_head.weight, lm_head[other.draft_ids])


def test_a_fixed_lm_head_is_the_targets_rows_without_a_gradient(store):
    head = build_head(source=store, **SETTINGS | {"train_lm_head": False})
    assert [name for name, each in head.named_parameters() if not each.requires_grad] == ["lm_head.weight"]
    with pytest.raises(InputError, match=r"model\.train_lm_head=false .*\.lm_head_from_target=false .* to true"):
        build_head(source=store, **SETTINGS | {"lm_head_from_target": False, "train_lm_head": False})


def test_weights_start_with_a_standard_deviation_of_one_over_the_root_of_their_inputs(store):
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


# --- a head to start from ---------------------------------------------------------------------------------------------

FREE = SETTINGS | {"draft_vocab_size": None, "fc_norm": None, "norm_output": None}  # as in conf/model/eagle3.yaml


@pytest.fixture
def start() -> StartHead:
    head = make_head(norm_before_fc=True, intermediate_size=40, num_kv_heads=4, rms_norm_eps=1e-3).float()
    return StartHead("HEAD", head, [2, 4, 5], {"model.safetensors": "s"})


def test_what_is_not_set_is_the_heads_and_every_weight_is_taken_over(store, start):
    head = build_head(source=store, start=start, **FREE)
    assert head.config == start.head.config
    torch.testing.assert_close(head.state_dict(), start.head.state_dict(), rtol=0, atol=0)
    assert all(parameter.requires_grad for parameter in head.parameters())


@pytest.mark.parametrize("lm_head_from_target", [True, False])
def test_new_tokens_join_those_of_the_head_and_start_as_configured(lm_head_from_target, store, start, caplog):
    caplog.set_level(logging.INFO)
    settings = FREE | {"default_draft_vocab_size": 34, "lm_head_from_target": lm_head_from_target}
    head = build_head(source=store, start=start, **settings)
    assert "init_from=HEAD: the draft vocabulary of 34 keeps 30 of the head's 30 tokens, 4 are new" in caplog.text
    assert "draft vocabulary of 34 tokens: with a multiple of 64 a GPU trains it faster" in caplog.text
    old = torch.isin(head.draft_ids, start.head.draft_ids)
    assert torch.equal(head.draft_ids[old], start.head.draft_ids)
    assert torch.equal(head.lm_head.weight[old], start.head.lm_head.weight)
    _, lm_head = store.target_weights()
    assert torch.equal(head.lm_head.weight[~old], lm_head[head.draft_ids[~old]]) is lm_head_from_target
    assert torch.equal(head.draft_ids, extended(start.head.draft_ids, store.answer_counts, 34))


def test_a_draft_vocabulary_of_a_set_size_is_that_of_the_answers_and_rows_are_taken_over_by_token(store, start):
    order = torch.randperm(DRAFT_VOCAB, generator=torch.Generator().manual_seed(0))
    shuffled = DraftHead(start.head.config, start.head.draft_ids[order])
    head = build_head(source=store, start=replace(start, head=shuffled), **FREE | {"draft_vocab_size": 20})
    rebuilt = build_head(source=store, **FREE | {"draft_vocab_size": 20})
    assert torch.equal(head.draft_ids, rebuilt.draft_ids)
    kept = torch.isin(head.draft_ids, shuffled.draft_ids)
    assert 0 < kept.sum() < 20
    rows = [shuffled.draft_ids.tolist().index(token) for token in head.draft_ids[kept].tolist()]
    assert torch.equal(head.lm_head.weight[kept], shuffled.lm_head.weight[rows])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"fc_norm": True}, r"model\.fc_norm=True contradicts init_from=HEAD, whose head has False; leave it null"),
        ({"rope_parameters": {"rope_theta": 5.0}}, r"model\.rope_parameters={'rope_theta': 5.0} contradicts .* 100\.0"),
        ({"kind": "two_layer"}, r"model\.kind=two_layer: init_from=HEAD is of kind eagle3; set model\.kind to that"),
    ],
)
def test_a_setting_that_contradicts_the_head_is_refused(settings, message, store, start):
    with pytest.raises(InputError, match=message):
        build_head(source=store, start=start, **FREE | settings)


def test_settings_that_say_what_the_head_has_are_none_against_it(store, start):
    same = {"intermediate_size": 40, "norm_before_fc": True, "rope_parameters": {"rope_theta": 100.0}}
    assert build_head(source=store, start=start, **FREE | same).config == start.head.config


def test_a_head_of_another_target_or_other_layers_is_refused(store, start):
    head = DraftHead(replace(start.head.config, hidden_size=32), start.head.draft_ids)
    with pytest.raises(InputError, match=r"init_from=HEAD has hidden_size=32, the target of data\.path=.* has 16"):
        build_head(source=store, start=replace(start, head=head), **FREE)
    with pytest.raises(InputError, match=r"\[2, 5, 4\], data\.path=.* \[2, 4, 5\]; .* features\.capture_layers"):
        build_head(source=store, start=replace(start, capture_layers=[2, 5, 4]), **FREE)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_head": 4}, r"model\.num_head=4 is not a key of model\.kind=eagle3 \(did you mean model\.num_heads\?\)"),
        ({"train_lmhead": True}, r"model\.train_lmhead=true is not .* \(did you mean model\.train_lm_head\?\)"),
        ({"hidden_size": 32}, r"model\.hidden_size=32 is not a key of model\.kind=eagle3"),
    ],
)
def test_a_key_that_no_head_has_is_one_line(store, settings, message):
    with pytest.raises(InputError, match=message):
        build_head(source=store, **SETTINGS | settings)
