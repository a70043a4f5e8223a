"""Rows in the shapes that people have: which columns make the prompt, whose turns they are, what is refused."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from prompt_stage import Prepare, chat, messages_of, reasons, texts, users, write

from eagle3.prompts import Refused
from eagle3.prompts.reading.shapes import shape_of

SYSTEM = {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize(
    ("turns", "row"),
    {
        # Alpaca, with and without input, in any order, with a system prompt; Dolly; question and answer; text as it is
        ("user: Add.\n\n1, 2", "assistant: 3"):
            {"instruction": "Add.", "input": "1, 2", "output": "3", "text": "### Instruction: Add."},
        ("user: Add.\n\n3, 4", "assistant: 7"): {"input": "3, 4", "instruction": "Add.", "output": "7"},
        ("user: a", "assistant: b"): {"instruction": "a", "input": "", "output": "b"},
        ("system: x", "user: c", "assistant: d"): {"system": "x", "history": [], "instruction": "c", "output": "d"},
        ("user: Who?\n\nAda wrote it.", "assistant: Ada"):
            {"instruction": "Who?", "context": "Ada wrote it.", "response": "Ada", "category": "closed_qa"},
        ("user: Why?", "assistant: So."): {"Question": "Why?", "Answer": "So."},
        ("user: in", "assistant: out"): {"input": "in", "output": "out"},
        ("user:   Tell a joke.\n",): {"text": "  Tell a joke.\n"},
        # Turns of the user; turns as prompt; other names of assistants; ShareGPT; a tree; an answer in its own column
        ("user: a", "user: b"): {"turns": ["a", "b"]},
        ("user: b",): {"prompt": users("b")},
        ("user: a", "assistant: x", "user: b", "assistant: y"):
            {"messages": None, "turns": None, "conversation": [
                *users("a"), {"role": "model", "content": "x"}, *users("b"), {"role": "bing", "content": "y"}]},
        ("system: x", "user: a", "assistant: b"):
            {"conversations": [{"from": "system", "value": "x"}, {"from": "human", "value": "a"},
                               {"from": "gpt", "value": "b"}]},
        ("user: first",): {"role": "prompter", "text": "first", "parent_id": None},
        ("user: q", "assistant: r"): {"messages": users("q"), "response": "r"},
        # OpenAI's roles and parts, batch files of both kinds; a help desk; JSON as text; empty columns say nothing
        ("system: x", "user: a\nb"):
            {"messages": [{"role": "developer", "content": "x"},
                          {"role": "user", "content": [{"type": "input_text", "text": "a"},
                                                       {"type": "text", "text": "b"}]}]},
        ("system: Be brief.", "user: a"):
            {"custom_id": "7", "method": "POST", "url": "/v1/chat/completions",
             "body": {"model": "gpt-4", "messages": [SYSTEM, *users("a")], "tools": []}},
        ("system: x", "user: a"): {"custom_id": "7", "body": {"instructions": "x", "input": "a"}},
        ("user: help", "assistant: ok"):
            {"conversation": [{"speaker": "Customer", "text": "help"}, {"speaker": "Agent", "text": "ok"}]},
        ("user: text",): {"messages": json.dumps(users("text"))},
        ("user: body",): {"body": json.dumps({"messages": users("body")})},
        ("user: a",): {"messages": [], "prompt": "a", "tools": "[]"},
    }.items(),
)  # fmt: skip
def test_a_usual_shape_is_read_with_its_answer_where_answers_are_kept(turns: tuple[str, ...], row: dict) -> None:
    def read(*, keep_answers: bool) -> list[str]:
        return [f"{turn['role']}: {turn['content']}" for turn in messages_of(row, keep_answers=keep_answers)]

    if turns[-1].startswith("assistant"):
        assert read(keep_answers=True) == [*turns]
    assert read(keep_answers=False) == [turn for turn in turns if not turn.startswith("assistant")]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": users("a"), "tools": [{"name": "f"}]}, "row with tools"),
        ({"body": {"messages": users("a"), "tools": [{"name": "f"}]}}, "row with body.tools"),
        ({"prompt": "a", "tools": '[{"name": "f"}]'}, "row with tools"),
        ({"question": "What is this?", "image": {"bytes": "ff"}}, "row with image"),
        ({"messages": [{**users("a")[0], "images": ["ff"]}]}, "turn with images"),
        ({"messages": [{**SYSTEM, "tools": '[{"name": "f"}]'}, *users("a")]}, "turn with tools"),
        ({"input_ids": [1, 2, 3]}, "no column of messages or prompts"),
        ({"role": "assistant", "text": "b"}, "one turn of a conversation"),
        ({"role": "prompter", "text": "b", "parent_id": "1"}, "one turn of a conversation"),
        ({"text": "### Human: a\n### Assistant: b"}, "text with the turns of a rendered conversation"),
        ({"text": "A talk.\n### Human: a"}, "text with the turns of a rendered conversation"),
        ({"text": "\n\nHuman: a\nb\n\nAssistant: c"}, "text with the turns of a rendered conversation"),
        ({"text": "<|im_start|>user\na<|im_end|>"}, "text with the turns of a rendered conversation"),
        ({"question": "a", "context": {"b": 1}}, "context is not text"),
        ({"prompt": "a", "history": [["b", "c"]]}, "row with history"),
        ({"system": "x", "messages": [SYSTEM, *users("a")]}, "another system prompt in a column than in the turns"),
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
    assert messages_of(turns, keep_answers=True, shape=shape) == [*users("a"), {"role": "assistant", "content": "b"}]


def test_each_source_has_columns_of_its_own_and_a_table_is_read_by_them(prepare: Prepare) -> None:
    table = pa.Table.from_pylist([{"Frage": "a", "Lizenz": "MIT", "Metadata": {"source": "forum"}}])
    pq.write_table(table, prepare.root / "a.parquet")
    fields = {"prompt": "Frage", "license": ["Lizenz"]}
    other = str(write(prepare.root / "b.jsonl", [chat("b")]))
    prepare(sources=[{"path": str(prepare.root / "a.parquet"), "fields": fields}, other])
    assert texts(prepare) == ["a", "b"] and [found["source"] for found in prepare.prompts()] == ["forum", "b"]


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
