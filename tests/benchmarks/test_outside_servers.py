"""benchmarks/outside_servers.py compares like with like: our rounds, counted as each server counts."""

from argparse import Namespace
from types import SimpleNamespace
from typing import Any

import pytest
from object_stores import body_of, http_server, send
from outside_servers import Counts, completion, counted_as

from eagle3.engine import client
from eagle3.head_files.servers import LLAMA_CPP, VLLM


def test_vllm_counts_drafts_beyond_the_end_as_our_decoder_does() -> None:
    assert counted_as(VLLM, [[3, 0, 3], [1]], [8, 3], max_new_tokens=8, steps=3) == Counts(4, 7)


def test_llama_cpp_drafts_no_more_than_are_left_and_counts_no_forward_without_drafts() -> None:
    # After 1 + 4 + 1 tokens of 8 one draft is left; after 1 + 4 + 2 of 8 none.
    assert counted_as(LLAMA_CPP, [[3, 0, 3]], [8], max_new_tokens=8, steps=3) == Counts(3, 4)
    assert counted_as(LLAMA_CPP, [[3, 1, 3]], [8], max_new_tokens=8, steps=3) == Counts(2, 4)
    assert counted_as(LLAMA_CPP, [[3, 0, 3]], [10], max_new_tokens=96, steps=3) == Counts(3, 6)


def test_llama_cpp_counts_no_drafts_behind_the_end_of_an_answer() -> None:
    assert counted_as(LLAMA_CPP, [[3, 0, 3]], [8], max_new_tokens=96, steps=3) == Counts(3, 4)


def test_a_reply_has_a_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    work: Any = SimpleNamespace(options=Namespace(max_new_tokens=8))
    reply = b'{"tokens": [1, 2]}'

    def answer(request: Any) -> None:
        body_of(request)
        send(request, 200, {"Content-Length": str(len(reply))}, reply)

    with http_server(answer) as url:
        assert completion(url, [5], work) == [1, 2]
        monkeypatch.setattr(client, "LONGEST_REPLY", len(reply) - 1)
        with pytest.raises(client.ServerFailed, match="longer than"):
            completion(url, [5], work)
