"""Rows in the shapes that people have: which columns make the prompt, whose turns they are, what is refused."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from prompt_stage import Prepare, chat, messages_of, prepare, reasons, texts, users, write

from eagle3.errors import InputError
from eagle3.prompts import Refused
from eagle3.prompts.reading.shapes import shape_of

__all__ = ["prepare"]

SYSTEM = {"role": "system", "content": "Be brief."}


def answered(*turns: dict, answer: str) -> list[dict]:
    return [*turns, {"role": "assistant", "content": answer}]


@pytest.mark.parametrize(
    ("row", "messages"),
    [
        pytest.param(
            {"instruction": "Add.", "input": "1, 2", "output": "3", "text": "### Instruction: Add."},
            answered(*users("Add.\n\n1, 2"), answer="3"), id="Alpaca",
        ),
        pytest.param({"instruction": "a", "input": "", "output": "b"}, answered(*users("a"), answer="b"), id="empty"),
        pytest.param(
            {"instruction": "Who?", "context": "Ada wrote it.", "response": "Ada", "category": "closed_qa"},
            answered(*users("Who?\n\nAda wrote it."), answer="Ada"), id="Dolly",
        ),
        pytest.param(
            {"system": "Be brief.", "history": [], "instruction": "c", "output": "d"},
            answered(SYSTEM, *users("c"), answer="d"), id="with a system prompt",
        ),
        pytest.param({"Question": "Why?", "Answer": "So."}, answered(*users("Why?"), answer="So."), id="in capitals"),
        pytest.param({"text": "  Tell a joke.\n"}, users("  Tell a joke.\n"), id="text with its whitespace"),
        pytest.param({"turns": ["a", "b"]}, users("a", "b"), id="user turns"),
        pytest.param({"prompt": users("a", "b")}, users("a", "b"), id="a list of turns as prompt"),
        pytest.param(
            {"messages": None, "turns": None, "conversation": [
                *users("a"), {"role": "model", "content": "x"}, *users("b"), {"role": "bing", "content": "y"}]},
            answered(*answered(*users("a"), answer="x"), *users("b"), answer="y"), id="other names of assistants",
        ),
        pytest.param({"input": "a", "output": "b"}, answered(*users("a"), answer="b"), id="input and output"),
        pytest.param({"role": "prompter", "text": "a", "parent_id": None}, users("a"), id="a first turn"),
        pytest.param(
            {"conversations": [{"from": "system", "value": "Be brief."}, {"from": "human", "value": "a"},
                               {"from": "gpt", "value": "b"}]},
            answered(SYSTEM, *users("a"), answer="b"), id="ShareGPT",
        ),
        pytest.param(
            {"messages": [{"role": "developer", "content": "Be brief."},
                          {"role": "user", "content": [{"type": "input_text", "text": "a "},
                                                       {"type": "text", "text": "b"}]}]},
            [SYSTEM, *users("a b")], id="OpenAI roles and parts",
        ),
        pytest.param(
            {"conversation": [{"speaker": "Customer", "text": "a"}, {"speaker": "Agent", "text": "b"}]},
            answered(*users("a"), answer="b"), id="customer and agent",
        ),
        pytest.param({"messages": json.dumps(users("a"))}, users("a"), id="messages as JSON text"),
        pytest.param(
            {"custom_id": "7", "method": "POST", "url": "/v1/chat/completions",
             "body": {"model": "gpt-4", "messages": [SYSTEM, *users("a")], "tools": []}},
            [SYSTEM, *users("a")], id="OpenAI batch file",
        ),
        pytest.param(
            {"custom_id": "7", "body": {"instructions": "Be brief.", "input": "a"}},
            [SYSTEM, *users("a")], id="batch of responses",
        ),
        pytest.param({"body": json.dumps({"messages": users("a")})}, users("a"), id="body as JSON text"),
        pytest.param({"messages": [], "prompt": "a", "tools": "[]"}, users("a"), id="empty columns say nothing"),
        pytest.param({"messages": users("a"), "response": "b"}, answered(*users("a"), answer="b"), id="answer beside"),
    ],
)  # fmt: skip
def test_a_usual_shape_is_read_with_its_answer_where_answers_are_kept(row: dict, messages: list[dict]) -> None:
    if messages[-1]["role"] == "assistant":
        assert messages_of(row, keep_answers=True) == messages
    assert messages_of(row, keep_answers=False) == [turn for turn in messages if turn["role"] != "assistant"]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": users("a"), "tools": [{"name": "f"}]}, "row with tools"),
        ({"body": {"messages": users("a"), "tools": [{"name": "f"}]}}, "row with body.tools"),
        ({"prompt": "a", "tools": '[{"name": "f"}]'}, "row with tools"),
        ({"question": "What is this?", "image": {"bytes": "ff"}}, "row with image"),
        ({"input_ids": [1, 2, 3]}, "no column of messages or prompts"),
        ({"role": "assistant", "text": "b"}, "one turn of a conversation"),
        ({"role": "prompter", "text": "b", "parent_id": "1"}, "one turn of a conversation"),
        ({"text": "### Human: a\n### Assistant: b"}, "text with the turns of a rendered conversation"),
        ({"text": "<|im_start|>user\na<|im_end|>"}, "text with the turns of a rendered conversation"),
        ({"question": "a", "context": {"b": 1}}, "context is not text"),
        ({"prompt": "a", "history": [["b", "c"]]}, "row with history"),
        ({"system": "x", "messages": [SYSTEM, *users("a")]}, "a system prompt in the turns and one in a column"),
        ({"messages": "a"}, "messages is not a list"),
        ({"messages": ["a"]}, "messages holds something other than turns"),
        ({"turns": [["a"]]}, "turns holds something other than turns"),
        ({"messages": []}, "no user turn"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "no user turn"),
        ({"prompt": " "}, "no user turn"),
        ({"messages": [*users("a"), {"role": "tool", "content": "7"}]}, "tool turn"),
        ({"messages": [{"role": "narrator", "content": "a"}]}, "unknown role"),
        ({"messages": [{"content": "a"}]}, "unknown role"),
        ({"messages": users(None)}, "content is not text"),
        ({"messages": users([{"type": "text", "text": "a"}, {"type": "image"}])}, "content with parts other than text"),
        ({"messages": users("half a pair \ud83d")}, "content is not valid Unicode"),
        ({"title": "a"}, "no column of messages or prompts"),
    ],
)  # fmt: skip
def test_what_would_make_another_prompt_is_refused_with_a_reason(row: dict, reason: str) -> None:
    with pytest.raises(Refused) as refused:
        messages_of(row, keep_answers=False)
    assert refused.value.reason == reason


def test_named_columns_and_roles_take_the_place_of_the_usual_ones() -> None:
    row = {"Frage": "a", "prompt": "not this", "meta": {"rolle": "Be brief."}, "tools": [1]}
    shape = shape_of({"prompt": "frage", "system": ["meta.rolle"], "attachments": []}, None)
    assert messages_of(row, keep_answers=False, shape=shape) == [SYSTEM, *users("a")]
    turns = {"verlauf": [{"wer": "Kundin", "was": "a"}, {"wer": "bot", "was": "b"}]}
    shape = shape_of({"messages": "verlauf", "role": "wer", "content": "was"}, {"Kundin": "user"})
    assert messages_of(turns, keep_answers=True, shape=shape) == answered(*users("a"), answer="b")


def test_each_source_has_columns_of_its_own_and_a_table_is_read_by_them(prepare: Prepare) -> None:
    table = pa.Table.from_pylist([{"Frage": "a", "Lizenz": "MIT", "Metadata": {"source": "forum"}}])
    pq.write_table(table, prepare.root / "a.parquet")
    fields = {"prompt": "Frage", "license": ["Lizenz"]}
    other = str(write(prepare.root / "b.jsonl", [chat("b")]))
    prepare(sources=[{"path": str(prepare.root / "a.parquet"), "fields": fields}, other])
    assert texts(prepare) == ["a", "b"] and [found["source"] for found in prepare.prompts()] == ["forum", "b"]


def test_rows_of_unknown_columns_say_which_key_names_them(prepare: Prepare) -> None:
    with pytest.raises(InputError, match=r"no column of messages or prompts: 1\).*prompts\.fields\.prompt"):
        prepare([{"Frage": "a", "license": "MIT"}])


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"LICENSE": "MIT"}, None),
        ({"licenses": ["MIT", "Apache-2.0"]}, None),
        ({"metadata": {"license": "MIT"}}, None),
        ({"metadata": '{"License": "MIT"}'}, None),
        ({"license": "MIT", "metadata": {"license": "GPL-3.0-only"}}, "license not allowed: MIT AND GPL-3.0-only"),
        ({"license": "MIT", "dataset": "ShareGPT"}, "source forbidden: ShareGPT"),
        ({"license": "MIT", "Model": "gpt-4o"}, "source forbidden: output of OpenAI"),
        ({"license": "MIT", "models": ["mistral", "claude-3-opus"]}, "source forbidden: output of Claude"),
        ({"license": "MIT", "metadata": {"source": "WildChat"}}, "source forbidden: WildChat"),
    ],
)
def test_licences_and_origins_are_read_under_the_names_that_people_give_them(
    prepare: Prepare, row: dict, reason: str | None
) -> None:
    prepare([chat("a"), {"prompt": "b", **row}])
    assert (reason is None and not reasons(prepare)) or reasons(prepare)[0].startswith(str(reason))
    assert all(set(prompt) == {"id", "source", "license", "messages"} for prompt in prepare.prompts())
