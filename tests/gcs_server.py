"""A server that speaks the part of Google Cloud Storage's XML API that obstore's client asks for.

https://cloud.google.com/storage/docs/xml-api: objects by range, conditional writes by generation, multipart uploads and
listings; and the metadata server's token, which is the client's business alone.
"""

import hashlib
import re
import secrets
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from email.utils import formatdate
from itertools import count
from urllib.parse import parse_qsl, unquote, urlsplit
from xml.sax.saxutils import escape

TOKEN_PATH = "/computeMetadata/v1/instance/service-accounts/default/token"
TOKEN = b'{"access_token": "token", "expires_in": 3600, "token_type": "Bearer"}'
Answer = tuple[int, dict[str, str], bytes]


@dataclass(frozen=True)
class Blob:
    content: bytes
    generation: int
    written: float = field(default_factory=time.time)

    @property
    def headers(self) -> dict[str, str]:
        written = formatdate(self.written, usegmt=True)
        return {"ETag": etag(self.content), "Last-Modified": written, "x-goog-generation": str(self.generation)}


def etag(content: bytes) -> str:
    return f'"{hashlib.md5(content).hexdigest()}"'


def error(status: int, code: str) -> Answer:
    return status, {"Content-Type": "application/xml"}, f"<Error><Code>{code}</Code></Error>".encode()


def xml(tag: str, body: str, **headers: str) -> Answer:
    content = f"<?xml version='1.0'?><{tag}>{body}</{tag}>".encode()
    return 200, {"Content-Type": "application/xml", **headers}, content


class GcsServer:
    """The buckets; `uploads` are those that have not been completed."""

    def __init__(self) -> None:
        self.blobs: dict[str, Blob] = {}  # by BUCKET/NAME
        self.uploads: dict[str, tuple[str, dict[int, bytes]]] = {}
        self.generations = count(1_700_000_000_000_000)
        self.lock = threading.Lock()  # a condition and its write are one step

    def answer(self, method: str, url: str, headers: Mapping[str, str], body: bytes) -> Answer:
        parts = urlsplit(url)
        query, key = dict(parse_qsl(parts.query, keep_blank_values=True)), unquote(parts.path).lstrip("/")
        if parts.path == TOKEN_PATH:
            return 200, {"Content-Type": "application/json"}, TOKEN
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

    def _put(self, key: str, headers: Mapping[str, str], body: bytes) -> Answer:
        expected = headers.get("x-goog-if-generation-match")
        there = self.blobs[key].generation if key in self.blobs else 0
        if expected is not None and int(expected) != there:
            return error(412, "PreconditionFailed")
        self.put(key, body)
        return 200, self.blobs[key].headers, b""

    def _get(self, blob: Blob, headers: Mapping[str, str]) -> Answer:
        if headers.get("If-Match", etag(blob.content)) != etag(blob.content):
            return error(412, "PreconditionFailed")
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", headers.get("Range", ""))
        if asked is None:
            return 200, blob.headers, blob.content
        begin, end, size = int(asked[1]), int(asked[2]) + 1, len(blob.content)
        if begin >= size:
            return error(416, "InvalidRange")
        content = blob.content[begin:end]
        return 206, {**blob.headers, "Content-Range": f"bytes {begin}-{begin + len(content) - 1}/{size}"}, content

    def _multipart(self, method: str, key: str, query: dict[str, str], body: bytes) -> Answer:
        if "uploads" in query:
            self.uploads[upload := secrets.token_hex(8)] = key, {}
            return xml("InitiateMultipartUploadResult", f"<UploadId>{upload}</UploadId>")
        if query["uploadId"] not in self.uploads:
            return error(404, "NoSuchUpload")
        if method == "PUT":
            self.uploads[query["uploadId"]][1][int(query["partNumber"])] = body
            return 200, {"ETag": etag(body)}, b""
        parts = self.uploads.pop(query["uploadId"])[1]
        if method == "DELETE":
            return 204, {}, b""
        self.put(key, b"".join(parts[int(number)] for number in re.findall(rb"<PartNumber>(\d+)", body)))
        blob = self.blobs[key]
        generation = {"x-goog-generation": str(blob.generation)}
        return xml("CompleteMultipartUploadResult", f"<ETag>{etag(blob.content)}</ETag>", **generation)

    def _listing(self, bucket: str, query: dict[str, str]) -> Answer:
        prefix = f"{bucket}/{query.get('prefix', '')}"
        names = [key for key in sorted(self.blobs) if key.startswith(prefix)]
        inside = [key for key in names if query.get("delimiter", "\0") not in key.removeprefix(prefix)]
        return xml("ListBucketResult", "".join(self._entry(key.partition("/")[2], self.blobs[key]) for key in inside))

    @staticmethod
    def _entry(name: str, blob: Blob) -> str:
        written = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(blob.written))
        size, tag = f"<Size>{len(blob.content)}</Size>", f"<ETag>{etag(blob.content)}</ETag>"
        return f"<Contents><Key>{escape(name)}</Key>{size}<LastModified>{written}</LastModified>{tag}</Contents>"
