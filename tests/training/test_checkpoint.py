"""Checkpoints: whole or refused."""

import io
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from exported_head import FINGERPRINT, random_head, save_checkpoint, tiny_facts, tiny_target
from object_stores import new_folder, s3_server
from scripts import run_script
from stores import random_samples, write_store

from eagle3.errors import InputError
from eagle3.storage.folder import write_file
from eagle3.storage.place import open_folder
from eagle3.training.checkpoint import AtomicCheckpointIO, local_checkpoint, read_checkpoint


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("run") / "last.ckpt"
    save_checkpoint(path, random_head(tiny_facts(tiny_target()), FINGERPRINT))
    return path.read_bytes()


def refusal(path: Path) -> str:
    with pytest.raises(InputError) as refused:
        read_checkpoint(path, setting=f"ckpt_path={path}")
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_a_checkpoint_is_one_that_torch_and_lightning_read(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    path.write_bytes(content)
    read = read_checkpoint(path, setting="x")
    by_torch = torch.load(path, weights_only=True)
    by_lightning = AtomicCheckpointIO().load_checkpoint(path, weights_only=True)
    for name, weight in read.weights.items():
        assert torch.equal(by_torch["state_dict"][name], weight)
        assert torch.equal(by_lightning["state_dict"][name], weight)


def test_no_flipped_byte_and_no_cut_passes(content: bytes, tmp_path: Path) -> None:
    drawn, path = random.Random(0), tmp_path / "last.ckpt"
    for number in range(60):
        place = drawn.randrange(len(content))
        flipped = bytes([content[place] ^ 1 << drawn.randrange(8)])
        path.write_bytes(content[:place] + (flipped + content[place + 1 :] if number % 6 else b""))
        assert f"{path} is damaged, or no checkpoint of a draft head; give another one" in refusal(path)


@pytest.mark.parametrize("other", [b"", b"epoch,loss\n0,1.5\n", b"\x80\x04N.", b"PK\x03\x04"])
def test_what_is_no_checkpoint_is_refused(other: bytes, tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    path.write_bytes(other)
    assert "is damaged, or no checkpoint of a draft head" in refusal(path)


def test_what_torch_alone_saved_is_refused(tmp_path: Path) -> None:
    """It has no checksum."""
    buffer, path = io.BytesIO(), tmp_path / "last.ckpt"
    torch.save({"state_dict": {}}, buffer)
    path.write_bytes(buffer.getvalue())
    assert "is damaged, or no checkpoint of a draft head" in refusal(path)
    AtomicCheckpointIO().save_checkpoint({"state_dict": {}}, path)
    assert "is a checkpoint of something else than a draft head" in refusal(path)


def test_a_run_elsewhere_goes_on_from_copies_in_a_bucket(tmp_path: Path) -> None:
    store = write_store(tmp_path / "store", random_samples(60))

    def train(run: str, *overrides: str) -> dict[str, Any]:
        done = run_script(
            "train", f"data.path={store}", f"hydra.run.dir={tmp_path}/{run}", "trainer=cpu", "data.pack_tokens=48",
            "model.draft_vocab_size=16", "ttt_steps=3", "callbacks.early_stopping=null", *overrides,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return torch.load(tmp_path / run / "checkpoints/last.ckpt", weights_only=True)

    with s3_server():
        copies = f"checkpoint_copies={new_folder()}"
        first = train("first", "trainer.max_epochs=1", copies, "ckpt_path=auto")  # begins: nothing is there
        bucket = open_folder(copies.partition("=")[2], setting="test")
        here = {path.name: path.read_bytes() for path in (tmp_path / "first/checkpoints").iterdir()}
        assert {name: bytes(bucket.read(name)) for name in bucket.names("*")} == here and len(here) == 2
        train("second", "trainer.max_epochs=2", copies, "ckpt_path=auto")
        third = train("third", "trainer.max_epochs=3", f"ckpt_path={copies.partition('=')[2]}/last.ckpt")
        assert {path.name for path in (tmp_path / "second/checkpoints").iterdir()} == {*bucket.names("*")}
    assert third["global_step"] == 3 * first["global_step"] and third["epoch"] == 3


def test_a_checkpoint_that_is_not_in_the_bucket_is_named_with_those_that_are(tmp_path: Path) -> None:
    with s3_server():
        bucket = open_folder(new_folder(), setting="test")
        write_file(bucket, "best-step3.ckpt", b"1")
        with pytest.raises(InputError, match=r"last\.ckpt does not exist \(there is best-step3\.ckpt\)"):
            local_checkpoint(f"{bucket.location}/last.ckpt", tmp_path, None)
        assert local_checkpoint("auto", tmp_path, bucket.location) is None
        assert local_checkpoint("RUN/last.ckpt", tmp_path, None) == "RUN/last.ckpt"
