"""An out_dir in a bucket, on a real S3 server: what a lost machine costs, and that nothing comes twice."""

import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from object_stores import new_folder, s3_server
from scripts import Script
from stores import ASSETS, open_store

import eagle3.storage.out_dir
from eagle3.errors import InputError
from eagle3.features.joined import open_source
from eagle3.storage.files import read_jsonl
from eagle3.storage.out_dir import RemoteOutDir, open_out_dir, read_state, working_copy
from eagle3.storage.place import open_folder

BLOCK = 1000


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with s3_server() as url:
        yield url


@pytest.fixture
def url(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(eagle3.storage.out_dir, "BLOCK", BLOCK)
    monkeypatch.chdir(tmp_path)
    return new_folder()


def there(url: str, stage: str) -> list[str]:
    return open_folder(f"{url}/{stage}", setting="test").names("*")


def write(copy: RemoteOutDir, **files: bytes) -> None:
    folder = copy.folder / "responses"
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / f"{name}.jsonl").write_bytes(content)


def elsewhere(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RemoteOutDir:
    """Bring what the bucket holds to another machine's folder."""
    (tmp_path / "elsewhere").mkdir(exist_ok=True)
    monkeypatch.chdir(tmp_path / "elsewhere")
    copy = RemoteOutDir(url, every_s=0)
    copy.bring()
    return copy


def read(copy: RemoteOutDir) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (copy.folder / "responses").iterdir()}


