"""Features in a bucket, on servers for S3 and Google behind a proxy that puts faults in between."""

import hashlib
import os
import re
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
from object_stores import SECRET, FaultyProxy, RunningStore, faulty_proxy, new_folder, running_store
from stores import random_samples, save_store, write_store
from training_runs import LIGHTNING_WARNS, Run

from eagle3.errors import InputError
from eagle3.features.store import FeatureStore
from eagle3.storage import object_store
from eagle3.storage.folder import open_folder, write_file
from eagle3.storage.object_store import PART, Bucket, Waiting

pytestmark = LIGHTNING_WARNS
ONE_EPOCH = "trainer.max_epochs=1"


@pytest.fixture(scope="module", params=["s3", "gs"])
def server(request: pytest.FixtureRequest) -> Iterator[RunningStore]:
    with running_store(request.param) as store:
        yield store


@pytest.fixture
def url(server: RunningStore) -> str:
    return new_folder(server.scheme)


@pytest.fixture
def proxy(server: RunningStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    with faulty_proxy(server.url) as between:
        monkeypatch.setenv(server.endpoint, between.url)
        yield between


def bucket(url: str, **settings: int) -> Bucket:
    return Bucket(url, setting="data.path", **settings)


MS = timedelta(milliseconds=1)
CONTENT = os.urandom(3 * PART + 12345)


@pytest.mark.parametrize("fault", ["503", "half"])
def test_reading_and_writing_come_through_faults(proxy, url, fault):
    """Every second request fails; what arrives is what was sent."""
    folder = bucket(url)
    seen: set[tuple[str, str]] = set()

    def first_of_each(number: int, method: str, path: str) -> str:
        new = (method, path) not in seen
        seen.add((method, path))
        return fault if new and (fault != "half" or method == "GET") else "pass"

    proxy.fault = first_of_each
    upload = folder.create("big.bin")
    upload.write(CONTENT)
    upload.commit()
    write_file(folder, "small.json", b"{}", instead_of=None)
    assert bytes(folder.read("big.bin")) == CONTENT
    assert bytes(folder.read("big.bin", 5, PART + 17)) == CONTENT[5 : PART + 17]
    assert bytes(folder.read("big.bin", 5, 17)) == CONTENT[5:17]
    assert bytes(folder.read("small.json")) == b"{}"
    assert folder.names("*") == ["big.bin", "small.json"] and folder.size("big.bin") == len(CONTENT)


def test_a_conditional_write_whose_answer_was_lost_has_succeeded(proxy, url):
    turns = iter(["lost"])
    proxy.fault = lambda number, method, path: next(turns, "pass")
    write_file(bucket(url), "a.json", b"{}", instead_of=None)
    assert bytes(bucket(url).read("a.json")) == b"{}" and len(proxy.requests) > 2


def test_parts_go_up_while_the_next_is_made_and_nothing_is_there_before_the_end(server, proxy, url):
    folder = bucket(url)
    upload = folder.create("big.bin")
    upload.write(CONTENT[: 2 * PART])
    upload.write(CONTENT[2 * PART :])
    waited = time.monotonic() + 20
    while not any(method == "PUT" for method, _ in proxy.requests) and time.monotonic() < waited:
        time.sleep(0.01)
    assert any(method == "PUT" for method, _ in proxy.requests)
    assert folder.names("*") == [] and len(server.unfinished_uploads()) == 1
    upload.discard()
    assert folder.names("*") == [] and server.unfinished_uploads() == []


@pytest.mark.parametrize("fault", ["429", "reset", "half"])
def test_what_stays_wrong_is_one_line_that_names_key_url_rule_and_the_fix(proxy, url, fault):
    folder = bucket(url, max_retries=2)
    write_file(folder, "a.bin", CONTENT[:1000])
    proxy.fault = lambda number, method, path: fault
    with pytest.raises(InputError) as refused:
        folder.read("a.bin", 0, 1000)
    said = str(refused.value)
    assert re.fullmatch(rf"data\.path: {folder.location}/a\.bin: .+; run the same command again .+", said), said
    assert ("429" in said) == (fault == "429") and len(proxy.requests) >= 2
    if fault != "half":
        with pytest.raises(InputError, match=r"data\.path: "):
            write_file(folder, "b.bin", b"1")


def test_an_outage_of_a_bucket_that_has_answered_is_waited_for_with_a_log_line(proxy, url, monkeypatch, caplog):
    """Its end comes after more requests than a bucket gets that has never answered."""
    monkeypatch.setattr(object_store, "BACKOFF", {"init_backoff": 10 * MS, "max_backoff": 20 * MS})
    monkeypatch.setattr(object_store, "waiting", Waiting(silence=0.1))
    monkeypatch.setattr(object_store, "_answered", set())  # all tests use one bucket
    folder = bucket(url)
    proxy.fault = lambda number, method, path: "503"
    with pytest.raises(InputError, match="after 10 retries"):
        folder.read("a.bin", 0, 10)
    proxy.fault = lambda number, method, path: "pass"
    write_file(folder, "a.bin", CONTENT[:1000])
    start = len(proxy.requests)
    proxy.fault = lambda number, method, path: "503" if number < start + 30 else "pass"
    assert bytes(folder.read("a.bin", 0, 10)) == CONTENT[:10]
    assert f"{url}/a.bin: still waiting after" in caplog.text
    proxy.fault = lambda number, method, path: "503"
    for retries in (20, 10):  # one request has waited for the store: the next ones do not
        with pytest.raises(InputError, match=f"after {retries} retries"):
            bucket(url, max_retries=20).read("a.bin", 0, 10)


def test_a_store_that_nobody_answers_for_is_one_line_without_secrets(server, monkeypatch):
    monkeypatch.setenv(server.endpoint, "http://127.0.0.1:9")
    with pytest.raises(InputError, match=rf"^data\.path: {server.scheme}://features/none/manifest\.json: ") as refused:
        FeatureStore(bucket(f"{server.scheme}://features/none", max_retries=1))
    assert SECRET not in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize("fault", ["wrong", "short"])
def test_bytes_that_came_wrong_are_asked_for_again_and_never_handed_out(proxy, url, fault):
    folder = bucket(url)
    write_file(folder, "a.bin", CONTENT[:1000])
    expected = hashlib.sha256(CONTENT[10:500]).hexdigest()
    turns = iter([fault, fault])
    proxy.fault = lambda number, method, path: next(turns, "pass")
    assert bytes(folder.read("a.bin", 10, 500, sha256=expected)) == CONTENT[10:500]
    proxy.fault = lambda number, method, path: fault
    with pytest.raises(InputError, match=r"data\.path: .*a\.bin: bytes 10 to .* another sha256 .* damaged"):
        folder.read("a.bin", 10, 500, sha256=expected)


@pytest.mark.parametrize(
    ("status", "message"),
    [
        ("400", r"access is denied \(400 .*GOOGLE_APPLICATION_CREDENTIALS"),
        ("403", r"access is denied \(403 .*GOOGLE_APPLICATION_CREDENTIALS"),
        ("404", r"404 Not Found.*; make the bucket, or correct its name"),
        ("301", r"is in another region; set AWS_DEFAULT_REGION to the bucket's region"),  # without a location
    ],
)
def test_what_a_bucket_refuses_is_one_line_with_a_fix(proxy, url, status, message):
    proxy.fault = lambda number, method, path: status
    with pytest.raises(InputError, match=rf"data\.path: .*{message}"):
        bucket(url).names("*")


def test_a_large_file_that_changes_while_it_is_read_is_no_mixture(server, proxy, url):
    folder = bucket(url)
    write_file(folder, "big.bin", CONTENT)

    def replace(number: int, method: str, path: str) -> str:
        if method == "GET" and number == start + 2:
            server.put(f"{url}/big.bin", CONTENT[::-1])
        return "pass"

    start, proxy.fault = len(proxy.requests), replace
    with pytest.raises(InputError, match=r"big\.bin was replaced while it was read; run the same command again"):
        folder.read("big.bin")


@pytest.mark.parametrize(
    ("code", "status", "said"),
    [
        ("RequestTimeTooSkewed", "403", "403 Forbidden, RequestTimeTooSkewed; set the clock of this machine"),
        ("AuthorizationHeaderMalformed", "400", "AuthorizationHeaderMalformed; set AWS_DEFAULT_REGION"),
        ("QuotaExceeded", "403", "403 Forbidden, QuotaExceeded; make room in the bucket"),
        ("EntityTooLarge", "400", "EntityTooLarge; let the store, and proxies in front of it, take requests of 8 MB"),
        ("NoSuchBucket", "404", "404 Not Found, NoSuchBucket; make the bucket, or correct its name"),
    ],
)
def test_the_code_of_a_refusal_decides_what_to_do(proxy, url, code, status, said):
    proxy.fault, proxy.code = lambda number, method, path: status, code
    for ask in (lambda: bucket(url).version("a.bin"), lambda: write_file(bucket(url), "a.bin", b"1")):
        with pytest.raises(InputError, match=rf"^data\.path: {url}/a\.bin: .*{said}"):
            ask()


def test_an_upload_that_fails_says_why(proxy, url):
    proxy.fault = lambda number, method, path: "503" if method == "PUT" else "pass"
    with pytest.raises(InputError, match=r"503 Service Unavailable.*, after 2 retries"):
        write_file(bucket(url, max_retries=2), "big.bin", CONTENT)


def test_a_page_of_a_proxy_is_no_file(proxy, url):
    """The advice for a damaged manifest, to delete it, would be wrong."""
    proxy.fault = lambda number, method, path: "200"
    for ask in (bucket(url).read, bucket(url).version, bucket(url).size):
        with pytest.raises(InputError, match=r"manifest\.json: .*(ETag|Header missing).*; correct AWS_ENDPOINT"):
            ask("manifest.json")


def test_a_page_of_a_proxy_is_no_empty_folder(proxy, url):
    """A training would start again, and a writer would number its shards from 0."""
    assert bucket(url).names("*.ckpt") == []
    proxy.fault = lambda number, method, path: "200"
    with pytest.raises(InputError, match=r"\*\.ckpt: .*(ETag|Header missing).*; correct AWS_ENDPOINT"):
        bucket(url).names("*.ckpt")


def test_a_shard_that_is_deleted_while_it_is_trained_on_is_named(url):
    folder = open_folder(url, setting="features.path")
    save_store(folder, random_samples(10), shard_bytes=10**9)
    store, [shard] = FeatureStore(folder), folder.names("*.tar")
    store.read(store.samples[0])
    folder.delete(shard)
    with pytest.raises(InputError, match=rf"^shard {url}/{shard} is missing; bring it back, or make it again"):
        store.read(store.samples[0])


@pytest.mark.parametrize("endpoint", ["", "127.0.0.1:9000", "localhost:9000", "http://[bad", "http://***@[bad"])
def test_an_endpoint_that_is_no_url_is_one_line(server, url, monkeypatch, endpoint):
    monkeypatch.setenv(server.endpoint, endpoint.replace("***", f"key:{SECRET}"))
    with pytest.raises(InputError, match=rf"^{server.endpoint}={re.escape(endpoint)} must be a URL such as http://"):
        bucket(url)


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("s3://", "must be a local folder, or a URL of a bucket and a folder in it: s3://BUCKET/FOLDER"),
        ("s3://my bucket/folder", "must be a local folder, or a URL of a bucket and a folder in it"),
        ("ftp://host/folder", "must be a local folder, or a URL of a bucket and a folder in it"),
        (f"s3://key:{SECRET}@bucket/folder", "is a URL with more than a bucket and a folder"),
    ],
)
def test_what_names_no_folder_is_refused(place, said):
    with pytest.raises(InputError) as refused:
        open_folder(place, setting="data.path")
    assert said in str(refused.value) and SECRET not in str(refused.value)


@pytest.mark.slow
def test_a_training_from_a_bucket_is_that_from_disk(url, tmp_path):
    samples = random_samples(60)
    save_store(open_folder(url, setting="features.path"), samples)
    places = (write_store(tmp_path / "store", samples), url)
    runs = [Run(tmp_path / f"run {number}", place, ONE_EPOCH).fit() for number, place in enumerate(places)]
    assert runs[0].recorder.batches == runs[1].recorder.batches
    assert all(torch.equal(weight, runs[1].weights[name]) for name, weight in runs[0].weights.items())


def test_a_damaged_object_ends_training_with_its_name(server, url, tmp_path):
    folder = open_folder(url, setting="features.path")
    save_store(folder, random_samples(60), shard_bytes=10**9)
    [shard] = folder.names("*.tar")
    content = bytearray(folder.read(shard))
    content[5000] ^= 1
    server.put(f"{url}/{shard}", bytes(content))
    with pytest.raises(InputError, match=rf"{url}/{shard}.* another sha256 .*is damaged and is refused"):
        Run(tmp_path / "run", url, ONE_EPOCH).fit()
