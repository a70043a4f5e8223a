"""Rows with calls of tools and their results: the results stay with the prompt, and the calls to compare with."""

import json
from typing import Any

import pytest
from prompt_stage import Prepare, chat, read_messages, reasons, users

from eagle3.errors import InputError
from eagle3.prompts.reading.conversation import conversation
from eagle3.prompts.reading.prompt import Refused
from eagle3.prompts.reading.shapes import build_layout
from eagle3.prompts.reading.tools import KEPT, LEFT_OUT, NO_RESULT, NO_TOOLS, OTHER_RESULT, UNREADABLE

TOOL = {"name": "look_up", "description": "Looks up.", "parameters": {"type": "object", "properties": {}}}
ARGUMENTS = {"topic": "Größe", "most": 2, "old": True}
KEEPING = build_layout(None, None, keeps_tools=True)


def assistant(content: str | None, **parts: Any) -> dict:
    return {"role": "assistant", "content": content, **parts}


def call(id: str | None = "a", **arguments: Any) -> dict:
    """A call as OpenAI's messages have it."""
    function = {"name": "look_up", "arguments": json.dumps(arguments or ARGUMENTS)}
    return {"id": id, "type": "function", "function": function}


def result(content: Any, **parts: Any) -> dict:
    return {"role": "tool", "content": content, **parts}


def calls(*arguments: dict, first: int = 0) -> dict:
    """A turn of calls as prompts have it."""
    written = [
        {"type": "function", "id": f"call{number:05d}", "function": {"name": "look_up", "arguments": each}}
        for number, each in enumerate(arguments, first)
    ]
    return {"role": "assistant", "content": "", "tool_calls": written}


def row(*turns: dict, **columns: Any) -> dict:
    return {"license": "MIT", "messages": [*turns], "tools": [TOOL], **columns}


def read(row: dict, *, keep_answers: bool = False) -> tuple[list[dict], list[str]]:
    """The messages of a row, and its notes."""
    columns = KEEPING.read(row)
    messages = conversation(columns, keep_answers=keep_answers)
    return messages, [what for what, _ in columns.notes]


def sharegpt(*turns: tuple[str, str], **columns: Any) -> dict:
    return {"conversations": [{"from": role, "value": value} for role, value in turns], "tools": json.dumps([TOOL])}


CALL = {"name": "look_up", "arguments": ARGUMENTS}
LANGCHAIN = {"name": "look_up", "args": ARGUMENTS, "id": "a", "type": "tool_call"}
LAYOUTS = {
    "OpenAI": row(
        *users("a"), assistant(None, tool_calls=[call()]), result("7", tool_call_id="a"), assistant("Seven."),
    ),
    "OpenAI's first": row(
        *users("a"), assistant("", function_call={"name": "look_up", "arguments": json.dumps(ARGUMENTS)}),
        {"role": "function", "name": "look_up", "content": "7"}, assistant("Seven."),
    ),
    "Responses API": row(
        *users("a"), {"type": "function_call", "call_id": "x", "name": "look_up", "arguments": json.dumps(ARGUMENTS)},
        {"type": "function_call_output", "call_id": "x", "output": "7"}, assistant("Seven."),
    ),
    "ShareGPT": sharegpt(
        ("human", "a"), ("function_call", json.dumps(CALL)), ("observation", "7"), ("gpt", "Seven."),
    ),
    "Llama": row(*users("a"), assistant("", tool_calls=[CALL]), {"role": "ipython", "content": "7"}),
    "LangChain": row(*users("a"), assistant("", tool_calls=[LANGCHAIN]), result("7", tool_call_id="a")),
    "Hermes": sharegpt(
        ("human", "a"), ("gpt", f"I look.\n<tool_call>\n{json.dumps(CALL)}\n</tool_call>"),
        ("tool", "<tool_response>\n7\n</tool_response>"), ("gpt", "Seven."),
    ),
    "Hermes, as Python": sharegpt(
        ("human", "a"), ("gpt", f"<tool_call>\n{CALL}\n</tool_call>"), ("tool", "<tool_response>7</tool_response>"),
    ),
}  # fmt: skip


def test_a_usual_layout_of_calls_and_results_is_read():
    for name, layout in LAYOUTS.items():
        messages, notes = read(layout)
        named = {"name": "look_up"} if name == "OpenAI's first" else {}
        assert messages == [*users("a"), calls(ARGUMENTS), result("7", tool_call_id="call00000", **named)], name
        assert notes == [KEPT], name


