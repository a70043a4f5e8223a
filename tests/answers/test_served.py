"""Answers of a server are those of the target in this process, whatever happens to the servers meanwhile."""

import asyncio
import json
import resource
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import defaults
import pytest
from aiohttp import web
from answering import answer_by, prompt, read_answer_errors
from exported_head import tiny_chat
from protocol_server import ProtocolServer, plain
from safetensors.torch import load_file, save_file
from serving_fixtures import environment, launch_settings, serving, sglang_site

from eagle3.answers import served
from eagle3.answers.chat import Chat
from eagle3.answers.huggingface import HuggingFaceAnswerer
from eagle3.answers.served import ServedAnswerer
from eagle3.engine import pool
from eagle3.engine.client import KEY
from eagle3.engine.process import require_free_port
from eagle3.errors import InputError
from eagle3.settings.precomputing import Sampling
from eagle3.storage.files import read_jsonl, write_jsonl
from eagle3.target.model import Target
from eagle3.target.stored import StoredTarget

GREEDY = defaults.sampling(temperature=0, max_new_tokens=8)
Rows = dict[str, dict[str, Any]]


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "FIRST_PAUSE_S", 0.0)
    monkeypatch.setattr(pool, "LONGEST_PAUSE_S", 0.0)


@pytest.fixture(scope="module")
def prompts() -> list[dict[str, Any]]:
    questions = [
        ["How is `vfield` used?", "And `sfield`?"],
        ["Why?", "Why not?"],
        *([f"What is {n}?"] for n in range(18)),
    ]
    return [prompt(number, *each) for number, each in enumerate(questions)]


@pytest.fixture(scope="module")
def expected(target: Target, chat: Chat, prompts: Any, tmp_path_factory: pytest.TempPathFactory) -> Rows:
    answerer = HuggingFaceAnswerer(target=target, sampling=GREEDY, batch_size=1, batch_tokens=4096, window=64)
    return answered_rows(tmp_path_factory.mktemp("plain"), prompts, target, chat, answerer)


def answered_rows(
    folder: Path, prompts: Any, target: Any, chat: Chat, answerer: Any, sampling: Sampling = GREEDY
) -> Rows:
    write_jsonl(folder / "prompts/prompts.jsonl", prompts)
    answer_by(answerer, target, chat, sampling, folder)
    rows = [*read_jsonl(folder / "answers/answers.jsonl")]
    assert {*Counter(row["id"] for row in rows).values()} == {1}
    return {row["id"]: row for row in rows}


Ask = Callable[..., Rows]


@pytest.fixture
def ask(stored: StoredTarget, chat: Chat, prompts: Any, tmp_path: Path) -> Ask:
    """Answer the prompts by servers."""

    def run(
        urls: list[str],
        *,
        launch: Any = None,
        chat: Chat = chat,
        prompts: Any = prompts,
        sampling: Sampling = GREEDY,
        **changes: Any,
    ) -> Rows:
        launch = launch or launch_settings(sglang_site(tmp_path))
        parts = {"target": stored, "chat": chat, "sampling": sampling, "launch": launch, "folder": tmp_path / "logs"}
        answerer = ServedAnswerer(defaults.served(**{"urls": urls, "in_flight": 4} | changes), **parts)
        return answered_rows(tmp_path / "out", prompts, stored, chat, answerer, sampling)

    return run


@pytest.fixture
def server(target: Target) -> ProtocolServer:
    return ProtocolServer(plain(target), {"model_path": target.path}, tokenizer=target.tokenizer)


@pytest.mark.parametrize("name", ["sglang", "openai"])
def test_answers_of_a_server_are_those_of_the_target_here(ask, server, expected, name, caplog):
    server.max_model_len = int(1e30) if name == "sglang" else 4096  # SGLang needs no /tokenize
    with serving(server) as url:
        assert ask([url], name=name) == expected
    assert len(expected) >= 20 and server.most_running <= 4
    assert "not compared" not in caplog.text


