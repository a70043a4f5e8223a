"""A folder in an object store: s3://BUCKET/FOLDER, gs://BUCKET/FOLDER, az://CONTAINER/FOLDER.

Credentials come from the environment or from the platform's own chain (roles of machines, pods and workloads), never
from a config, and are in no message. Requests that fail with 5xx, throttling or a cut connection are made again for
minutes, with growing waits and a log line; what stays wrong is one line. A bucket that has never answered this process
is given seconds: its address or the credentials are more likely wrong than the store is down.
"""

import fnmatch
import hashlib
import logging
import os
import random
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cached_property
from threading import Lock, Thread
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit

import obstore
from obstore import exceptions
from obstore.store import from_url

from eagle3.errors import InputError
from eagle3.storage.files import WHATEVER

log = logging.getLogger(__name__)

PART = 8 * 2**20  # bytes of one request; S3 takes parts from 5 MB on, and 10,000 of them in an object
REQUESTS = 32  # at once, of one process
REFETCHED = 3  # times that bytes with another hash than expected are asked for again
PATIENCE, AT_FIRST = timedelta(minutes=3), timedelta(seconds=20)  # in which a failed request is made again
BACKOFF: Any = {"base": 3}  # waits grow from 0.1 to 15 seconds; with obstore's own base of 2 they hardly grow

_answered: set[str] = set()  # buckets that answer this process

Found = TypeVar("Found")


class Waiting:
    """Logs which request has waited longest, as long as one has waited for `silence` seconds.

    One thread for all requests of a process: a thread for each would take as long as a small request."""

    def __init__(self, silence: float = 30) -> None:
        self.silence, self.requests = silence, dict[object, tuple[float, str]]()
        self.thread, self.lock = Thread(), Lock()

    @contextmanager
    def request(self, named: str) -> Iterator[None]:
        self._watched()
        request = object()
        self.requests[request] = time.monotonic(), named
        try:
            yield
        finally:
            del self.requests[request]

    def _watched(self) -> None:
        with self.lock:
            if not self.thread.is_alive():  # the first request, also of a forked process
                self.thread = Thread(target=self._watch, daemon=True)
                self.thread.start()

    def _watch(self) -> None:
        while True:
            time.sleep(self.silence)
            begun, named = min(self.requests.copy().values(), default=(time.monotonic(), ""))
            if (seconds := time.monotonic() - begun) >= self.silence:
                log.warning("%s: still waiting after %.0f s; requests that fail are made again", named, seconds)


waiting = Waiting()


