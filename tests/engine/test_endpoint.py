"""Both protocols against a server that speaks them, and what each says of answers that are not what was asked for."""

import asyncio
import json
import shutil
import ssl
import subprocess
import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web
from protocol_server import ProtocolServer
from serving_fixtures import free_port, serve_run, serving

from eagle3.engine import client
from eagle3.engine.client import KEY, RequestRefused, ServerBusy, ServerFailed, ask, new_session
from eagle3.engine.endpoint import Answer, Endpoint, OpenAICompletions, Request, SGLang
from eagle3.errors import InputError

REQUEST = Request(
    [5, 6], seed=3, temperature=0.7, top_p=0.9, top_k=0, max_new_tokens=8, stop_ids=frozenset({2}), vocab_size=9
)
PROTOCOLS: list[Callable[[str], Endpoint]] = [SGLang, lambda url: OpenAICompletions(url, model="m")]
DEEP = 900 * "[" + 900 * "]"
by_protocol = pytest.mark.parametrize("protocol", PROTOCOLS, ids=["sglang", "openai"])


def answering(token_ids: list[int], finish: str, **arguments: Any) -> ProtocolServer:
    made = {"output_ids": token_ids, "finish": finish, "spec": {}}
    return ProtocolServer(lambda prompt_ids, sampling: made, {"model_path": "m", **arguments})


def complete(endpoint: Endpoint, request: Request = REQUEST, *, timeout_s: float = 60) -> Answer:
    async def run() -> Answer:
        async with new_session(timeout_s=timeout_s) as session:
            return await endpoint.complete(session, request)

    return asyncio.run(run())


@by_protocol
@pytest.mark.parametrize(("token_ids", "finish"), [([7, 8, 2], "stop"), ([7] * 8, "length")])
def test_token_ids_and_the_finish_reason_come_back(protocol, token_ids, finish):
    server = answering(token_ids, finish)
    with serving(server) as url:
        assert complete(protocol(url)) == Answer(token_ids, finish)
    [body] = server.received
    assert (body.get("input_ids") or body["prompt"]) == [5, 6]
    sampling = body.get("sampling_params") or body
    assert (sampling["temperature"], sampling["top_p"], sampling["top_k"]) == (0.7, 0.9, -1)
    assert (sampling["stop_token_ids"], sampling.get("sampling_seed", body.get("seed"))) == ([2], 3)


@by_protocol
def test_no_server_adds_a_penalty_of_its_own(protocol):
    """Such as the repetition_penalty of a generation_config.json, which vLLM takes where a request names none."""
    server = answering([7, 2], "stop")
    with serving(server) as url:
        complete(protocol(url))
    [body] = server.received
    sampling = body.get("sampling_params") or body
    assert sampling["min_p"] == sampling["presence_penalty"] == sampling["frequency_penalty"] == 0
    assert sampling["repetition_penalty"] == 1


def test_a_connection_that_a_server_may_be_closing_is_not_used_again(monkeypatch):
    assert client.IDLE_S < 5, "servers close connections after 5 s"
    monkeypatch.setattr(client, "IDLE_S", 0.1)
    connections = set()

    async def accepted(request: web.Request) -> web.Response:
        assert request.transport is not None
        connections.add(request.transport.get_extra_info("peername"))
        return web.json_response({})

    async def ask_twice(url: str) -> None:
        async with new_session(timeout_s=60) as session:
            for _ in range(2):
                await ask(session, f"{url}/server_info")
                await asyncio.sleep(0.3)

    server = answering([7, 2], "stop")
    server.server_info = accepted  # type: ignore[method-assign]
    with serving(server) as url:
        asyncio.run(ask_twice(url))
    assert len(connections) == 2


@pytest.mark.parametrize("token_ids", [[7, 8, 2], [2]])
def test_a_stop_token_that_is_left_out_and_named_is_put_back(token_ids):
    server = answering(token_ids, "stop")
    server.stops_in_answers = False
    with serving(server) as url:
        assert complete(OpenAICompletions(url, model="m")) == Answer(token_ids, "stop")


@by_protocol
@pytest.mark.parametrize("end", ["/", "/v1", "/v1/"])
def test_an_address_may_end_as_the_base_url_of_a_client_does(protocol, end):
    with serving(answering([7, 2], "stop")) as url:
        assert complete(protocol(f"{url}{end}")) == Answer([7, 2], "stop")