def test_further_requests_of_conversations_leave_together(ask, server, prompts, monkeypatch):
    """SGLang reads what comes between two steps of all answers: one by one it would hardly answer."""
    slept = Counter[float]()
    sleep = asyncio.sleep

    async def noted(seconds: float) -> None:
        slept[round(seconds, 6)] += 1
        await sleep(0)

    loop = SimpleNamespace(time=lambda: 100.1)
    changed = {"sleep": noted, "get_running_loop": lambda: loop}
    monkeypatch.setattr(served, "asyncio", SimpleNamespace(**{**vars(asyncio), **changed}))
    with serving(server) as url:
        # So many tokens that answers end, and further turns follow.
        rows = ask([url], prompts=prompts[:2], sampling=replace(GREEDY, max_new_tokens=64))
    further = sum(len(row["turns"]) for row in rows.values()) - 2
    assert further > 0 and slept == {0.15: further}  # until 100.25


@pytest.mark.parametrize("name", ["sglang", "openai"])
def test_a_server_that_tells_no_token_ids_is_taken_with_a_warning_of_what_was_not_compared(
    ask, server, expected, name, caplog
):
    server.tells_ids, server.max_model_len = False, int(1e30)
    with serving(server) as url:
        assert ask([url], name=name) == expected
    reason = "no prompt_token_ids" if name == "sglang" else "HTTP 500"
    for what in ("tokenizer", "chat template"):
        assert f"{url}: its {what} is not compared with the target's" in caplog.text and reason in caplog.text


def test_servers_that_fail_now_and_then_lose_and_double_nothing(ask, server, expected, caplog):
    dying = ProtocolServer(server.decode, dict(server.arguments), tokenizer=server.tokenizer)
    server.fault = lambda number: web.Response(status=500) if number % 3 == 0 else None
    dying.fault = lambda number: web.Response(status=503) if number > 4 else None
    with serving(server) as url, serving(dying) as other:
        assert ask([url, other], attempts=100) == expected
    assert "times HTTP 500" in caplog.text and f"{other}: 3 answers" in caplog.text


def test_what_no_server_answers_is_counted_and_asked_again_by_the_next_run(ask, server, expected, tmp_path, caplog):
    refused = web.json_response({"error": {"message": "The input (9 tokens) is too long"}}, status=400).body
    server.fault = lambda number: web.Response(body=refused, status=400) if number == 5 else None
    with serving(server) as url:
        some = ask([url])
        assert len(some) < len(expected) and all(expected[name] == row for name, row in some.items())
        [error] = read_answer_errors(tmp_path / "out")
        assert error["reason"] == "HTTP 400 Bad Request: The input (9 tokens) is too long"
        assert "no row (HTTP 400 Bad Request: The input is too long: 1)" in caplog.text
        assert ask([url]) == expected


def test_an_answer_with_ids_that_the_target_does_not_have_is_not_stored(ask, server, expected, tmp_path):
    decode = server.decode
    server.decode = lambda prompt_ids, sampling: {**decode(prompt_ids, sampling), "output_ids": [4096]}
    with serving(server) as url:
        with pytest.raises(InputError, match="outside the target's vocabulary"):
            ask([url], attempts=2)
        server.decode = decode
        assert ask([url]) == expected


def test_a_run_without_servers_ends_in_one_line_and_the_next_one_continues(ask, server, expected):
    server.fault = lambda number: web.Response(status=503) if number > 12 else None
    with serving(server) as url:
        with pytest.raises(InputError, match=r"answers\.give_up_s=0\.2: no server answers: http.*HTTP 503"):
            ask([url], give_up_s=0.2, attempts=100)
        asked = len(server.received)
        server.fault = lambda number: None
        assert ask([url]) == expected
        assert len(server.received) - asked < asked + len(expected)