PARALLEL = {
    "ids": row(
        *users("a"), assistant("", tool_calls=[call("x", n=1), call("y", n=2)]),
        result("2", tool_call_id="y"), result("1", tool_call_id="x"),
    ),
    "order": row(
        *users("a"), assistant("", tool_calls=[call(None, n=1), call(None, n=2)]), result("1"), result("2")
    ),
    "a turn each": sharegpt(
        ("human", "a"), *(("function_call", json.dumps(CALL | {"arguments": {"n": n}})) for n in (1, 2)),
        ("observation", "1"), ("observation", "2"),
    ),
    "one text": sharegpt(
        ("human", "a"),
        ("gpt", "".join(f"<tool_call>{json.dumps(CALL | {'arguments': {'n': n}})}</tool_call>" for n in (1, 2))),
        ("tool", "<tool_response>1</tool_response>\n<tool_response>2</tool_response>"),
    ),
}  # fmt: skip


def test_several_calls_at_a_time_each_have_their_result():
    for name, layout in PARALLEL.items():
        messages, _ = read(layout)
        assert messages[:2] == [*users("a"), calls({"n": 1}, {"n": 2})], name
        results = {each["tool_call_id"]: each["content"] for each in messages[2:]}
        assert results == {"call00000": "1", "call00001": "2"}, name


def test_answers_and_what_follows_the_last_result_or_question_are_left_out():
    turns = [
        *users("a"), assistant("", tool_calls=[call()]), result("7", tool_call_id="a"), assistant("Seven."),
        *users("b"), assistant("", tool_calls=[call("b")]),
    ]  # fmt: skip
    messages, notes = read(row(*turns))
    assert messages == [*users("a"), calls(ARGUMENTS), result("7", tool_call_id="call00000"), *users("b")]
    assert notes == [KEPT]


BEFORE = [*users("a"), assistant("", tool_calls=[call()]), result("7"), assistant("Seven."), *users("b")]
LEFT = [*users("a"), calls(ARGUMENTS), result("7", tool_call_id="call00000"), *users("b")]


@pytest.mark.parametrize(
    ("turns", "why"),
    [
        ([assistant("", tool_calls=[call()]), *users("c")], NO_RESULT),
        ([assistant("", tool_calls=[call()]), assistant("Seven."), *users("c")], NO_RESULT),
        ([assistant("[look_up(topic='x')]"), result("7")], UNREADABLE),
        ([assistant("", tool_calls=[{"id": "1"}]), result("7")], UNREADABLE),
        ([assistant("<tool_call>look_up, please</tool_call>"), result("7")], UNREADABLE),
        ([assistant("", tool_calls=[CALL | {"arguments": "{broken"}]), result("7")], UNREADABLE),
        ([assistant("", tool_calls=[CALL | {"arguments": "{'a': {1, 2}}"}]), result("7")], UNREADABLE),
        ([assistant("", tool_calls=[call("x")]), result("7", tool_call_id="z")], OTHER_RESULT),
        ([assistant("", tool_calls=[call()]), result("7"), result("8")], OTHER_RESULT),
    ],
)
def test_from_a_call_on_that_cannot_be_used_turns_are_left_out_and_noted(turns, why):
    assert read(row(*BEFORE, *turns)) == (LEFT, [f"{LEFT_OUT}: {why}", KEPT])


def test_without_tools_a_conversation_ends_before_its_first_call():
    for name, each in LAYOUTS.items():
        assert read({**each, "tools": None}) == (users("a"), [f"{LEFT_OUT}: {NO_TOOLS}"]), name


def test_a_conversation_that_begins_with_a_call_or_a_result_is_refused():
    for first in ([assistant("", tool_calls=[call()]), result("7")], [result("7")]):
        with pytest.raises(Refused, match=r"conversation that begins with an answer|no user turn"):
            read(row(*first, *users("a")))


def test_tool_turns_are_refused_unless_tools_are_kept_and_the_report_counts_both(prepare):
    rows = [{**LAYOUTS["OpenAI"], "tools": None}, chat("Hello!")]
    prepare(rows)
    assert reasons(prepare) == ["tool turn"]
    with pytest.raises(InputError, match=r"tool turn: 1.*prompts\.tools=keep"):
        prepare(rows[:1])
    prepare([LAYOUTS["OpenAI"], LAYOUTS["Responses API"] | {"tools": None}], tools="keep")
    report = (prepare.folder / "report.md").read_text()
    assert f"| {KEPT} | 1 |" in report and f"| {LEFT_OUT}: {NO_TOOLS} | 1 |" in report


