"""Turns as real files have them: wrapped, in pairs, as trees, with Anthropic's parts, and what a text is about."""

from typing import Any

import pytest
from prompt_stage import read_messages, users

from eagle3.prompts import Refused
from eagle3.prompts.reading.conversation import conversation
from eagle3.prompts.reading.shapes import build_layout

KEEPING = build_layout(None, None, keeps_tools=True)


def said(row: dict, *, keep_answers: bool = False) -> list[str]:
    return [f"{turn['role']}: {turn['content']}" for turn in read_messages(row, keep_answers=keep_answers)]


def notes(row: dict) -> list[tuple[str, str | None]]:
    columns = build_layout(None, None).read(row)
    conversation(columns, keep_answers=False)
    return columns.notes


@pytest.mark.parametrize(
    "turns",
    [
        [{"chatgptMessage": users("a")[0], "timeSent": "1"}, {"chatgptMessage": {"role": "assistant", "content": "b"}}],
        [{"type": "human", "data": {"content": "a", "type": "human"}},
         {"type": "ai", "data": {"content": "b", "type": "ai"}}],
        [{"lc": 1, "type": "constructor", "kwargs": {"content": "a", "type": "human"}},
         {"lc": 1, "type": "constructor", "kwargs": {"content": "b", "type": "ai"}}],
        [{"author": {"role": "user"}, "content": "a"}, {"author": {"role": "assistant"}, "content": "b"}],
        [{"content": {"role": "user", "parts": [{"text": "a"}]}},
         {"content": {"role": "model", "parts": [{"text": "b"}]}}],
        [{"human": "a", "assistant": "b"}],
        [{"assistant": "b", "human": "a", "score": 3}],
        [{"input": "a", "output": "b"}],
        [{"question": "a", "answer": "b", "time": "1"}],
        [{"role": "user", "content": ["a"]}, {"role": "assistant", "content": [{"type": "text", "value": "b"}]}],
    ],
)  # fmt: skip
def test_turns_inside_objects_and_pairs_are_read(turns):
    assert said({"conversation": turns}, keep_answers=True) == ["user: a", "assistant: b"]
    assert said({"conversation": [*turns, *turns]}) == ["user: a", "user: a"]


def test_pairs_may_begin_with_a_system_prompt_and_end_without_an_answer():
    assert said({"conversation": [{"system": "s", "input": "a", "output": "b"}]}) == ["system: s", "user: a"]
    assert said({"conversation": [{"human": "a", "assistant": "b"}, {"human": "c", "assistant": ""}]}) == [
        "user: a",
        "user: c",
    ]


def test_what_stands_next_to_a_wrapped_turn_is_read_or_counted():
    wrapped = {"message": users("a")[0], "sent": "now"}
    assert ("key of turns not read", "sent") in notes({"messages": [wrapped]})
    assert ("key of turns not read", "score") in notes({"messages": [{"human": "a", "assistant": "b", "score": 3}]})
    with pytest.raises(Refused, match="turn with functions"):
        said({"messages": [{**wrapped, "functions": [{"name": "f"}]}]})
    late, soon = ({**wrapped, "timestamp": time} for time in (2, 1))
    with pytest.raises(Refused, match="in another order"):
        said({"messages": [late, {"message": {"role": "assistant", "content": "b"}}, soon]})


@pytest.mark.parametrize(
    "turn",
    [
        {"user": "Ann", "bot": "Helper", "text": "hi"},  # names of people
        {"customer": "Ann", "agent": "Bob", "message": "hi"},
        {"text": "yes", "reply_to": users("a")[0]},  # a turn that it quotes
        {"user_content": {"parts": [{"text": "a"}]}, "final_response": {"role": "model", "parts": [{"text": "b"}]}},
        {"human": "a", "observation": "b", "assistant": "c"},
        {"input": "a", "context": "x", "output": "b"},
        {"human": "a"},
    ],
)
def test_objects_that_may_be_something_else_are_no_pairs(turn):
    with pytest.raises(Refused, match="turn without a role"):
        said({"messages": [turn]})


# --- trees ---


