"""Checkpoints: whole or refused."""

import io
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3.errors import InputError
from eagle3.training.checkpoint import AtomicCheckpointIO
from eagle3.training.checkpoint_file import read_checkpoint


def refusal(path: Path) -> str:
    with pytest.raises(InputError) as refused:
        read_checkpoint(path, setting=f"ckpt_path={path}")
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_a_checkpoint_is_one_that_torch_and_lightning_read(checkpoint):
    read = read_checkpoint(checkpoint, setting="x")
    by_torch = torch.load(checkpoint, weights_only=True)
    by_lightning = AtomicCheckpointIO(copies=None).load_checkpoint(checkpoint, weights_only=True)
    for name, weight in read.weights.items():
        assert torch.equal(by_torch["state_dict"][name], weight)
        assert torch.equal(by_lightning["state_dict"][name], weight)


def test_no_flipped_byte_and_no_cut_passes(checkpoint, tmp_path):
    drawn, content, path = random.Random(0), checkpoint.read_bytes(), tmp_path / "last.ckpt"
    for number in range(24):
        place = drawn.randrange(len(content))
        flipped = bytes([content[place] ^ 1 << drawn.randrange(8)])
        path.write_bytes(content[:place] + (flipped + content[place + 1 :] if number % 6 else b""))
        assert f"{path} is damaged, or not a checkpoint of a draft head; give another one" in refusal(path)
    best = path.with_name("best-step3-accept1.2.ckpt")
    best.write_bytes(content)
    assert refusal(path).endswith(f"; move it away and give {best}")


def test_what_is_no_checkpoint_is_refused(tmp_path):
    buffer, path = io.BytesIO(), tmp_path / "last.ckpt"
    torch.save({"state_dict": {}}, buffer)  # without a checksum
    for other in (b"", b"epoch,loss\n0,1.5\n", b"\x80\x04N.", b"PK\x03\x04", buffer.getvalue()):
        path.write_bytes(other)
        assert "is damaged, or not a checkpoint of a draft head" in refusal(path)
    AtomicCheckpointIO(copies=None).save_checkpoint({"state_dict": {}}, path)
    assert torch.serialization.get_crc32_options()  # of what others save in this process
    assert "is a checkpoint of something other than a draft head" in refusal(path)


def test_a_copy_is_the_same_file_and_is_deleted_with_it(tmp_path):
    path, copy = tmp_path / "run/best.ckpt", tmp_path / "copies/best.ckpt"
    checkpoint_io = AtomicCheckpointIO(copies=str(copy.parent))
    checkpoint_io.save_checkpoint({"state_dict": {}}, path)
    assert copy.read_bytes() == path.read_bytes()
    checkpoint_io.remove_checkpoint(path)
    assert not path.exists() and not copy.exists()


class RunsWhenRead:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_no_object_of_a_checkpoint_runs_code(tmp_path):
    ran, path = tmp_path / "ran", tmp_path / "last.ckpt"
    AtomicCheckpointIO(copies=None).save_checkpoint({"state_dict": RunsWhenRead(ran)}, path)
    assert f"{path} has objects that may run code when read, and is not read" in refusal(path)
    assert not ran.exists()
