"""Rows that offer tools: refused unless prompts.tools=keep, then the definitions go with the prompt."""

import json

import pytest
from prompt_stage import chat, reasons, texts, users

from eagle3.errors import InputError
from eagle3.prompts import Refused
from eagle3.prompts.reading.shapes import build_layout
from eagle3.prompts.reading.tools import read_tools

PARAMETERS = {"type": "object", "properties": {"town": {"type": "string", "description": "Größe"}}}
FUNCTION = {"name": "weather", "description": "of a town", "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": FUNCTION}]
KEEPING = build_layout(None, None, keeps_tools=True)


def read(row: dict):
    return read_tools(KEEPING.read(row))


def test_the_usual_forms_of_tools_become_one():
    forms = ({"tools": TOOLS}, {"tools": json.dumps(TOOLS)}, {"functions": [FUNCTION]}, {"body": {"tools": TOOLS}},
             {"tools": [{"type": "function", **FUNCTION}]}, {"tools": [json.dumps(FUNCTION)]},
             {"available_tools": json.dumps(TOOLS)},
             {"tools": [{"name": "weather", "description": "of a town", "input_schema": PARAMETERS}]})  # fmt: skip
    assert [read({"messages": users("a"), **row}) for row in forms] == [TOOLS] * len(forms)
    assert {read({"messages": users("a"), "tools": nothing}) for nothing in ([], "[]", None)} == {None}


@pytest.mark.parametrize(
    ("tools", "reason"),
    [
        ("weather", "tools that are no list"),
        ({"weather": FUNCTION}, "tools that are no list"),
        (["weather"], "tools other than functions"),
        ([{"type": "web_search"}], "tools other than functions"),
        ([{"toolSpec": {"name": "weather"}}], "tools other than functions"),
        ([{"type": "function", "function": {"description": "x"}}], "tools without a name"),
        ([{"name": "f", "parameters": {"properties": {"a": None}}}], "as tables fill them in"),
        ([{"name": "f", "description": "\ud800"}], "no JSON in valid Unicode"),
        ([{"name": "f", "parameters": {"maximum": float("nan")}}], "no JSON in valid Unicode"),
    ],
)
def test_tools_that_no_template_could_be_given_are_refused_with_a_reason(tools, reason):
    with pytest.raises(Refused, match=reason):
        read({"messages": users("a"), "tools": tools})


def test_tools_are_refused_and_counted_unless_they_are_kept_and_then_count_in_the_id(prepare):
    rows = [chat("Weather?", tools=TOOLS), chat("Hello!"), chat("Look!", tools=TOOLS, image="x.png")]
    [source] = prepare(rows)["sources"].values()
    assert source["rejected"] == {"row with tools": 2}
    [source] = prepare(rows, tools="keep")["sources"].values()
    assert source["rejected"] == {"row with image": 1} and source["rows"] == 3 and source["prompts"] == 2
    with_tools, without = prepare.prompts()
    assert with_tools["tools"] == TOOLS and "tools" not in without
    prepare([chat("Weather?")], tools="keep")
    assert prepare.prompts()[0]["id"] != with_tools["id"]


def test_rows_as_datatrove_writes_them_are_read_with_their_columns_named(prepare):
    kept = {"license": "MIT", "source": "support", "messages": chat("Weather?", "Rain.", "Why?")["messages"]}
    metadata = {**kept, "tools": TOOLS, "file_path": "x"}
    written = {"text": "Weather?\n\nWhy?", "id": "a/1", "media": [], "metadata": metadata}
    fields = {"messages": "metadata.messages", "attachments": ["metadata.tools"]}
    with pytest.raises(InputError, match=r"row with metadata\.tools: 1"):
        prepare([written], fields=fields)
    prepare([written], fields=fields, tools="keep")
    turns = {"messages": users("Weather?", "Why?"), "each_answered": True}
    assert prepare.prompts() == [{"id": "a/1", **kept, **turns, "tools": TOOLS}]
    prepare([written])  # the text alone
    assert texts(prepare) == ["Weather?\n\nWhy?"]


def test_tools_with_a_key_that_is_given_twice_are_refused(prepare):
    row = '{"license": "MIT", "prompt": "a", "tools": [{"name": "f", "parameters": {"x": 1, "x": 2}}]}'
    prepare([row, chat("b")], tools="keep")
    assert reasons(prepare) == ["tools that are no JSON in valid Unicode, without a key twice"]


def described(text: object) -> list[dict]:
    return [{"type": "function", "function": {"name": "weather", "description": text}}]


def test_personal_data_in_tools_is_found_and_their_length_counts_like_that_of_the_text(prepare):
    rows = [
        chat("Weather?", tools=described("ask anna.berg@web.de")),
        chat("Snow or rain?", tools=described("asks 93.184.216.34 for it")),
        chat("Sun?", tools=[{"name": "f", "parameters": {"hosts": "C:\\93.184.216.34"}}]),
        chat("Fog?", tools=described("x" * 200)),
    ]
    prepare(rows, tools="keep", length={"max_characters": 200})
    assert reasons(prepare) == ["personal data: EMAIL_ADDRESS", "more than 200 characters"]
    functions = [prompt["tools"][0]["function"] for prompt in prepare.prompts()]
    assert [function.get("description") for function in functions] == ["asks <IP_ADDRESS> for it", None]
    assert "93.184" not in (prepare.folder / "prompts.jsonl").read_text()
