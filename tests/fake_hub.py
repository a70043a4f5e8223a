"""A hub on this machine: as much of huggingface.co as its own library asks for, with what goes wrong there."""

import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

PATH = re.compile(
    r"/(?:api/models/)?(?P<id>[^/?]+/[^/?]+)(?:/(?P<kind>revision|tree|resolve)/(?P<at>[^/?]+)/?(?P<file>[^?]*))?"
)
TOKEN = "hf_secret"


class FakeHub(ThreadingHTTPServer):
    """Models by id, each the files of its commits, of which the last is `main`.

    status: answers every request; cut: the file whose connection breaks halfway, always; gated: needs the token."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.models: dict[str, dict[str, dict[str, bytes]]] = {}
        self.status, self.cut, self.gated = 0, "", False
        self.asked: list[str] = []  # METHOD /PATH
        self.url = f"http://127.0.0.1:{self.server_port}"

    def push(self, name: str, folder: Path, changed: Mapping[str, bytes | None] = {}) -> str:
        """Add a commit with the files of a folder and the changed ones, None for one that is left out."""
        files = {path.name: path.read_bytes() for path in folder.iterdir()} | dict(changed)
        commits = self.models.setdefault(name, {})
        commit = hashlib.sha1(f"{name} {len(commits)}".encode()).hexdigest()
        commits[commit] = {path: content for path, content in files.items() if content is not None}
        return commit


class Answer(BaseHTTPRequestHandler):
    server: FakeHub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        hub, found = self.server, PATH.match(self.path)
        hub.asked.append(f"{self.command} {self.path}")
        authorization = self.headers.get("Authorization")
        if hub.status:
            return self.send(hub.status)
        if found is None or found["id"] not in hub.models:
            return self.send(404 if authorization else 401, {"X-Error-Code": "RepoNotFound"})
        commits = hub.models[found["id"]]
        commit = [*commits][-1] if found["at"] in (None, "main") else found["at"]
        if commit not in commits:
            return self.send(404, {"X-Error-Code": "RevisionNotFound"})
        files, name = commits[commit], found["file"]
        if found["kind"] == "tree":
            tree = [{"type": "file", "path": each, "size": len(files[each]), "oid": oid(files[each])} for each in files]
            return self.send(200, content=json.dumps(tree).encode())
        if found["kind"] != "resolve":
            return self.send(200, content=json.dumps({"id": found["id"], "sha": commit}).encode())
        if hub.gated and authorization != f"Bearer {TOKEN}":
            return self.send(403 if authorization else 401, {"X-Error-Code": "GatedRepo"})
        if name not in files:
            return self.send(404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
        headers = {"ETag": f'"{oid(files[name])}"', "X-Repo-Commit": commit}
        return self.send(200, headers, files[name], cut=name == hub.cut)

    do_HEAD = do_GET

    def send(self, status: int, headers: Mapping[str, str] = {}, content: bytes = b"", *, cut: bool = False) -> None:
        start = int(self.headers.get("Range", "bytes=0-")[6:].partition("-")[0])
        self.send_response(206 if start else status)
        for key, value in {**headers, "Content-Length": str(len(content) - start)}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content[start : start + (len(content) - start) // 2] if cut else content[start:])
        self.close_connection = cut

    def log_message(self, *_: object) -> None: ...


def oid(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@contextmanager
def serving_hub() -> Iterator[FakeHub]:
    with FakeHub() as hub:
        threading.Thread(target=hub.serve_forever, args=(0.01,), daemon=True).start()
        yield hub
        hub.shutdown()
