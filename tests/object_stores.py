"""Object stores on this machine: servers for S3 and Google, and a proxy that puts faults in between."""

import http.client
import logging
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from typing import Any

import pytest
from gcs_server import gcs_server

SECRET = "a-secret-that-no-message-may-hold"
numbers = count()


@contextmanager
def s3_server() -> Iterator[str]:
    """Run a server and set the environment for it; the URL of the server."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # a line for each request
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    _, port = server.get_host_and_port()
    url = f"http://127.0.0.1:{port}"
    settings = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_DEFAULT_REGION": "us-east-1"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**settings, "AWS_ENDPOINT_URL": url}.items():
            patch.setenv(name, value)
        client().create_bucket(Bucket="features")
        yield url
    server.stop()


@dataclass(frozen=True)
class RunningStore:
    """A server with what tests look at behind the client's back. `endpoint` is the variable that names its URL."""

    scheme: str
    url: str
    endpoint: str
    unfinished_uploads: Callable[[], list[str]]
    put: Callable[[str, bytes], object]  # to a URL


@contextmanager
def running_store(scheme: str) -> Iterator[RunningStore]:
    if scheme == "gs":
        with gcs_server() as (url, gcs):
            yield RunningStore(
                scheme, url, "GOOGLE_BASE_URL", lambda: [key for key, _ in gcs.uploads.values()], gcs.put
            )
        return

    def uploads() -> list[str]:
        return [each["Key"] for each in client().list_multipart_uploads(Bucket="features").get("Uploads", [])]

    def put(url: str, content: bytes) -> None:
        client().put_object(Bucket="features", Key=url.removeprefix("s3://features/"), Body=content)

    with s3_server() as url:
        yield RunningStore(scheme, url, "AWS_ENDPOINT_URL", uploads, put)


def client() -> Any:
    """Amazon's own client, to look at what the server holds."""
    import os

    import boto3

    return boto3.client("s3", endpoint_url=os.environ["AWS_ENDPOINT_URL"])


def new_folder(scheme: str = "s3") -> str:
    return f"{scheme}://features/run {next(numbers)}/store"


class FaultyProxy:
    """Hands requests on to a server, and does to each what `fault(number, method, path)` says:

    "pass", "503", "429", "reset" before an answer, "half" of the body and a cut, "short" (half a body that claims to be
    whole), "wrong" (a flipped byte), or a number of seconds to wait first.
    """

    def __init__(self, url: str) -> None:
        self.host, self.port = url.removeprefix("http://").split(":")
        self.fault: Callable[[int, str, str], str | float] = lambda number, method, path: "pass"
        self.requests: list[tuple[str, str]] = []
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_any(self) -> None:
                proxy.answer(self)

            do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = handle_any

            def log_message(self, *_: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            def handle_error(self, *_: Any) -> None:
                pass  # a client that did not wait for the end

        self.server = Server(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def __enter__(self) -> "FaultyProxy":
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        body = request.rfile.read(int(request.headers.get("content-length", 0)))
        self.requests.append((request.command, request.path))
        fault = self.fault(len(self.requests) - 1, request.command, request.path)
        if isinstance(fault, float):
            time.sleep(fault)
        if fault in ("503", "429"):
            return self._send(request, int(fault), {}, b"<Error><Code>SlowDown</Code></Error>")
        if fault == "reset":
            return self._cut(request)
        with closing(http.client.HTTPConnection(self.host, int(self.port))) as server:
            server.request(request.command, request.path, body, dict(request.headers))
            found = server.getresponse()
            content = found.read()
        if fault == "wrong" and content:
            content = content[:-1] + bytes([content[-1] ^ 1])
        if fault == "short":
            content = content[: len(content) // 2]
        sent = content[: len(content) // 2] if fault == "half" else content
        self._send(request, found.status, dict(found.getheaders()), sent, length=len(content))
        if fault == "half":
            self._cut(request)

    @staticmethod
    def _send(
        request: BaseHTTPRequestHandler, status: int, headers: dict[str, str], body: bytes, length: int | None = None
    ) -> None:
        request.send_response_only(status)
        for name, value in headers.items():
            if name.lower() not in ("content-length", "connection", "transfer-encoding"):
                request.send_header(name, value)
        if request.command == "HEAD":
            request.send_header("content-length", headers.get("Content-Length", "0"))
        else:
            request.send_header("content-length", str(len(body) if length is None else length))
        request.end_headers()
        request.wfile.write(body)
        request.wfile.flush()

    @staticmethod
    def _cut(request: BaseHTTPRequestHandler) -> None:
        """Close the connection with a reset instead of an end."""
        request.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        request.close_connection = True
        request.connection.close()