def node(id: str, parent: str | None, role: str | None, *parts: Any, **more: Any) -> dict:
    """A node as ChatGPT exports it; the root has no message."""
    content = {"content_type": "text", "parts": [*parts]}
    message = {"author": {"role": role}, "content": content, "weight": 1.0, **more} if role else None
    return {id: {"id": id, "parent": parent, "children": [], "message": message}}


def exported(*nodes: dict, **row: Any) -> dict:
    return {"title": "t", "mapping": {id: each for part in nodes for id, each in part.items()}, **row}


HIDDEN = {"metadata": {"is_visually_hidden_from_conversation": True}}
TALK = (
    node("0", None, None),
    node("1", "0", "system", ""),
    node("2", "1", "user", "about me", **HIDDEN),
    node("3", "2", "user", "a"),
    node("4", "3", "assistant", "b"),
    node("5", "4", "user", "c"),
)
EDITED = (node("6", "4", "user", "d"), node("7", "6", "assistant", "e"))


def test_a_tree_is_read_up_to_its_current_turn():
    both = exported(*EDITED, *TALK, current_node="7")
    assert said(both) == ["user: a", "user: d"]
    assert said(both, keep_answers=True) == ["user: a", "assistant: b", "user: d", "assistant: e"]
    assert said({**both, "current_node": "5"}) == ["user: a", "user: c"]
    assert said(exported(*TALK)) == ["user: a", "user: c"]  # a single branch needs none
    assert ("turn that its export calls hidden left out", None) in notes(both)
    assert ("column not read", "mapping") not in notes(both)
    own = {
        "tree": {"1": {**users("a")[0], "parentId": None}, "2": {"role": "assistant", "content": "b", "parentId": "1"}}
    }
    assert said(own) == ["user: a"]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (exported(*TALK, *EDITED), "turns as a tree"),
        (exported(*TALK, *EDITED, current_node="9"), "turns as a tree"),
        (exported(*TALK[1:], current_node="5"), "turns as a tree"),  # a parent is missing
        (exported(node("1", "2", "user", "a"), node("2", "1", "assistant", "b"), current_node="1"), "turns as a tree"),
        (
            exported(node("1", None, "user", "a", metadata={"attachments": [{"name": "x.pdf"}]})),
            "turn with attachments",
        ),
        (exported(node("1", None, "user", {"asset_pointer": "x"}, "a")), "content with parts other than text"),
        (exported(node("1", None, "user", "a"), node("2", "1", "tool", "b", **HIDDEN)), "tool turn"),
        (exported(node("1", None, "user")), "empty user turn"),
    ],
)
def test_trees_that_have_no_single_conversation_of_text_are_refused(row, reason):
    with pytest.raises(Refused, match=reason):
        said(row)


# --- Anthropic's parts; files of turns ---

USE = {"type": "tool_use", "id": "t1", "name": "look_up", "input": {"most": 2}}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "found"}]}
TOOL = {"name": "look_up", "description": "Looks up.", "input_schema": {"type": "object", "properties": {}}}
MESSAGES = [
    *users("a"),
    {"role": "assistant", "content": [{"type": "text", "text": "I look."}, USE]},
    {"role": "user", "content": [RESULT, {"type": "text", "text": "and now?"}]},
]


