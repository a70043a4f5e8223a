"""Packs read ahead: in planned order whatever the readers do, errors at their place, and whole on the GPU."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from stores import random_sample, random_samples, write_store

from eagle3.data.datamodule import FeatureData
from eagle3.data.loader import PackLoader
from eagle3.data.pack import Pack, pack_samples
from eagle3.errors import InputError
from eagle3.features.loss_mask import AllTurns


def data_of(store: Path, *, readers: int = 2, prefetch: int = 2, pack_tokens: int = 48, device: str = "cpu") -> Any:
    data = FeatureData(
        path=str(store),
        pack_tokens=pack_tokens,
        val_fraction=0.05,
        limit_samples=None,
        prefetch=prefetch,
        readers=readers,
        verify=False,
        seed=0,
        ttt_steps=3,
        loss_mask=AllTurns(),
    )
    data.trainer = SimpleNamespace(  # type: ignore[assignment]
        current_epoch=0,
        accumulate_grad_batches=1,
        world_size=1,
        global_rank=0,
        strategy=SimpleNamespace(root_device=torch.device(device)),
    )
    data.setup("fit")
    return data


def assert_equal(one: Pack, other: Pack) -> None:
    for name, value in vars(one).items():
        same = torch.equal(value, getattr(other, name)) if torch.is_tensor(value) else value == getattr(other, name)
        assert same, name


@pytest.mark.parametrize(("readers", "prefetch"), [(2, 2), (2, 1), (3, 5)])
def test_packs_are_the_same_whatever_the_number_of_readers(store_path: Path, readers: int, prefetch: int) -> None:
    alone = list(data_of(store_path, readers=1).train_dataloader())
    together = list(data_of(store_path, readers=readers, prefetch=prefetch).train_dataloader())
    assert len(alone) == len(together) > 10
    for one, other in zip(alone, together, strict=True):
        assert_equal(one, other)


def test_a_slow_reader_does_not_change_the_order_and_packs_count_when_handed_out() -> None:
    def load(number: Any) -> Any:
        time.sleep(0.05 if number % 2 == 0 else 0)
        return number

    loader = PackLoader([*range(6)], load, prefetch=3, readers=2, epoch=0)  # type: ignore[list-item]
    assert [(pack, loader.consumed) for pack in loader] == [(number, number + 1) for number in range(6)]


def test_a_damaged_sample_is_named_when_its_pack_is_due(store_path: Path) -> None:
    data = data_of(store_path)
    loader = data.train_dataloader()
    ref = loader.planned[3].samples[0]
    shard = store_path / ref.shard
    content = bytearray(shard.read_bytes())
    content[ref.entry.offset : ref.entry.offset + 8] = b"\xff" * 8
    shard.write_bytes(content)
    packs = iter(loader)
    assert [len(next(packs).sample_ids) for _ in range(3)] == [len(plan.samples) for plan in loader.planned[:3]]
    with pytest.raises(InputError, match=rf"{ref.shard} cannot be read at sample {ref.entry.id}"):
        next(packs)
    assert loader.consumed == 3


@pytest.mark.gpu
def test_pinned_packs_are_equal() -> None:
    samples = random_samples(5)
    pinned = pack_samples(samples, ttt_steps=3, pin=True)
    assert pinned.aux.is_pinned() and pinned.last.is_pinned()
    assert_equal(pinned, pack_samples(samples, ttt_steps=3))


@pytest.mark.gpu
def test_packs_copied_while_the_gpu_computes_are_those_of_the_cpu(tmp_path: Path) -> None:
    """The GPU lags behind the host, so that it reads packs whose Python objects are gone."""
    samples = [random_sample([0] * 300 + [1] * 700, seed=number, sample_id=f"p{number}#0") for number in range(24)]
    for sample in samples:
        vars(sample).update(aux=sample.aux_hidden_states.float(), last=sample.last_hidden_state.float())
    store = write_store(tmp_path / "store", samples)
    device = torch.device("cuda", 0)
    data = data_of(store, pack_tokens=2000, device="cuda:0")
    expected = [pack.to(device) for pack in data_of(store, pack_tokens=2000).train_dataloader()]
    matrix = torch.randn(2048, 2048, device=device)
    wrong = torch.zeros((), dtype=torch.long, device=device)
    for _ in range(30):
        for pack, correct in zip(data.train_dataloader(), expected, strict=True):
            assert pack.aux.device == device
            pack = data.transfer_batch_to_device(pack, device, 0)
            for _ in range(10):
                matrix = torch.nn.functional.normalize(matrix @ matrix)
            for name, tensor in pack.tensors().items():
                wrong += (tensor != getattr(correct, name)).sum()
            del pack, tensor
    assert wrong.item() == 0
