"""A server that speaks the part of Google Cloud Storage's XML API that obstore's client asks for.

https://cloud.google.com/storage/docs/xml-api: objects by range, conditional writes by generation, multipart uploads,
listings in pages, and the metadata server's tokens, which every request must carry.
"""

import hashlib
import json
import re
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit
from xml.sax.saxutils import escape

import pytest

LEAST_PART = 5 * 2**20  # bytes of every part but the last
PAGE = 3  # names of a page of a listing; Google's have 1,000
TOKEN_PATH = "/computeMetadata/v1/instance/service-accounts/default/token"
Answer = tuple[int, dict[str, str], bytes]


@dataclass(frozen=True)
class Blob:
    content: bytes
    generation: int
    written: float = field(default_factory=time.time)

    @property
    def headers(self) -> dict[str, str]:
        return {
            "ETag": etag(self.content),
            "Last-Modified": formatdate(self.written, usegmt=True),
            "x-goog-generation": str(self.generation),
        }


def etag(content: bytes) -> str:
    return f'"{hashlib.md5(content).hexdigest()}"'


def error(status: int, code: str) -> Answer:
    return status, {"Content-Type": "application/xml"}, f"<Error><Code>{code}</Code></Error>".encode()


def xml(tag: str, body: str) -> Answer:
    return 200, {"Content-Type": "application/xml"}, f"<?xml version='1.0'?><{tag}>{body}</{tag}>".encode()