def test_anthropics_calls_and_results_are_those_of_tools():
    with pytest.raises(Refused, match="tool turn"):
        said({"messages": MESSAGES})
    messages = read_messages({"messages": MESSAGES, "tools": [TOOL]}, keep_answers=False, shape=KEEPING)
    assert [(turn["role"], turn["content"]) for turn in messages] == [
        ("user", "a"), ("assistant", ""), ("tool", "found"), ("user", "and now?")
    ]  # fmt: skip
    assert messages[1]["tool_calls"][0]["function"] == {"name": "look_up", "arguments": {"most": 2}}
    assert messages[2]["tool_call_id"] == messages[1]["tool_calls"][0]["id"]
    only = [*MESSAGES[:2], {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1"}]}]
    messages = read_messages({"messages": only, "tools": [TOOL]}, keep_answers=False, shape=KEEPING)
    assert [turn["role"] for turn in messages] == ["user", "assistant", "tool"]


def test_a_node_of_a_tree_may_hold_several_turns():
    nodes = {
        f"{number}": {"parent": f"{number - 1}" if number else None, "message": message}
        for number, message in enumerate(MESSAGES)
    }
    messages = read_messages({"mapping": nodes, "tools": [TOOL]}, keep_answers=False, shape=KEEPING)
    assert messages == read_messages({"messages": MESSAGES, "tools": [TOOL]}, keep_answers=False, shape=KEEPING)


def test_claudes_export_is_read_and_a_turn_about_a_file_is_refused():
    turn = {"uuid": "1", "sender": "human", "text": "a", "content": [{"type": "text", "text": "a"}], "files": []}
    assert said({"uuid": "0", "name": "t", "chat_messages": [turn]}) == ["user: a"]
    for key in ("attachments", "files"):
        row = {"chat_messages": [{**turn, key: [{"file_name": "x.pdf"}]}]}
        with pytest.raises(Refused, match=f"turn with {key}"):
            said(row)
        assert read_messages(row, keep_answers=False, shape=build_layout({"attachments": []}, None))


@pytest.mark.parametrize("content", [[], [""], [{"type": "text", "text": " "}], {"parts": [""]}])
def test_a_blank_system_turn_in_parts_is_none(content):
    assert said({"messages": [{"role": "system", "content": content}, *users("a")]}) == ["user: a"]


@pytest.mark.parametrize(
    ("row", "name"),
    [
        ({"traj": [*users("a"), {"role": "assistant", "content": None, "tool_calls": [{}]}]}, "traj"),
        ({"log": [{"message": users("a")[0]}]}, "log"),
        ({"response": {"choices": [{"message": {"role": "assistant", "content": "b"}}]}, "z": users("a")}, "z"),
    ],
)
def test_turns_in_another_column_are_named_by_their_first(row, name):
    with pytest.raises(Refused, match="turns in another column") as refused:
        said(row)
    assert refused.value.name == name


def test_the_parts_of_one_turn_are_no_turns_in_another_column():
    with pytest.raises(Refused, match="one turn of a conversation"):
        said({"type": "user", "sessionId": "1", "message": {"role": "user", "content": [RESULT]}})


# --- what a text is about ---


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"instruction": "Summarize.", "instances": [{"input": "long", "output": "short"}]}, "row with instances"),
        ({"question_id": 1, "answer_id": "x", "text": "It is so."}, "text of an answer"),
        ({"review_id": 1, "text": "Both are good."}, "text of an answer"),
        ({"query": "<img>https://a.b/c.jpeg</img>What is it?"}, "the place of an image"),
        ({"query": "Picture 1: <img>a/c.png</img> and <audio>x.wav</audio>"}, "the place of an image"),
        ({"instruction": " <user>: a <bot>: b <user>: c"}, "rendered conversation"),
        (
            {"question": "a", "function": [{"name": "f", "description": "d", "parameters": {}}]},
            "tools under another name",
        ),
        ({"query": "a", "api_list": [{"api_name": "f", "required_parameters": []}]}, "tools under another name"),
        (
            {"messages": users("a"), "available": '[{"function": {"name": "f", "parameters": {}}}]'},
            "tools under another",
        ),
    ],
)
def test_a_question_without_what_it_is_about_is_refused(row, reason):
    with pytest.raises(Refused, match=reason):
        said(row)


def test_what_only_looks_like_it_stays_a_question():
    for row in (
        {"question": "a", "function": "def f(): pass"},
        {"question": "a", "called": [{"name": "f", "input": {}}]},
        {"question": "Why does <img src='a.png'></img> fail?"},
        {"question": "a", "answer": [{"answer_type": "Value", "value": "3"}]},
    ):
        assert said(row) == [f"user: {row['question']}"]


def test_a_passage_follows_its_question_and_an_input_that_the_prompt_has_does_not():
    assert said({"question": "a", "passage": "text"}) == ["user: a\n\ntext"]
    assert said({"prompt": "Add.\n\nInput: 1, 2", "instruction": "Add.", "input": "1, 2"}) == [
        "user: Add.\n\nInput: 1, 2"
    ]
    assert said({"prompt": "Is 1 prime?", "input": "1"}) == ["user: Is 1 prime?\n\n1"]