def test_prompts_with_tool_turns_are_read_again_as_they_are(prepare, tmp_path):
    rows = [{**LAYOUTS["ShareGPT"], "license": "MIT"}, {**PARALLEL["ids"], "id": 7}]
    rows += [row(*BEFORE, assistant("Eight."), *users("c"))]
    prepare(rows, tools="keep")
    again = Prepare(tmp_path / "again")
    again(prepare.prompts(), tools="keep")
    assert again.prompts() == prepare.prompts() and len(again.prompts()) == 3
    *_, last = again.prompts()
    assert last["each_answered"] is True  # "b" had an answer of its own


def test_tools_calls_and_results_are_compared_for_duplicates(prepare):
    same, result, called, tool, answer = (json.loads(json.dumps(LAYOUTS["OpenAI"])) for _ in range(5))
    result["messages"][2]["content"] = "8"
    called["messages"][1]["tool_calls"][0]["function"]["arguments"] = '{"topic": "b"}'
    tool["tools"][0]["description"] = "Looks down."
    answer["messages"][3]["content"] = "8"
    others = [same, result, called, tool]
    assert prepare([*others, answer], tools="keep")["prompts"] == len(others)
    known = Prepare(prepare.root / "known")
    with pytest.raises(InputError, match="every prompt repeats one"):
        known(others, tools="keep", duplicates={"known": [str(prepare.out_dir)]})


SECRET = "anna.berg@web.de"


@pytest.mark.parametrize(
    "turns",
    [
        [assistant("", tool_calls=[call()]), result(f"mail {SECRET}")],
        [assistant("", tool_calls=[call(topic=SECRET)]), result("7")],
        [assistant("", tool_calls=[call(SECRET)]), result(f"to {SECRET}", name=SECRET, tool_call_id=SECRET)],
    ],
)
def test_results_and_calls_are_searched_for_personal_data(prepare, turns):
    prepare([row(*users("a"), *turns), chat("b")], tools="keep", privacy={"actions": {"EMAIL_ADDRESS": "mask"}})
    masked, _ = prepare.prompts()
    assert SECRET not in json.dumps(masked) and "<EMAIL_ADDRESS>" in json.dumps(masked)
    assert [each["role"] for each in masked["messages"]] == ["user", "assistant", "tool"]
    prepare.again(tools="keep", privacy={"actions": {"EMAIL_ADDRESS": "drop"}})
    assert reasons(prepare) == ["personal data: EMAIL_ADDRESS"]


def test_results_count_for_length_and_leaks_and_calls_do_not_for_length(prepare, tmp_path):
    question = "How many eggs does the farmer's duck lay on each of the seven days of a week?"
    benchmark = tmp_path / "bench.jsonl"
    benchmark.write_text(json.dumps({"question": question}))
    turns = [*users("a"), assistant("", tool_calls=[call(topic="x" * 300)]), result(f"Found: {question}")]
    rows = [row(*turns), chat("b")]
    prepare(rows, tools="keep", decontamination={"benchmarks": [str(benchmark)]})
    assert reasons(prepare) == ["leak: bench"]
    size = len("a" + f"Found: {question}" + json.dumps([{"type": "function", "function": TOOL}]))
    for most, refused in ((size, []), (size - 1, [f"more than {size - 1} characters"])):
        prepare.again(tools="keep", length={"max_characters": most})
        assert reasons(prepare) == refused


def test_kept_answers_keep_calls_and_results_and_calls_in_a_text_as_they_are():
    messages, _ = read(row(*users("a"), assistant("I look.", tool_calls=[call()]), result("7"), assistant("Seven.")),
                       keep_answers=True)  # fmt: skip
    given = {**calls(ARGUMENTS), "content": "I look."}
    assert messages == [*users("a"), given, result("7", tool_call_id="call00000"), assistant("Seven.")]
    messages, _ = read(LAYOUTS["Hermes"], keep_answers=True)
    text = LAYOUTS["Hermes"]["conversations"][1]["value"]
    assert messages == [*users("a"), assistant(text), result("7"), assistant("Seven.")]
    with pytest.raises(Refused, match="turn with tool_calls next to its content"):
        read_messages({"messages": [*users("a"), assistant("", tool_calls=[call()])]}, keep_answers=True)