def test_files_that_grow_shrink_and_change_are_what_another_machine_finds(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn, copy = random.Random(0), RemoteOutDir(url, every_s=0)
    copy.bring()
    rows = b""
    for size in (10, 1500, 1500, 3990, 2, 0, 2500):
        rows = rows[:-700] if size == 0 else rows + drawn.randbytes(size)  # a restart cuts off what is incomplete
        errors = drawn.randbytes(30)
        write(copy, responses=rows, errors=errors)
        copy.save_if_due()
        other = elsewhere(url, tmp_path, monkeypatch)
        assert read(other) == {"responses.jsonl": rows, "errors.jsonl": errors}
        monkeypatch.chdir(tmp_path)
        blocks = [name for name in there(url, "responses") if name.startswith("block-")]
        assert len(blocks) == -(-len(rows) // BLOCK) + 1  # no block of before is left
    write(copy, responses=rows, errors=b"")
    copy.finish("responses")
    assert there(url, "responses") == ["errors.jsonl", "responses.jsonl"]
    assert read(elsewhere(url, tmp_path, monkeypatch)) == {"responses.jsonl": rows, "errors.jsonl": b""}


def test_what_is_whole_in_the_bucket_is_not_sent_again(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    copy, sent = RemoteOutDir(url, every_s=0), []
    write_file = eagle3.storage.out_dir.write_file
    monkeypatch.setattr(
        eagle3.storage.out_dir,
        "write_file",
        lambda *given, **more: sent.append(given[1]) or write_file(*given, **more),
    )
    copy.bring()
    rows = random.Random(0).randbytes(5 * BLOCK)
    write(copy, responses=rows)
    copy.save()
    assert len(sent) == 6
    sent.clear()
    with (copy.folder / "responses/responses.jsonl").open("ab") as file:
        file.write(b"more")
    copy.save()
    assert [name.partition("-")[0] for name in sent] == ["block", "state"]


@pytest.mark.parametrize("ended", [False, True])
@pytest.mark.parametrize("answered_before", [False, True])
def test_of_two_processes_the_earlier_is_found_out(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended: bool, answered_before: bool
) -> None:
    first = RemoteOutDir(url, every_s=0)
    first.bring()
    write(first, responses=b"1")
    if answered_before:
        first.save()
    second = elsewhere(url, tmp_path, monkeypatch)
    with second.saving():
        if not ended:
            monkeypatch.chdir(tmp_path)
            with pytest.raises(InputError, match=r"out_dir=s3://.*: another process answers for it, or has answered"):
                first.save()
            monkeypatch.chdir(tmp_path / "elsewhere")
        write(second, responses=b"22")
    if ended:
        second.finish("responses")
        monkeypatch.chdir(tmp_path)
        with pytest.raises(InputError, match=r"out_dir=s3://.*: another process answers for it, or has answered"):
            first.save()
    assert read(elsewhere(url, tmp_path, monkeypatch)) == {"responses.jsonl": b"22"}


@pytest.mark.parametrize("damage", [lambda state: state.replace(b"block", b"blokc"), lambda state: state[:-40]])
def test_a_damaged_state_is_refused(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[bytes], bytes]
) -> None:
    copy = RemoteOutDir(url, every_s=0)
    copy.bring()
    write(copy, responses=b"rows")
    copy.save()
    eagle3.storage.out_dir.write_file(
        copy.responses, "state-000001.json", damage(bytes(copy.responses.read("state-000001.json")))
    )
    with pytest.raises(InputError, match=r"state-000001.json: .*; delete it; the answers that it names are then"):
        elsewhere(url, tmp_path, monkeypatch)


@pytest.mark.parametrize("place", ["s3://", "s3:///", "s3:///folder"])
def test_a_url_without_its_bucket_is_no_local_folder(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=r"out_dir=s3:///.* must be a local folder, or a URL of a bucket and a folder"):
        open_out_dir(place, every_s=1)
    assert not [*tmp_path.iterdir()]


def test_a_local_folder_needs_no_saving(tmp_path: Path) -> None:
    out_dir = open_out_dir(str(tmp_path), every_s=0)
    (tmp_path / "row").touch()
    out_dir.bring()
    with out_dir.saving():
        out_dir.save_if_due()
    out_dir.finish("responses")
    assert (out_dir.folder, out_dir.features) == (tmp_path, None) and [*tmp_path.iterdir()] == [tmp_path / "row"]


def test_a_damaged_block_is_refused(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = RemoteOutDir(url, every_s=0)
    copy.bring()
    write(copy, responses=b"rows")
    copy.save()
    [block] = [name for name in there(url, "responses") if name.startswith("block-")]
    eagle3.storage.out_dir.write_file(copy.responses, block, b"rosw")
    with pytest.raises(InputError, match="the file is damaged and is refused"):
        elsewhere(url, tmp_path, monkeypatch)


def test_a_machine_that_is_lost_costs_some_seconds_and_another_ends_the_stages(server: str, tmp_path: Path) -> None:
    lines = (ASSETS / "prompts" / "train.jsonl").read_text().splitlines(keepends=True)[:120]
    (tmp_path / "prompts.jsonl").write_text("".join(lines))
    url = new_folder()

    def settings(out_dir: str) -> list[str]:
        return [
            f"target.path={ASSETS}/tiny", "target.device=cpu",
            f"prompts.path={tmp_path}/prompts.jsonl", "prompts/privacy=off", f"out_dir={out_dir}", "save_every_s=0.01",
            "responses.max_new_tokens=16", "answers.batch_size=4", "answers.window=4", "features.shard_mb=1",
        ]  # fmt: skip

    def started(where: str, out_dir: str) -> Script:
        (tmp_path / where).mkdir()
        return Script("precompute", *settings(out_dir), cwd=tmp_path / where, own_session=True)

    lost = started("lost", url)
    while not any(name.startswith("state-000003") for name in there(url, "responses")) and lost.poll() is None:
        time.sleep(0.05)
    assert lost.poll() is None, lost.communicate()
    os.killpg(lost.pid, signal.SIGKILL)
    lost.communicate()
    saved = read_state(open_folder(f"{url}/responses", setting="test"))[1].files
    assert "responses.jsonl" in saved and "manifest.json" in saved
    for where, out_dir in (("other", url), ("local", str(tmp_path / "data"))):
        done = started(where, out_dir)
        assert done.communicate()[1] is not None and done.returncode == 0
    assert there(url, "prompts") == sorted(
        path.name for path in (tmp_path / "data/prompts").iterdir() if path.is_file() and path.name[0] != "."
    )
    assert there(url, "responses") == ["errors.jsonl", "manifest.json", "responses.jsonl"]
    here = read_jsonl(tmp_path / "data/responses/responses.jsonl")
    other = read_jsonl(tmp_path / "other" / working_copy(url) / "responses/responses.jsonl")
    rows, others = ({row["id"]: (row["input_ids"], row["turns"]) for row in each} for each in (here, other))
    assert rows == others and len(rows) > 100
    remote, local = open_source(f"{url}/features"), open_store(tmp_path / "data/features")
    samples = {ref.entry.id: ref for ref in remote.samples}
    assert samples.keys() == {ref.entry.id for ref in local.samples}
    for ref in local.samples:
        assert torch.equal(local.read(ref).input_ids, remote.read(samples[ref.entry.id]).input_ids)
    assert json.loads((tmp_path / "data/responses/manifest.json").read_text())["complete"]
    log = tmp_path / "other" / working_copy(url) / "logs/precompute.log"
    assert "responses: 3 files are in" in log.read_text()