class Bucket:
    """A `Storage` in an object store. What has no name yet is the store's unfinished upload, which nobody can read."""

    remote = True

    def __init__(self, url: str, *, setting: str, max_retries: int = 1000) -> None:
        self.location, self.setting, self.max_retries = url.rstrip("/"), setting, max_retries
        # Google replaces by the object's generation, S3 and Azure by its ETag.
        self.version_key: Literal["version", "e_tag"] = "version" if url.startswith("gs://") else "e_tag"
        self.first_store = self._open(min(max_retries, 10), AT_FIRST)
        self.later_store = self._open(max_retries, PATIENCE)
        self.bucket = "/".join(self.location.split("/")[:3])

    def _open(self, max_retries: int, patience: timedelta) -> Any:
        _require_endpoint(self.location.partition("://")[0])
        try:
            return from_url(
                self.location,
                # Only an endpoint that the environment names can be without TLS: a store of one's own.
                client_options={"timeout": timedelta(seconds=60), "allow_http": True},
                retry_config={"max_retries": max_retries, "retry_timeout": patience, "backoff": BACKOFF},
            )
        except exceptions.BaseError as error:
            raise InputError(f"{self.setting}={self.location}: {_refusal(error)}") from None

    @property
    def store(self) -> Any:
        return self.later_store if self.bucket in _answered else self.first_store

    def names(self, pattern: str) -> list[str]:
        with self._errors(pattern):
            found = self.again(lambda: obstore.list_with_delimiter(self.store)["objects"])
        if not found:  # a page of a proxy reads like this, too; it would also be the answer to this:
            self.version(pattern)
        names = [entry["path"].rpartition("/")[2] for entry in found]
        return sorted(fnmatch.filter(names, pattern))

    def size(self, name: str) -> int:
        with self._errors(name):
            return self._from_store(name, obstore.head(self.store, name))["size"]

    def version(self, name: str) -> str | None:
        try:
            with self._errors(name):
                # Not HEAD, whose errors do not say what is wrong. The body is not asked for.
                return self._from_store(name, obstore.get(self.store, name).meta)[self.version_key]
        except FileNotFoundError:
            return None

    def read(self, name: str, start: int = 0, stop: int | None = None, *, sha256: str | None = None) -> memoryview:
        for _ in range(REFETCHED + 1):
            content = self._read(name, start, stop)
            if sha256 is None or hashlib.sha256(content).hexdigest() == sha256:
                return content
        raise InputError(
            f"{self._named(name)}: bytes {start} to {start + len(content)} came {REFETCHED + 1} times with another "
            f"sha256 than {str(sha256)[:12]}…: the file is damaged and is refused; copy it again, or delete it (a "
            f"shard with its .index) and make it again with: precompute.py 'stages=[features]'"
        )

    def delete(self, name: str) -> None:
        with suppress(FileNotFoundError), self._errors(name):
            self.again(lambda: obstore.delete(self.store, name))

    def delete_unfinished(self, pattern: str) -> None:
        """Do nothing: unfinished uploads have no names here, and the bucket's lifecycle rule aborts them."""

    def create(self, name: str, *, instead_of: str | None = WHATEVER) -> "PendingObject":
        return PendingObject(self, name, instead_of)

    def _read(self, name: str, start: int, stop: int | None) -> memoryview:
        with self._errors(name):
            if stop is None or stop - start > PART:
                found = obstore.get(self.store, name)  # its body is asked for below, if at all
                size, version = self._from_store(name, found.meta)["size"], found.meta["e_tag"]
                if start == 0 and stop is None and size <= PART:
                    return memoryview(bytearray(found.buffer()))
                del found
                try:
                    return self._in_parts(name, start, min(size, stop or size), version)
                except exceptions.PreconditionError:
                    raise InputError(
                        f"{self._named(name)} was replaced while it was read; run the same command again when no other "
                        f"process writes it"
                    ) from None
            return memoryview(bytearray(obstore.get_range(self.store, name, start=start, end=stop)))

    def _from_store(self, name: str, facts: Any) -> Any:
        """Return the facts of a file; InputError if somebody else has answered, such as the login page of a proxy."""
        if facts["e_tag"] is None:
            raise InputError(f"{self._named(name)}: the answer has no ETag, so it is not the store's; {ENDPOINT}")
        return facts

    def _in_parts(self, name: str, start: int, stop: int, version: str | None) -> memoryview:
        """Read with several requests at once, all of one version of the file."""
        content = memoryview(bytearray(max(0, stop - start)))

        def fetch(first: int) -> None:
            last = min(first + PART, stop)
            options: Any = {"range": (first, last), "if_match": version}
            content[first - start : last - start] = memoryview(
                obstore.get(self.store, name, options=options).buffer()
            )  # ValueError where it is shorter

        for _ in self._requests.map(fetch, range(start, stop, PART)):
            pass
        return content

    def again(self, ask: Callable[[], Found]) -> Found:
        """Ask again where obstore does not: a listing that is cut off, a conditional write, and with Google also
        deleting and beginning an upload."""
        until = time.monotonic() + (PATIENCE if self.bucket in _answered else AT_FIRST).total_seconds()
        retry = 0
        while True:
            try:
                return ask()
            except exceptions.GenericError as error:
                given_up = retry >= self.max_retries or time.monotonic() > until
                if given_up or "HTTP error" not in str(error) or re.search(r"after \d+ retries", str(error)):
                    raise
                time.sleep(0.1 * 2 ** min(retry, 7) * random.uniform(0.5, 1))
                retry += 1

    @cached_property
    def _requests(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(REQUESTS, thread_name_prefix="bucket")

    def _named(self, name: str) -> str:
        return f"{self.setting}: {self.location}/{name}"

    @contextmanager
    def _errors(self, name: str) -> Iterator[None]:
        """Turn obstore's errors into those that `Storage` promises, and log that an answer takes long."""
        try:
            with waiting.request(self._named(name)):
                yield
            _answered.add(self.bucket)
        except FileNotFoundError as error:
            if "<Code>NoSuchBucket</Code>" in str(error):
                raise InputError(f"{self._named(name)}: {_refusal(error)}") from None
            raise FileNotFoundError(2, "no such file", f"{self.location}/{name}") from None
        except (exceptions.AlreadyExistsError, exceptions.PreconditionError) as error:
            raise FileExistsError(17, "another process has written it", f"{self.location}/{name}") from error
        except InputError:
            raise
        except (exceptions.BaseError, OSError, ValueError) as error:
            if re.search(r"after \d+ retries", str(error)):  # requests that are still to come need not wait as long
                _answered.discard(self.bucket)
            raise InputError(f"{self._named(name)}: {_refusal(error)}") from None


class PendingObject:
    """Uploads parts while the file is written; the last request gives it its name. A small file is one request, and so
    is one that is to replace a certain version: the store refuses it if it finds another."""

    def __init__(self, bucket: Bucket, name: str, instead_of: str | None) -> None:
        self.bucket, self.name, self.instead_of = bucket, name, instead_of
        self.content = bytearray()  # what was written before the upload was begun
        self.upload: Any = None

    def write(self, data: Any) -> int:
        if self.upload is None:
            self.content += data
            if len(self.content) < PART or self.instead_of != WHATEVER:
                return len(data)
        with self.bucket._errors(self.name):
            if self.upload is not None:
                self.upload.write(data)
            else:
                self.upload = self.bucket.again(self._begun)
                self.content = bytearray()
        return len(data)

    def commit(self) -> None:
        with self.bucket._errors(self.name):
            if self.upload is not None:
                self.upload.close()
            elif self.instead_of == WHATEVER:
                obstore.put(self.bucket.store, self.name, self.content, use_multipart=False)
            else:
                self._replace()
        self.upload, self.content = None, bytearray()

    def discard(self) -> None:
        if self.upload is not None:
            with suppress(InputError), self.bucket._errors(self.name):  # the error that led here says what is wrong
                self.upload.__exit__(InputError, InputError(), None)  # obstore's way to abort an upload
        self.upload, self.content = None, bytearray()

    def _begun(self) -> Any:
        """Begin the upload: obstore does so, and waits for it, when a whole part is there."""
        upload = obstore.open_writer(self.bucket.store, self.name, buffer_size=PART, max_concurrency=REQUESTS // 4)
        upload.write(self.content)
        return upload

    def _replace(self) -> None:
        mode: Any = "create" if self.instead_of is None else {self.bucket.version_key: self.instead_of}
        try:
            self.bucket.again(lambda: obstore.put(self.bucket.store, self.name, self.content, mode=mode))
        except (exceptions.AlreadyExistsError, exceptions.PreconditionError):
            # A cut connection may have lost the answer to our own request, which was then made again.
            if self.bucket._read(self.name, 0, None) != self.content:
                raise


ACCESS = (
    "give credentials in the environment (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
    "GOOGLE_APPLICATION_CREDENTIALS, AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY) or a role; profiles of "
    "~/.aws are not read"
)

# The variables with addresses of stores, by the scheme of a URL.
ENDPOINTS = {
    "s3": ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT"),
    "gs": ("GOOGLE_BASE_URL",),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
}
REGION = "set AWS_DEFAULT_REGION to the bucket's region"
ENDPOINT = "correct AWS_ENDPOINT_URL or GOOGLE_BASE_URL, or what HTTP_PROXY and HTTPS_PROXY name"
ELSEWHERE = "the bucket is in another region"

# What to do about the answers of stores, found by their words; the first that is found counts.
REMEDIES = {
    f"{ELSEWHERE}|AuthorizationHeaderMalformed|PermanentRedirect|IllegalLocation": REGION,
    "NoSuchBucket|^404 ": "make the bucket, or correct its name",  # of a file that is not there: FileNotFoundError
    "TimeTooSkewed": "set the clock of this machine",
    "Quota|StorageFull|InsufficientStorage": "make room in the bucket, then run the same command again: what is "
    "finished is kept",
    "Too ?Large": f"let the store, and proxies in front of it, take requests of {PART // 2**20} MB",
    "ETag|Header missing|non-partial|invalid \\w+ response": ENDPOINT,
    "Missing|^40[013] ": ACCESS,
    "": "run the same command again when the store can be reached: what is finished is kept",
}


def _require_endpoint(scheme: str) -> None:
    """Raise InputError for an endpoint that is no URL, at which obstore panics."""
    for variable in ENDPOINTS[scheme]:
        url = os.environ.get(variable, "http://localhost")
        try:
            parts = urlsplit(url)
            valid = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:
            valid = False
        if not valid:
            shown = re.sub("//.*@", "//***@", url)
            raise InputError(f"{variable}={shown} must be a URL such as http://HOST:PORT; correct it or unset it")


def _refusal(error: Exception) -> str:
    """Say what went wrong and what to do."""
    reason = _reason(error)
    remedy = next(remedy for words, remedy in REMEDIES.items() if re.search(words, reason))
    return f"access is denied ({reason}); {remedy}" if remedy == ACCESS and reason[0] == "4" else f"{reason}; {remedy}"


def _reason(error: Exception) -> str:
    """Say what went wrong in words that hold no secret: no URL, whose query may be signed, and no answer's body."""
    text = str(error)
    if "redirect without LOCATION" in text:
        return ELSEWHERE
    parts = [
        *re.findall(r"status code: (\d+ [A-Za-z ]+)", text)[:1],
        *re.findall(r"<Code>(\w+)</Code>", text)[:1],
        *re.findall(r"HTTP error: ([a-z ]+)", text)[:1],
        *re.findall(r"after \d+ retries", text)[:1],
    ]
    own = re.match(r"Generic \w+ error: ([\w ,:-]+)", text)  # words of obstore
    return ", ".join(part.strip() for part in parts) or (own[1].strip(" :") if own else type(error).__name__)
