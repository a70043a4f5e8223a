"""HTTP requests to running servers: one session type, one timeout, the key, and errors of one line."""

import asyncio
import json
import os
import resource
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from aiohttp.http_exceptions import HttpProcessingError

from eagle3.errors import InputError, printable

KEY = "EAGLE3_API_KEY"  # the environment variable that holds the key
IDLE_S = 2.0  # servers close a connection that was idle for 5 s; a request that meets this fails
OTHER_FILES = 256  # that this process may have open besides its connections
LONGEST_LINE = 32 * 2**20  # bytes: each event of a stream repeats the whole answer so far
LONGEST_REPLY = 64 * 2**20  # bytes: the ids of a million tokens take a tenth of it


class ServerFailed(Exception):
    """The server is down, busy, slow or broken: another server, or the same one later, may answer."""


class ServerBusy(ServerFailed):
    """The server works, and has as many requests as it takes."""


class RequestRefused(Exception):
    """The server works but does not answer this request; no other server would."""


def api_key() -> str | None:
    """Return the key of all servers, whether started here or already running.

    Secrets that are read from files often end with a line break, which is no part of the key."""
    key = os.environ.get(KEY, "").strip()
    if not key.isprintable():
        raise InputError(f"{KEY} has a line break or a control character inside, which no header takes; set one key")
    return key or None


def new_session(*, timeout_s: float) -> aiohttp.ClientSession:
    """Open a session that sends every request at once, gives one up after `timeout_s`, and carries the key.

    It ignores the user's proxy, as aiohttp does unless told otherwise: most servers run on this machine."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_S),
        timeout=aiohttp.ClientTimeout(total=timeout_s, sock_connect=min(30, timeout_s)),
        read_bufsize=LONGEST_LINE // 2,  # of which aiohttp allows the double to a line
        headers={"Authorization": f"Bearer {key}"} if (key := api_key()) else {},
    )


def allow_connections(count: int, *, setting: str) -> None:
    """Raise this process's own limit of open files, 1024 on most machines, to what so many connections need; InputError
    where the machine does not let it."""
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = count + OTHER_FILES
    if limit == resource.RLIM_INFINITY or limit >= needed:
        return
    if most != resource.RLIM_INFINITY and most < needed:
        raise InputError(
            f"{setting} makes {count} connections, and this process may open {most} files; lower it, or raise the "
            f"limit (ulimit -Hn) to {needed}"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, most))


@asynccontextmanager
async def answered(
    session: aiohttp.ClientSession, url: str, body: dict[str, Any] | None = None
) -> AsyncIterator[aiohttp.ClientResponse]:
    """Send a request, POST if it has a body, and yield the response once its status is 200.

    Raises ServerFailed, RequestRefused, or InputError if the server asks for a key or sends the request on to another
    place: that one would get the prompts. No message quotes a prompt."""
    method = "GET" if body is None else "POST"
    if "Authorization" in session.headers and urlsplit(url).username is not None:
        raise InputError(f"{url} has a user's name, and {KEY} is set: a request carries one of them; leave one out")
    try:
        async with session.request(method, url, json=body, allow_redirects=False) as response:
            if response.status != 200:
                raise _failure(url, response, await whole_body(response))
            yield response
    except TimeoutError:
        raise ServerFailed(f"no answer within {session.timeout.total:g} s") from None
    except aiohttp.ClientConnectorCertificateError as error:
        reason = getattr(error.certificate_error, "verify_message", "")
        raise InputError(
            f"{url}: its certificate is not trusted here ({reason}); set SSL_CERT_FILE to a file with it or with its "
            f"authority's, and use a host name that it names"
        ) from None
    except (aiohttp.ClientError, OSError) as error:
        raise ServerFailed(f"{type(error).__name__}: {error}"[:200]) from None


async def stream_lines(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Yield the lines of a stream; ServerFailed as soon as one is longer than LONGEST_LINE."""
    try:
        async for line in response.content:
            yield line
    except (ValueError, HttpProcessingError):  # the former until aiohttp 3.13
        raise ServerFailed(f"a line of the reply is longer than {LONGEST_LINE} bytes") from None


async def ask(session: aiohttp.ClientSession, url: str, body: dict[str, Any] | None = None) -> Any:
    """Return the JSON of a response (None if it is empty); raises as `answered` does."""
    async with answered(session, url, body) as response:
        content = await whole_body(response)
    try:
        answer = json.loads(content) if content.strip() else None
    except (ValueError, RecursionError):
        raise ServerFailed("the response is not JSON, or nested too deeply") from None
    if isinstance(answer, dict) and [*answer] == ["error"]:  # LM Studio's, with status 200
        raise ServerFailed(f"HTTP 200 with an error: {read_error_message(content)}")
    return answer


async def whole_body(response: aiohttp.ClientResponse) -> bytes:
    """Return the body, unpacked; ServerFailed as soon as it is longer than LONGEST_REPLY."""
    content = bytearray()
    async for part in response.content.iter_any():
        content += part
        if len(content) > LONGEST_REPLY:
            raise ServerFailed(f"the reply is longer than {LONGEST_REPLY} bytes, unpacked")
    return bytes(content)


def ask_now(url: str, body: dict[str, Any] | None = None, *, timeout_s: float = 30) -> Any:
    """Call `ask` from code outside an event loop."""

    async def once() -> Any:
        async with new_session(timeout_s=timeout_s) as session:
            return await ask(session, url, body)

    return asyncio.run(once())


def responds(url: str, body: dict[str, Any] | None = None, *, timeout_s: float = 30) -> bool:
    try:
        ask_now(url, body, timeout_s=timeout_s)
    except (ServerFailed, RequestRefused):
        return False
    return True


def read_error_message(content: bytes) -> str:
    """Read an error body, such as {"error": {"message"}} of most servers, {"error"} of TGI, {"detail"} of FastAPI."""
    try:
        body = json.loads(content)
    except (ValueError, RecursionError):
        return "no reason given"
    for _ in range(4):
        if isinstance(body, dict):
            body = next((body[key] for key in ("error", "detail", "message", "msg") if body.get(key)), None)
        elif isinstance(body, list):
            body = body[0] if body else None
    return without_tokens(body)


def without_tokens(message: Any) -> str:
    """Cut a message at its first list: validation errors quote the request, which may be a user's text."""
    return printable(message if isinstance(message, str) else "").partition("[")[0][:200].strip() or "no reason given"


def _failure(url: str, response: aiohttp.ClientResponse, content: bytes) -> Exception:
    if "Location" in response.headers:
        return InputError(
            f"{url} redirects to {_redirect_host(response.headers['Location'])} (HTTP {response.status}), which would "
            f"get the prompts and give the answers: redirects are not followed; give the address of the server itself"
        )
    message = f"HTTP {response.status} {printable(response.reason or '')}: {read_error_message(content)}"
    if response.status in (401, 403):
        return InputError(f"{url} asks for a key ({message}); set {KEY} in the environment")
    if response.status in (429, 503):  # the latter from SGLang's full queue and nginx's limits
        return ServerBusy(message)
    # Any other status, also 404, is of a server that is down, or is no longer the one that it was.
    return (RequestRefused if response.status in (400, 413, 422) else ServerFailed)(message)


def _redirect_host(location: str) -> str:
    """Return the host alone: the rest may hold a key."""
    try:
        return printable(urlsplit(location).hostname or "another path")
    except ValueError:
        return "an address that cannot be read"