class GcsServer:
    """The buckets. `tokens` are those handed out; `lifetime_s` of each, as Google's metadata server states it."""

    def __init__(self) -> None:
        self.blobs: dict[str, Blob] = {}  # by BUCKET/NAME
        self.uploads: dict[str, tuple[str, dict[int, bytes]]] = {}  # not completed
        self.tokens: set[str] = set()
        self.lifetime_s = 3600
        self.generations = count(1_700_000_000_000_000)
        self.lock = threading.Lock()  # a condition and its write are one step

    def answer(self, method: str, url: str, headers: Any, body: bytes) -> Answer:
        parts = urlsplit(url)
        query, key = dict(parse_qsl(parts.query, keep_blank_values=True)), unquote(parts.path).lstrip("/")
        if parts.path == TOKEN_PATH:
            return self._token(headers)
        if headers.get("Authorization", "").removeprefix("Bearer ") not in self.tokens:
            return error(401, "AuthenticationRequired")
        with self.lock:
            if "/" not in key:
                return self._listing(key, query)
            if "uploads" in query or "uploadId" in query:
                return self._multipart(method, key, query, body)
            if method == "PUT":
                return self._put(key, headers, body)
            if key not in self.blobs:
                return error(404, "NoSuchKey")
            if method == "DELETE":
                del self.blobs[key]
                return 204, {}, b""
            return self._get(self.blobs[key], headers)

    def put(self, url: str, content: bytes) -> None:
        """Write an object behind the client's back."""
        self.blobs[url.removeprefix("gs://")] = Blob(content, next(self.generations))

    def unfinished_uploads(self) -> list[str]:
        return [key for key, _ in self.uploads.values()]

    def _token(self, headers: Any) -> Answer:
        if headers.get("Metadata-Flavor") != "Google":
            return error(403, "Forbidden")
        self.tokens.add(token := f"token-{secrets.token_hex(8)}")
        answer = {"access_token": token, "expires_in": self.lifetime_s, "token_type": "Bearer"}
        return 200, {"Content-Type": "application/json"}, json.dumps(answer).encode()

    def _put(self, key: str, headers: Any, body: bytes) -> Answer:
        expected = headers.get("x-goog-if-generation-match")
        there = self.blobs[key].generation if key in self.blobs else 0
        if expected is not None and int(expected) != there:
            return error(412, "PreconditionFailed")
        self.blobs[key] = Blob(body, next(self.generations))
        return 200, self.blobs[key].headers, b""

    def _get(self, blob: Blob, headers: Any) -> Answer:
        if headers.get("If-Match", etag(blob.content)) != etag(blob.content):
            return error(412, "PreconditionFailed")
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", headers.get("Range", ""))
        if asked is None:
            return 200, blob.headers, blob.content
        begin, last, size = int(asked[1]), int(asked[2]), len(blob.content)
        if begin >= size:
            return error(416, "InvalidRange")
        end = min(last + 1, size)
        return 206, {**blob.headers, "Content-Range": f"bytes {begin}-{end - 1}/{size}"}, blob.content[begin:end]

    def _multipart(self, method: str, key: str, query: dict[str, str], body: bytes) -> Answer:
        if "uploads" in query:
            self.uploads[upload := secrets.token_hex(8)] = key, {}
            return xml("InitiateMultipartUploadResult", f"<UploadId>{upload}</UploadId>")
        if query["uploadId"] not in self.uploads:
            return error(404, "NoSuchUpload")
        parts = self.uploads[query["uploadId"]][1]
        if method == "PUT":
            parts[int(query["partNumber"])] = body
            return 200, {"ETag": etag(body)}, b""
        if method == "POST":
            named = re.findall(
                r"<ETag>(.*?)</ETag><PartNumber>(\d+)</PartNumber>", body.decode().replace("&quot;", '"')
            )
            contents = [parts.get(int(number), b"") for _, number in named]
            if not named or [tag for tag, _ in named] != [etag(content) for content in contents]:
                return error(400, "InvalidPart")
            if any(len(content) < LEAST_PART for content in contents[:-1]):
                return error(400, "EntityTooSmall")
            self.blobs[key] = blob = Blob(b"".join(contents), next(self.generations))
        del self.uploads[query["uploadId"]]
        if method == "DELETE":
            return 204, {}, b""
        status, headers, content = xml("CompleteMultipartUploadResult", f"<ETag>{etag(blob.content)}</ETag>")
        return status, {**headers, "x-goog-generation": str(blob.generation)}, content

    def _listing(self, bucket: str, query: dict[str, str]) -> Answer:
        prefix, after = query.get("prefix", ""), query.get("continuation-token", "")
        names = sorted(key.removeprefix(f"{bucket}/") for key in self.blobs if key.startswith(f"{bucket}/{prefix}"))
        names = [name for name in names if name > after and query.get("delimiter", "\0") not in name[len(prefix) :]]
        page, more = names[:PAGE], names[PAGE:]
        body = "".join(self._entry(name, self.blobs[f"{bucket}/{name}"]) for name in page)
        if more:
            body += f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>"
        return xml("ListBucketResult", body)

    @staticmethod
    def _entry(name: str, blob: Blob) -> str:
        written = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(blob.written))
        facts = (
            f"<Size>{len(blob.content)}</Size><LastModified>{written}</LastModified><ETag>{etag(blob.content)}</ETag>"
        )
        return f"<Contents><Key>{escape(name)}</Key>{facts}</Contents>"


@contextmanager
def gcs_server() -> Iterator[tuple[str, GcsServer]]:
    """Run a server and set the environment for it; its URL and what it holds."""
    store = GcsServer()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_any(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            status, headers, content = store.answer(self.command, self.path, self.headers, body)
            self.send_response_only(status)
            for name, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(b"" if self.command == "HEAD" else content)

        do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = handle_any

        def log_message(self, *_: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: Any) -> None:
            pass  # a client that did not wait for the end

    with Server(("127.0.0.1", 0), Handler) as server, pytest.MonkeyPatch.context() as patch:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        host = f"127.0.0.1:{server.server_address[1]}"
        patch.setenv("GOOGLE_BASE_URL", f"http://{host}")
        patch.setenv("GCE_METADATA_HOST", host)
        if Path("~/.config/gcloud").expanduser().exists():  # its credentials would be taken
            patch.setenv("HOME", "/nonexistent")
        yield f"http://{host}", store
        server.shutdown()
