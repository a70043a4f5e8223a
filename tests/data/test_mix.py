"""Rules and weights: what they leave out or repeat, the same in every process, counted, at any size."""

import logging
from collections import Counter
from dataclasses import replace
from typing import Any

import defaults
import numpy as np
import pytest
from feature_data import feature_data
from stores import in_float32, open_store, random_sample

from eagle3.data.datamodule import FeatureData
from eagle3.errors import InputError
from eagle3.features.index import parse_index
from eagle3.features.samples import IndexedShard, Samples
from eagle3.features.shards import ShardWriter
from eagle3.features.split import share_fractions, split_fraction
from eagle3.storage.folder import LocalFolder

NO_RULES = defaults.sample_filter()


def trained(data: FeatureData) -> list[tuple[str, str]]:
    planned = data.train_dataloader().part().packs
    return [(ref.store, ref.entry.id) for pack in planned for ref in pack.samples]


def names(samples: Samples) -> list[tuple[str, str]]:
    return [*samples.names()]


# --- rules -----------------------------------------------------------------------------------------------------------


def test_rules_leave_what_fits_them_on_both_sides_of_the_split(store_path):
    rules = defaults.sample_filter(min_tokens=8, max_tokens=16, prompt_fraction=0.7)
    everything = open_store(store_path).samples
    fit = {
        ref.entry.id
        for ref in everything
        if 8 <= ref.entry.tokens <= 16 and split_fraction(ref.entry.id) * 2**20 % 1 < 0.7
    }
    data = feature_data(str(store_path), rules=rules)
    sides = [{name for _, name in names(side)} for side in (data.train_samples, data.val_samples)]
    assert sides[0] | sides[1] == fit and not sides[0] & sides[1] and 5 < len(fit) < 50


def test_what_is_left_out_is_counted_by_its_first_rule(store_path, caplog):
    lengths = [ref.entry.tokens for ref in open_store(store_path).samples]
    short, long = sum(length < 8 for length in lengths), sum(length > 16 for length in lengths)
    with caplog.at_level(logging.INFO):
        feature_data(str(store_path), rules=replace(NO_RULES, min_tokens=8, max_tokens=16))
    assert f"{60 - short - long} of 60 samples are used" in caplog.text
    assert f"left out: {short} by data.min_tokens=8, {long} by data.max_tokens=16" in caplog.text
    caplog.clear()
    feature_data(str(store_path))
    assert "left out" not in caplog.text


def test_a_share_keeps_a_prompt_whole_grows_with_itself_and_ignores_the_split():
    prompts = np.array([split_fraction(f"p{number}#0") for number in range(20_000)])
    assert [split_fraction(f"p{number}#1") for number in range(50)] == prompts[:50].tolist()
    drawn = share_fractions(prompts)
    assert drawn.min() >= 0 and drawn.max() < 1
    for share in (0.1, 0.5, 0.9):
        assert (drawn < share).mean() == pytest.approx(share, abs=0.01)
        assert (drawn[prompts < 0.05] < share).mean() == pytest.approx(share, abs=0.06)  # of those that validate
    assert abs(np.corrcoef(prompts, drawn)[0, 1]) < 0.02


def mixed_shard(storage: LocalFolder, number: int, sources: list[str]) -> IndexedShard:
    """A shard of six samples, of sources in turn; every third has an answer that was cut."""
    writer = ShardWriter(storage, number)
    for place in range(6):
        sample = in_float32(random_sample([0, 0, 1, 1, 1], sample_id=f"{number}-{place}"))
        writer.add(sample, source=sources[place % len(sources)], whole=place % 3 > 0)
    index = parse_index(memoryview(writer.finish("m")), source="index", remedy="")
    return IndexedShard(storage.location, writer.name, index)


@pytest.mark.parametrize("listed", [False, True])
def test_rules_by_source_and_by_cut_answers(tmp_path, listed):
    storage = LocalFolder(tmp_path)
    shards = [mixed_shard(storage, 0, ["code", "maths"]), mixed_shard(storage, 1, ["maths", "wörter", "code"])]
    samples = Samples.of_shards(shards)
    if listed:
        samples = Samples.of([*samples])
    samples = samples.take(np.arange(len(samples))[::-1])

    def left(**rules: Any) -> set[str]:
        return {name for _, name in names(replace(NO_RULES, **rules).select(samples, "elsewhere"))}

    assert left(only_sources=["maths"]) == {"0-1", "0-3", "0-5", "1-0", "1-3"}
    assert left(only_sources=["wörter", "code"]) == {"0-0", "0-2", "0-4", "1-1", "1-4", "1-2", "1-5"}
    assert left(finished_only=True) == {f"{shard}-{place}" for shard in (0, 1) for place in (1, 2, 4, 5)}
    assert left(only_sources=["maths"], finished_only=True) == {"0-1", "0-5"}
    with pytest.raises(InputError, match=r"data\.only_sources=.* prose; the sources are code, maths"):
        left(only_sources=["prose", "code"])


# --- weights ---------------------------------------------------------------------------------------------------------


def test_each_store_gives_its_weight_of_samples_and_none_more_often_than_another(two_stores):
    data = feature_data(two_stores, weights=[2.5, 0.4])
    there = Counter(store for store, _ in names(data.train_samples))
    times = Counter(trained(data))
    for store, weight in zip(two_stores, (2.5, 0.4), strict=True):
        mine = [times[name] for name in names(data.train_samples) if name[0] == store]
        assert sum(mine) == round(weight * there[store]) and set(mine) == {int(weight), int(weight) + 1}
    assert set(times) <= set(names(data.train_samples))


def test_each_epoch_draws_again_and_all_epochs_together_take_every_sample(two_stores):
    epochs = [Counter(trained(feature_data(two_stores, weights=[1, 0.5], current_epoch=epoch))) for epoch in range(12)]
    assert epochs[0] == Counter(trained(feature_data(two_stores, weights=[1, 0.5]))) != epochs[1]
    assert set().union(*epochs) == set(names(feature_data(two_stores).train_samples))


def test_weights_of_one_change_nothing_and_no_weights_change_validation(two_stores):
    plain, ones, others = (feature_data(two_stores, weights=weights) for weights in (None, [1, 1], [3, 0.1]))
    assert trained(plain) == trained(ones) != trained(others)
    assert names(plain.val_samples) == names(others.val_samples)


def test_weights_of_other_stores_or_that_leave_nothing_are_named(two_stores):
    with pytest.raises(InputError, match=r"has 3 weights, data.path=.* 2 stores"):
        feature_data(two_stores, weights=[1.0, 1.0, 0.5])
    data = feature_data(two_stores, weights=[0.001, 0.001])
    with pytest.raises(InputError, match=r"data\.weights=\[0\.001, 0\.001\] leave no sample"):
        len(data.train_dataloader())
