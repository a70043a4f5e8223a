"""Rows that offer tools: refused unless prompts.tools=keep, then the definitions go with the prompt."""

import json

import pytest
from prompt_stage import Prepare, chat, prepare, reasons, users

from eagle3.errors import InputError
from eagle3.prompts import Refused
from eagle3.prompts.reading.conversation import tools_of
from eagle3.prompts.reading.shapes import shape_of

__all__ = ["prepare"]

PARAMETERS = {"type": "object", "properties": {"town": {"type": "string", "description": "Größe"}}}
FUNCTION = {"name": "weather", "description": "of a town", "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": FUNCTION}]
KEEPING = shape_of(None, None, keeps_tools=True)


def read(row: dict):
    return tools_of(KEEPING.read(row), KEEPING)


@pytest.mark.parametrize(
    "row",
    [
        {"tools": TOOLS},
        {"tools": json.dumps(TOOLS)},
        {"functions": [FUNCTION]},
        {"tools": [{"type": "function", **FUNCTION}]},
        {"body": {"tools": TOOLS}},
    ],
)
def test_the_usual_forms_of_tools_become_one(row: dict) -> None:
    assert read({"messages": users("a"), **row}) == TOOLS


@pytest.mark.parametrize("row", [{}, {"tools": []}, {"tools": "[]"}, {"tools": None}])
def test_a_row_without_tools_has_none(row: dict) -> None:
    assert read({"messages": users("a"), **row}) is None


@pytest.mark.parametrize(
    ("tools", "reason"),
    [
        ("weather", "tools that are no list"),
        ({"weather": FUNCTION}, "tools that are no list"),
        (["weather"], "tools other than functions"),
        ([{"type": "web_search"}], "tools other than functions"),
        ([{"name": "weather", "input_schema": PARAMETERS}], "tools other than functions"),
        ([{"type": "function", "function": {"description": "x"}}], "tools without a name"),
        ([{"name": "f", "parameters": {"properties": {"a": None}}}], "as tables fill them in"),
        ([{"name": "f", "description": "\ud800"}], "no JSON in valid Unicode"),
        ([{"name": "f", "parameters": {"maximum": float("nan")}}], "no JSON in valid Unicode"),
    ],
)
def test_tools_that_no_template_could_be_given_are_refused_with_a_reason(tools: object, reason: str) -> None:
    with pytest.raises(Refused, match=reason):
        read({"messages": users("a"), "tools": tools})


def test_tools_are_refused_and_counted_unless_they_are_kept(prepare: Prepare) -> None:
    rows = [chat("Weather?", tools=TOOLS), chat("Hello!"), chat("Look!", tools=TOOLS, image="x.png")]
    ledger = prepare(rows)
    [source] = ledger["sources"].values()
    assert source["rejected"] == {"row with tools": 2}
    ledger = prepare(rows, tools="keep")
    [source] = ledger["sources"].values()
    assert source["rejected"] == {"row with image": 1} and source["rows"] == 3 and source["prompts"] == 2
    assert [prompt.get("tools") for prompt in prepare.prompts()] == [TOOLS, None]
    assert "tools" not in prepare.prompts()[1]


def test_rows_as_datatrove_writes_them_are_read_with_their_columns_named(prepare: Prepare) -> None:
    kept = {"license": "MIT", "source": "support", "messages": chat("Weather?", "Rain.", "Why?")["messages"]}
    written = {
        "text": "Weather?\n\nWhy?",
        "id": "a/1",
        "media": [],
        "metadata": {**kept, "tools": TOOLS, "file_path": "x"},
    }
    fields = {"messages": "metadata.messages", "attachments": ["metadata.tools"]}
    with pytest.raises(InputError, match=r"row with metadata\.tools: 1"):
        prepare([written], fields=fields)
    prepare([written], fields=fields, tools="keep")
    users_turns = [turn for turn in kept["messages"] if turn["role"] == "user"]
    assert prepare.prompts() == [
        {"id": "a/1", "source": "support", "license": "MIT", "messages": users_turns, "tools": TOOLS}
    ]
    prepare([written])  # the text alone
    assert prepare.prompts()[0]["messages"] == users("Weather?\n\nWhy?")


def test_tools_make_another_id_of_the_same_question(prepare: Prepare) -> None:
    prepare([chat("Weather?", tools=TOOLS)], tools="keep")
    [with_tools] = prepare.prompts()
    prepare([chat("Weather?")], tools="keep")
    [without] = prepare.prompts()
    assert with_tools["id"] != without["id"]


def described(text: object) -> list[dict]:
    return [{"type": "function", "function": {"name": "weather", "description": text}}]


def test_personal_data_in_tools_is_found_like_that_in_the_text(prepare: Prepare) -> None:
    rows = [
        chat("Weather?", tools=described("ask anna.berg@web.de")),
        chat("Snow or rain?", tools=described("asks 93.184.216.34 for it")),
        chat("Sun?", tools=[{"name": "f", "parameters": {"hosts": "C:\\93.184.216.34"}}]),
    ]
    prepare(rows, tools="keep")
    assert reasons(prepare) == ["personal data: EMAIL_ADDRESS"]
    assert [prompt["tools"][0]["function"].get("description") for prompt in prepare.prompts()] == [
        "asks <IP_ADDRESS> for it",
        None,
    ]
    assert "93.184" not in (prepare.folder / "prompts.jsonl").read_text()


def test_the_length_of_a_prompt_counts_its_tools(prepare: Prepare) -> None:
    rows = [chat("Weather?", tools=described("x" * 200)), chat("Sun?")]
    prepare(rows, tools="keep", length={"max_characters": 100})
    assert reasons(prepare) == ["more than 100 characters"]
