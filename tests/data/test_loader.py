"""Packs read ahead: in planned order whatever the readers do, errors at their place, and whole on the GPU."""

import time
from typing import Any

import pytest
import torch
from feature_data import feature_data
from stores import flip_a_bit, in_float32, random_sample, shard_path, write_store

from eagle3.data.loader import EpochPart, PackLoader
from eagle3.errors import InputError


@pytest.mark.parametrize(("readers", "prefetch"), [(2, 1), (3, 5)])
def test_packs_are_the_same_whatever_the_number_of_readers(store_path, readers, prefetch):
    alone = list(feature_data(str(store_path), readers=1).train_dataloader())
    together = list(feature_data(str(store_path), readers=readers, prefetch=prefetch).train_dataloader())
    assert len(alone) == len(together) > 10
    for one, other in zip(alone, together, strict=True):
        assert all(torch.equal(*pair) for pair in zip(one.tensors(), other.tensors(), strict=True))
        assert one.pack.token_bounds == other.pack.token_bounds and one.pack.sample_ids == other.pack.sample_ids
        assert one.pair_bounds == other.pair_bounds and one.pack.anchors_in_step == other.pack.anchors_in_step


def test_a_slow_reader_does_not_change_the_order_and_packs_count_when_handed_out():
    def load(number: Any) -> Any:
        time.sleep(0.05 if number % 2 == 0 else 0)
        return number

    loader = PackLoader(lambda: EpochPart(0, [*range(6)]), load, prefetch=3, readers=2)  # type: ignore[list-item]
    assert [(pack, loader.consumed) for pack in loader] == [(number, number + 1) for number in range(6)]


def test_a_damaged_sample_is_named_when_its_pack_is_due(store_path):
    loader = feature_data(str(store_path), readers=1, prefetch=1).train_dataloader()
    ref = loader.part().packs[3].samples[0]
    shard = store_path / ref.shard
    content = bytearray(shard.read_bytes())
    content[ref.entry.offset : ref.entry.offset + 8] = b"\xff" * 8
    shard.write_bytes(content)
    packs = iter(loader)
    with pytest.raises(InputError, match=rf"{ref.shard} cannot be read at sample {ref.entry.id}"):
        for number in range(4):
            assert next(packs).pack.sample_ids == tuple(ref.entry.id for ref in loader.part().packs[number].samples)
    assert loader.consumed == 3


def test_a_flipped_byte_is_refused_where_shards_are_verified(store_path):
    shard = shard_path(store_path, 0)
    flip_a_bit(shard)
    with pytest.raises(InputError, match=rf"{shard} has sha256 .*it is truncated or damaged and is refused"):
        feature_data(str(store_path), verify=True)


@pytest.mark.gpu
def test_packs_copied_while_the_gpu_computes_are_those_of_the_cpu(tmp_path):
    """The GPU lags behind the host, so that it reads packs whose Python objects are gone."""
    samples = [random_sample([0] * 300 + [1] * 700, seed=number, sample_id=f"p{number}#0") for number in range(24)]
    for sample in samples:
        vars(sample).update(vars(in_float32(sample)))
    store = write_store(tmp_path / "store", samples)
    device = torch.device("cuda", 0)
    data = feature_data(str(store), pack_tokens=2000, device="cuda:0")
    expected = [pack.to(device) for pack in feature_data(str(store), pack_tokens=2000).train_dataloader()]
    matrix = torch.randn(2048, 2048, device=device)
    wrong = torch.zeros((), dtype=torch.long, device=device)
    for _ in range(30):
        for pack, correct in zip(data.train_dataloader(), expected, strict=True):
            assert pack.pack.aux_hidden_states.device == device
            pack = data.transfer_batch_to_device(pack, device, 0)
            for _ in range(10):
                matrix = torch.nn.functional.normalize(matrix @ matrix)
            for tensor, expected_tensor in zip(pack.tensors(), correct.tensors(), strict=True):
                wrong += (tensor != expected_tensor).sum()
            del pack, tensor
    assert wrong.item() == 0
