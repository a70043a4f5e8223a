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
from gcs_server import GcsServer

SECRET = "a-secret-that-no-message-may-hold"
numbers = count()


@dataclass(frozen=True)
class RunningStore:
    """A server with what tests look at behind the client's back. `endpoint` is the variable that names its URL."""

    scheme: str
    url: str
    endpoint: str
    unfinished_uploads: Callable[[], list[str]]
    put: Callable[[str, bytes], object]  # to a URL


@contextmanager
def running_store(scheme: str = "s3") -> Iterator[RunningStore]:
    """Run a server and set the environment for it."""
    with pytest.MonkeyPatch.context() as patch, s3_store(patch) if scheme == "s3" else gcs_store(patch) as store:
        yield store


@contextmanager
def s3_store(patch: pytest.MonkeyPatch) -> Iterator[RunningStore]:
    import boto3  # Amazon's own client, to look at what the server holds
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # a line for each request
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    url = f"http://127.0.0.1:{server.get_host_and_port()[1]}"
    settings = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_DEFAULT_REGION": "us-east-1"}
    for name, value in {**settings, "AWS_ENDPOINT_URL": url}.items():
        patch.setenv(name, value)
    client = boto3.client("s3", endpoint_url=url)
    client.create_bucket(Bucket="features")

    def uploads() -> list[str]:
        return [each["Key"] for each in client.list_multipart_uploads(Bucket="features").get("Uploads", [])]

    def put(url: str, content: bytes) -> None:
        client.put_object(Bucket="features", Key=url.removeprefix("s3://features/"), Body=content)

    yield RunningStore("s3", url, "AWS_ENDPOINT_URL", uploads, put)
    server.stop()


@contextmanager
def gcs_store(patch: pytest.MonkeyPatch) -> Iterator[RunningStore]:
    store = GcsServer()

    def answer(request: BaseHTTPRequestHandler) -> None:
        status, headers, content = store.answer(request.command, request.path, request.headers, read_body(request))
        send(request, status, {**headers, "Content-Length": str(len(content))}, content)

    with http_server(answer) as url:
        patch.setenv("GOOGLE_BASE_URL", url)
        patch.setenv("GCE_METADATA_HOST", url.removeprefix("http://"))
        patch.setenv("HOME", "/nonexistent")  # credentials in ~/.config/gcloud would be taken
        yield RunningStore("gs", url, "GOOGLE_BASE_URL", lambda: [key for key, _ in store.uploads.values()], store.put)


def new_folder(scheme: str = "s3") -> str:
    return f"{scheme}://features/run {next(numbers)}/store"


@contextmanager
def http_server(answer: Callable[[BaseHTTPRequestHandler], None]) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_any(self) -> None:
            answer(self)

        do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = handle_any

        def log_message(self, *_: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: Any) -> None:
            pass  # a client that did not wait for the end

    with Server(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def read_body(request: BaseHTTPRequestHandler) -> bytes:
    return request.rfile.read(int(request.headers.get("content-length", 0)))


def send(request: BaseHTTPRequestHandler, status: int, headers: dict[str, str], body: bytes) -> None:
    request.send_response_only(status)
    for name, value in headers.items():
        if name.lower() not in ("connection", "transfer-encoding"):
            request.send_header(name, value)
    request.end_headers()
    request.wfile.write(b"" if request.command == "HEAD" else body)
    request.wfile.flush()


class FaultyProxy:
    """Hands requests on to a server, and does to each what `fault(number, method, path)` says:

    "pass", a status as "503", "reset" before the server has the request, "lost" after that, "half" of the body and a
    cut, "short" (half a body that claims to be whole), "wrong" (a flipped byte), or a number of seconds to wait first.
    """

    def __init__(self, url: str) -> None:
        self.host, self.port = url.removeprefix("http://").split(":")
        self.fault: Callable[[int, str, str], str | float] = lambda number, method, path: "pass"
        self.code = "Refused"  # in the body of a status
        self.requests: list[tuple[str, str]] = []

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        body = read_body(request)
        self.requests.append((request.command, request.path))
        fault = self.fault(len(self.requests) - 1, request.command, request.path)
        if isinstance(fault, float):
            time.sleep(fault)
        elif fault.isdigit():
            refusal = f"<Error><Code>{self.code}</Code></Error>".encode()
            return send(request, int(fault), {"Content-Length": str(len(refusal))}, refusal)
        if fault == "reset":
            return self._cut(request)
        with closing(http.client.HTTPConnection(self.host, int(self.port))) as server:
            server.request(request.command, request.path, body, dict(request.headers))
            found = server.getresponse()
            content, headers = found.read(), dict(found.getheaders())
        if fault == "lost":
            return self._cut(request)
        if fault == "wrong" and content:
            content = content[:-1] + bytes([content[-1] ^ 1])
        if fault == "short":
            content = content[: len(content) // 2]
        if request.command != "HEAD":
            headers |= {"Content-Length": str(len(content))}
        send(request, found.status, headers, content[: len(content) // 2] if fault == "half" else content)
        if fault == "half":
            self._cut(request)

    @staticmethod
    def _cut(request: BaseHTTPRequestHandler) -> None:
        """Close the connection with a reset instead of an end."""
        request.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        request.close_connection = True
        request.connection.close()


@contextmanager
def faulty_proxy(url: str) -> Iterator[FaultyProxy]:
    proxy = FaultyProxy(url)
    with http_server(proxy.answer) as proxy.url:
        yield proxy
