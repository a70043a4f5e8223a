"""Features in Google Cloud Storage, by the real commands: trained on, damaged, and tokens that expire."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gcs_server import GcsServer, gcs_server
from object_stores import new_folder
from scripts import run_script
from stores import random_samples, save_store, write_store

from eagle3.errors import InputError
from eagle3.storage.folder import open_folder, write_file
from eagle3.storage.object_store import Bucket


@pytest.fixture(scope="module")
def google() -> Iterator[GcsServer]:
    with gcs_server() as (_, store):
        yield store


def shard_in(google: GcsServer, url: str) -> str:
    return min(key for key in google.blobs if key.startswith(url.removeprefix("gs://")) and key.endswith(".tar"))


def test_a_token_is_fetched_again_when_it_expires(google: GcsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(google, "lifetime_s", 1)
    folder, before = Bucket(new_folder("gs"), setting="data.path"), len(google.tokens)
    write_file(folder, "a.bin", b"1")
    time.sleep(1.1)
    assert bytes(folder.read("a.bin")) == b"1" and len(google.tokens) >= before + 2


def test_a_token_that_is_refused_is_one_line_that_names_the_credentials(
    google: GcsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(google, "tokens", frozenset())
    monkeypatch.setattr(google, "_token", lambda headers: (200, {}, b'{"access_token": "x", "expires_in": 3600}'))
    with pytest.raises(InputError, match=r"data\.path: gs://.*access is denied \(401 .*GOOGLE_APPLICATION_CREDENTIALS"):
        Bucket(new_folder("gs"), setting="data.path").read("a.bin")


def train(run: Path, data: object, *overrides: str) -> str:
    """Train two epochs; return the error line of a run that fails."""
    done = run_script(
        "train", f"data.path={data}", f"hydra.run.dir={run}", "trainer=cpu", "data.pack_tokens=48",
        "model.draft_vocab_size=16", "ttt_steps=3", "trainer.max_epochs=2", "callbacks.early_stopping=null", *overrides,
    )  # fmt: skip
    return done.stderr.splitlines()[-1] if done.returncode else ""


@pytest.mark.parametrize("order", ["shuffled", "streaming"])
@pytest.mark.slow
def test_a_training_from_google_is_that_from_disk(google: GcsServer, tmp_path: Path, order: str) -> None:
    samples, url = random_samples(60), new_folder("gs")
    save_store(open_folder(url, setting="features.path"), samples)
    stores = {"disk": str(write_store(tmp_path / "store", samples)), "google": url}
    weights: dict[str, Any] = {}
    for name, path in stores.items():
        assert train(tmp_path / name, f"'{path}'", f"data.order={order}") == ""
        last = torch.load(tmp_path / name / "checkpoints/last.ckpt", weights_only=True)
        weights[name] = last["state_dict"]
    assert all(torch.equal(tensor, weights["google"][name]) for name, tensor in weights["disk"].items())


def test_a_damaged_object_ends_training_with_its_name(google: GcsServer, tmp_path: Path) -> None:
    url = new_folder("gs")
    save_store(open_folder(url, setting="features.path"), random_samples(60), shard_bytes=10**9)
    shard = shard_in(google, url)
    content = google.blobs[shard].content
    google.put(f"gs://{shard}", content[:5000] + bytes([content[5000] ^ 1]) + content[5001:])
    line = train(tmp_path / "run", f"'{url}'")
    assert f"gs://{shard}" in line and "another sha256" in line and "is damaged and is refused" in line