@by_protocol
@pytest.mark.parametrize(
    ("token_ids", "finish", "message"),
    [
        ([7, 8], "stop", "last token ends no turn of the target"),
        ([7, 2, 8, 2], "stop", "continues after an end of turn"),
        ([7] * 9, "length", "longer than sampling.max_new_tokens"),
        ([], "length", "no token ids"),
        ([7, 7, 7], "length", r"server cut the answer before .* \(3 of 8 tokens\)"),
        ([7, -1], "length", "outside the target's vocabulary"),
        ([7, 9], "length", "outside the target's vocabulary"),
        (["7"], "length", "outside the target's vocabulary"),
        ([7], "content_filter", "ended by 'content_filter'"),
    ],
)
def test_an_answer_that_is_not_what_was_asked_for_is_no_answer(protocol, token_ids, finish, message):
    with serving(answering(token_ids, finish)) as url, pytest.raises((ServerFailed, RequestRefused), match=message):
        complete(protocol(url))


@by_protocol
@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, RequestRefused), (404, ServerFailed), (429, ServerBusy), (503, ServerBusy), (502, ServerFailed)],
)
def test_a_status_says_whether_another_server_may_answer(protocol, status, kind):
    server = answering([7, 2], "stop")
    error = {"error": {"message": "\x1b[31mThe input\n(9 tokens) is\x1b[0m too long: [1, 2, 3]"}}
    server.fault = lambda number: web.json_response(error, status=status)
    with serving(server) as url, pytest.raises(kind, match=f"HTTP {status}.*The input .9 tokens. is too long: ?$"):
        complete(protocol(url))


@pytest.mark.parametrize(
    "body",
    [
        {"error": {"message": "too long", "code": 400}},
        {"object": "error", "message": "too long"},
        {"error": "too long", "error_type": "validation"},
        {"error": None, "detail": "too long"},
        {"detail": [{"loc": ["body"], "msg": "too long", "input": "a prompt"}]},
    ],
)
def test_an_error_body_of_any_server_is_read(body):
    assert client.read_error_message(json.dumps(body).encode()) == "too long"
    for other in (b"<html>", b"{}", b'{"detail": []}', b'{"error": 3}', 100_000 * b"["):
        assert client.read_error_message(other) == "no reason given"


def test_an_error_with_status_200_is_the_servers_failure():
    server = answering([7, 2], "stop")
    server.fault = lambda number: web.json_response({"error": "Unexpected endpoint"})
    with serving(server) as url, pytest.raises(ServerFailed, match="HTTP 200 with an error: Unexpected endpoint"):
        complete(OpenAICompletions(url, model="m"))


@by_protocol
def test_an_answer_to_another_prompt_than_was_sent_is_refused(protocol):
    server = answering([7, 2], "stop")
    made = {"output_ids": [7, 2], "meta_info": {"prompt_tokens": 1, "finish_reason": {"type": "stop"}}}
    choice = {"token_ids": [7, 2], "prompt_token_ids": [6], "finish_reason": "stop"}
    server.fault = lambda number: web.json_response({**made, "choices": [choice]})
    with serving(server) as url, pytest.raises(RequestRefused, match="another prompt than it was sent"):
        complete(protocol(url))


def test_a_count_of_another_prompt_is_enough_to_refuse_its_answer():
    """Such as of a server that puts a BOS before every prompt, and does not return the prompt's ids."""
    server = answering([7, 2], "stop")
    choice = {"token_ids": [7, 2], "finish_reason": "stop"}
    server.fault = lambda number: web.json_response({"usage": {"prompt_tokens": 3}, "choices": [choice]})
    with serving(server) as url, pytest.raises(RequestRefused, match="another prompt than it was sent"):
        complete(OpenAICompletions(url, model="m"))


@by_protocol
@pytest.mark.parametrize(
    "text",
    [
        100_000 * "[",
        f'{{"meta_info": {{"finish_reason": {DEEP}}}, "choices": [{{"token_ids": [7], "finish_reason": {DEEP}}}]}}',
        "null",
        '{"choices": 3, "meta_info": 3}',
        '{"choices": [{"token_ids": 5, "finish_reason": "stop"}]}',
    ],
)
def test_a_body_that_is_no_answer_is_the_servers_failure(protocol, text):
    server = answering([7, 2], "stop")
    server.fault = lambda number: web.Response(text=text)
    with serving(server) as url, pytest.raises(ServerFailed):
        complete(protocol(url))


@by_protocol
def test_a_reply_has_a_bounded_size_also_one_that_is_packed(protocol, monkeypatch):
    monkeypatch.setattr(client, "LONGEST_REPLY", 2**20)
    server, sent = answering([7, 2], "stop"), []

    async def endless(request: web.Request) -> web.StreamResponse:
        response, zeros = web.StreamResponse(headers={"Content-Encoding": "gzip"}), zlib.compressobj(wbits=31)
        await response.prepare(request)
        while True:
            part = bytes(2**20)
            await response.write(zeros.compress(part) + zeros.flush(zlib.Z_SYNC_FLUSH))
            sent.append(len(part))

    server.generate = server.completions = endless  # type: ignore[method-assign]
    with serving(server) as url, pytest.raises(ServerFailed, match=r"longer than 1048576 bytes"):
        complete(protocol(url))
    assert sum(sent) < 2**30