@pytest.mark.parametrize(
    ("change", "name", "message"),
    [
        ({"model_path": "/another"}, "sglang", r"serves /another, .*target\.path=.*answers\.served_as=/another"),
        ({"model_path": "/another"}, "openai", r"serves /another, .*target\.path=.*answers\.served_as=/another"),
        (
            {"template": "{% for m in messages %}{{ m.content }}{% endfor %}"},
            "sglang",
            "renders other prompts than this",
        ),
        ({"vocabulary": True}, "openai", "has another tokenizer than target.path"),
    ],
)
def test_a_server_of_another_target_is_refused_before_it_answers(ask, server, target, name, change, message):
    server.max_model_len = int(1e30) if name == "sglang" else 4096

    class Other:
        def encode(self, text: str, **settings: Any) -> list[int]:
            ids = target.tokenizer.encode(text, **settings)
            return ids[::-1] if "vocabulary" in change else ids

        def apply_chat_template(self, messages: Any, **settings: Any) -> Any:
            return target.tokenizer.apply_chat_template(messages, chat_template=change.get("template"), **settings)

    server.arguments |= {key: value for key, value in change.items() if key == "model_path"}
    server.tokenizer = Other()
    with serving(server) as url, pytest.raises(InputError, match=message):
        ask([url], name=name)
    assert server.received == []


@pytest.mark.parametrize("name", ["sglang", "openai"])
def test_a_server_that_comes_back_with_another_model_is_not_asked(ask, server, name):
    def restart(number: int) -> Any:
        if number != 12:
            return None
        server.arguments["model_path"] = "/another"
        return web.Response(status=502)

    server.fault = restart
    with serving(server) as url, pytest.raises(InputError, match="serves /another, the target is"):
        ask([url], name=name, attempts=100)
    assert len(server.received) < 12 + 4


def test_servers_of_the_same_name_with_other_weights_are_told_apart(ask, server):
    def otherwise(*arguments: Any) -> dict[str, Any]:
        answer = server.decode(*arguments)
        return {**answer, "output_ids": [(token + 1) % 4000 + 5 for token in answer["output_ids"]]}

    other = ProtocolServer(otherwise, dict(server.arguments), tokenizer=server.tokenizer)
    said = "do not serve the same weights: of 8 next tokens"
    with serving(server) as url, serving(other) as theirs, pytest.raises(InputError, match=said):
        ask([url, theirs])


def test_a_template_that_refuses_the_prompt_of_the_comparison_is_not_compared(ask, server, tmp_path, caplog):
    (tmp_path / "refusing.jinja").write_text("{{ raise_exception('a system turn comes first') }}")
    refusing = tiny_chat(template=str(tmp_path / "refusing.jinja"))
    with serving(server) as url, pytest.raises(InputError, match=r"nothing could be answered \(.*a system turn comes"):
        ask([url], chat=refusing)
    assert "not compared with the servers' chat template" in caplog.text


@pytest.mark.parametrize("name", ["sglang", "openai"])
def test_a_server_that_hangs_at_the_start_says_so_before_the_time_of_an_answer_is_over(ask, server, monkeypatch, name):
    async def hang(request: web.Request) -> None:
        await asyncio.sleep(600)

    server.server_info = server.models = hang  # type: ignore[method-assign]
    monkeypatch.setattr(served, "PROBE_S", 0.2)
    with serving(server) as url, pytest.raises(InputError, match=r"does not answer .*no answer within 0\.2 s"):
        ask([url], name=name)


@pytest.mark.parametrize("status", [404, 400])
def test_a_server_without_the_endpoint_or_that_refuses_the_keys_says_so_at_the_start(ask, server, tmp_path, status):
    server.fault = lambda number: web.json_response({"error": {"message": "Unknown"}}, status=status)
    with (
        serving(server) as url,
        pytest.raises(InputError, match=rf"answers\.urls: {url} does not answer .*HTTP {status} .*Unknown"),
    ):
        ask([url], name="openai")
    assert len(server.received) == 1 and not (tmp_path / "out/answers/errors.jsonl").exists()


def test_a_server_that_is_full_at_the_start_is_asked_again(ask, server, expected):
    server.fault = lambda number: web.Response(status=503) if number < 4 else None
    with serving(server) as url:
        assert ask([url], attempts=1) == expected