@by_protocol
def test_a_request_is_not_sent_on_to_another_server(protocol):
    server, other = answering([7, 2], "stop"), answering([7, 2], "stop")
    with serving(server) as url, serving(other) as theirs:
        place = theirs.replace("127.0.0.1", "localhost") + "/generate?key=k3y"
        server.fault = lambda number: web.Response(status=307, headers={"Location": place})
        with pytest.raises(InputError, match=rf"{url}/.* redirects to localhost \(HTTP 307\).*not followed; give"):
            complete(protocol(url))
    assert other.received == []


@by_protocol
def test_a_model_whose_name_cannot_be_read_is_the_servers_failure(protocol):
    async def model_names(url: str) -> list[str]:
        async with new_session(timeout_s=60) as session:
            return await protocol(url).model_names(session)

    server = answering([7, 2], "stop")
    server.information = "null"
    with serving(server) as url, pytest.raises(ServerFailed, match=r"its /(server_info|v1/models) is not"):
        asyncio.run(model_names(url))


@by_protocol
def test_a_server_that_is_not_there_or_too_slow_has_failed(protocol):
    with pytest.raises(ServerFailed, match="Cannot connect"):
        complete(protocol(f"http://127.0.0.1:{free_port()}"))
    server = answering([7, 2], "stop")
    server.delay_s = 600
    with serving(server) as url, pytest.raises(ServerFailed, match=r"no answer within 0\.2 s"):
        complete(protocol(url), timeout_s=0.2)


def test_a_server_of_text_alone_is_refused_with_a_fix():
    server = answering([7, 2], "stop")
    text = {"choices": [{"text": "hello", "finish_reason": "stop"}]}
    server.fault = lambda number: web.json_response(text)
    with serving(server) as url, pytest.raises(InputError, match="returns text and no token ids"):
        complete(OpenAICompletions(url, model="m"))


@by_protocol
def test_the_key_comes_from_the_environment(protocol, monkeypatch):
    with serving(answering([7, 2], "stop", api_key="k3y-0123456789")) as url:
        monkeypatch.delenv(KEY, raising=False)
        with pytest.raises(InputError, match=r"asks for a key .*; set EAGLE3_API_KEY in the environment"):
            complete(protocol(url))
        for key in ("k3y-0123456789", "k3y-0123456789\n"):  # as from a file
            monkeypatch.setenv(KEY, key)
            assert complete(protocol(url), replace(REQUEST, seed=4)).token_ids == [7, 2]


@by_protocol
@pytest.mark.parametrize("key", ["k3y-01234\n56789", "k3y-01234\x0056789"])
def test_a_key_that_no_header_can_hold_is_named_and_not_shown(protocol, key, monkeypatch):
    monkeypatch.setattr(client.os, "environ", {KEY: key})
    with pytest.raises(InputError, match="EAGLE3_API_KEY has a line break or a control") as raised:
        complete(protocol("http://127.0.0.1:1"))
    assert "k3y" not in str(raised.value)


@by_protocol
def test_a_password_in_an_address_and_a_key_are_not_sent_together(protocol, monkeypatch):
    server = answering([7, 2], "stop")
    with serving(server) as url:
        named = url.replace("://", "://joe:s3cret@")
        monkeypatch.delenv(KEY, raising=False)
        assert complete(protocol(named)).token_ids == [7, 2]
        monkeypatch.setenv(KEY, "k3y-0123456789")
        with pytest.raises(InputError, match="has a user's name, and EAGLE3_API_KEY is set"):
            complete(protocol(named))
    assert len(server.received) == 1


@by_protocol
@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes a certificate")
def test_a_certificate_that_is_not_trusted_is_one_line_with_a_fix(protocol, tmp_path):
    key, certificate, port = tmp_path / "key.pem", tmp_path / "certificate.pem", free_port()
    make = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    subprocess.run([*make.split(), "-keyout", key, "-out", certificate], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)

    async def run() -> None:
        async with (
            await asyncio.start_server(lambda *streams: None, "127.0.0.1", port, ssl=context),
            new_session(timeout_s=60) as session,
        ):
            await protocol(f"https://localhost:{port}").complete(session, REQUEST)

    with pytest.raises(
        InputError, match=r"certificate is not trusted here \(self.signed certificate\); set SSL_CERT_FILE"
    ):
        asyncio.run(run())


@pytest.mark.parametrize(
    "url", ["http://h:8000/?api_key=k3y", "http://h:8000#a", "http://", "http://[::1", "http://h:99999", "h:8000"]
)
def test_an_address_that_cannot_work_is_refused_with_the_config(url):
    with pytest.raises(InputError, match=r"bench\.plain_url=.*must be the address of a server"):
        serve_run("bench", f"bench.plain_url='{url}'")