def test_a_fine_tune_with_the_config_of_the_target_is_told_apart_by_its_weights(ask, server, expected, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(server.arguments["model_path"], copy)
    server.arguments["model_path"] = str(copy)
    with serving(server) as url:
        assert ask([url]) == expected
        weights = load_file(copy / "model.safetensors")
        save_file({name: each + 1 for name, each in weights.items()}, copy / "model.safetensors")
        shutil.rmtree(tmp_path / "out")
        with pytest.raises(InputError, match=r"serves .*/copy, the target is .*answers\.served_as="):
            ask([url])


def test_a_copy_of_the_target_and_a_name_that_is_said_are_taken(ask, server, expected):
    server.arguments["model_path"] = "prod-v7"
    with serving(server) as url:
        assert ask([url], served_as="prod-v7") == expected


def test_the_target_is_asked_for_by_the_name_that_the_server_gives_it(ask, server, expected):
    """The server has several models, and names the target by another path to its folder."""
    server.max_model_len = 4096
    path = f"{server.arguments['model_path']}/."
    server.information = json.dumps({"data": [{"id": "an-adapter"}, {"id": path}]})
    with serving(server) as url:
        assert ask([url], name="openai") == expected
    assert {body["model"] for body in server.received} == {path}


def test_a_server_that_names_no_model_is_refused(ask, server):
    server.information = json.dumps({"data": []})
    with serving(server) as url, pytest.raises(InputError, match=r"serves no model by name.*tiny: give the URL of"):
        ask([url], name="openai")


@pytest.mark.parametrize("tokens", [[], ["Ze", "bras"], [{"id": 5, "piece": "Ze"}]])
def test_a_tokenize_that_reads_another_key_or_tells_no_ids_is_not_compared(ask, server, expected, caplog, tokens):
    async def of_llama_cpp(request: web.Request) -> web.Response:
        return web.json_response({"tokens": tokens})

    server.tokenize = of_llama_cpp  # type: ignore[method-assign]
    with serving(server) as url:
        assert ask([url], name="openai") == expected
    assert "its tokenizer is not compared" in caplog.text


def test_servers_are_started_with_a_key_and_stopped(ask, expected, tmp_path, monkeypatch):
    monkeypatch.setenv(KEY, "k3y-0123456789")
    settings = launch_settings(sglang_site(tmp_path), check=False)
    assert ask([], launch=settings, servers=1) == expected
    assert [path.name for path in (tmp_path / "logs").iterdir()] == ["server-0.log"]
    require_free_port(settings.host, settings.port)


def test_a_run_ends_once_all_servers_that_it_started_have_ended(ask, tmp_path):
    site = sglang_site(tmp_path)
    settings = launch_settings(site, check=False, env=environment(site, "12 scripted"))
    with pytest.raises(InputError, match=r"server 0 has ended \(exit status .*is kept: run the same command again"):
        ask([], launch=settings, servers=1, attempts=100)


def test_places_beyond_the_usual_limit_of_open_files_are_taken_or_refused_in_one_line(
    ask, server, expected, monkeypatch
):
    limits, taken = (1024, 4096), list[Any]()
    monkeypatch.setattr(resource, "getrlimit", lambda kind: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda *limit: taken.append(limit))
    with serving(server) as url:
        with pytest.raises(InputError, match=r"answers\.in_flight=640 for each of 7 servers .* may open 4096 files"):
            ask([url] * 7, in_flight=640)
        assert ask([url] * 2, in_flight=640) == expected
    assert taken == [(resource.RLIMIT_NOFILE, (1536, 4096))]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"urls": ["http://127.0.0.1:1"]}, r"answers\.urls: http://127\.0\.0\.1:1 does not answer .*Cannot connect"),
        ({"urls": [], "name": "openai"}, r"answers\.urls is empty"),
        ({"urls": ["http://x"], "head": "h"}, r"answers\.head=h is for servers that are started"),
    ],
)
def test_settings_that_cannot_work_are_one_line(ask, settings, message):
    with pytest.raises(InputError, match=message):
        ask(**settings)
