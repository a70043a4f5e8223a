"""Rows in the shapes that people have: which columns make the prompt, whose turns they are, what is refused."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from prompt_stage import chat, read_file, read_messages, reasons, texts, users, write

from eagle3.prompts import Prompt, Refused
from eagle3.prompts.reading.shapes import build_layout

NAN = float("nan")
RAIN = "rain " * 20
SYSTEM = {"role": "system", "content": "Be brief."}
TURNS_OF_PYTHON = "turns as Python writes them, not JSON: write the column with json.dumps"
VALUE = "user turn that is a value of JSON or Python"
TURNS_AS_TEXT = "user turn with turns or their parts as JSON text: write them as JSON"


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
        ("user: s", "assistant: t"):
            {"messages": [*users("s"), {"role": "assistant", "content": "t"}, SYSTEM]},
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
        ("system: x", "user: in", "assistant: b"):
            {"instructions": "x", "input": [{"type": "message", **users("in")[0]}], "output": "b"},
        # A system prompt that is said twice, or none
        ("system: y", "user: a"): {"system_prompt": "y", "messages": [{"role": "system", "content": "y"}, *users("a")]},
        ("system: x", "user: b"):
            {"system_prompt": "x", "messages": [{"role": "system", "content": None}, *users("b")]},
        ("user: c",): {"messages": [{"role": "system", "content": None}, *users("c")]},
        # Messages that one answer is to; turns that have one each, in rows of our own and of others; a greeting
        ("user: a\n\nb", "assistant: x"): {"messages": [*users("a", "b"), {"role": "assistant", "content": "x"}]},
        ("user: c\n\nd",): {"prompt": users("c", "d")},
        ("user: e", "user: f"): {"messages": users("e", "f"), "each_answered": True},
        ("user: g", "user: h"): {"prompt": ["g", "h"]},
        ("system: s", "user: i"):
            {"messages": [{"role": "system", "content": "s"}, {"role": "assistant", "content": "Hello! What is it?"},
                          *users("i")]},
        ("user: help", "assistant: ok"):
            {"conversation": [{"speaker": "Customer", "text": "help"}, {"speaker": "Agent", "text": "ok"}]},
        ("user: text",): {"messages": json.dumps(users("text"))},
        ("user: twice",): {"messages": json.dumps(json.dumps(users("twice")))},
        # Claude's export, Bedrock's and Gemini's parts without a type, text under the second of two names
        ("user: a\nb", "assistant: c"):
            {"messages": [{"sender": "human", "content": [{"text": "a"}, {"text": "b"}]},
                          {"sender": "assistant", "content": [], "text": "c"}]},
        ("system: x", "user: d"): {"messages": [{"role": "system", "content": "", "text": "x"}, *users("d")]},
        # Gemini's with its system prompt, MCP's single part, OpenTelemetry's and the AI SDK's parts, Arena-Hard's turns
        ("system: s", "user: g"):
            {"systemInstruction": {"parts": [{"text": "s"}]}, "messages": [{"role": "user", "parts": [{"text": "g"}]}]},
        ("user: m",): {"messages": [{"role": "user", "content": {"type": "text", "text": "m"}}]},
        ("user: o",): {"messages": [{"role": "user", "parts": [{"type": "text", "content": "o"}]}]},
        ("user: t",): {"turns": [{"content": "t"}]},
        ("user: r",): {"input": [*users("r"), {"type": "reasoning", "summary": []}]},
        # A Sequence of `datasets`
        ("user: l", "assistant: x"): {"conversations": {"from": ["human", "gpt"], "value": ["l", "x"]}},
        ("user: body",): {"body": json.dumps({"messages": users("body")})},
        ("system: Be brief.", "user: in", "assistant: out"):
            {"input": json.dumps([SYSTEM, *users("in")]), "output": "out"},
        ("user: [1, 2] or [{}]?",): {"prompt": "[1, 2] or [{}]?"},
        ('user: [{"a": 1}]',): {"prompt": '[{"a": 1}]'},
        ("user: a",): {"messages": [], "prompt": "a", "tools": "[]"},
        ("user: e", "assistant: f"): {"instruction": "e", "input": "<noinput>", "output": "f"},
        ("user: g", "assistant: h"): {"instruction": "g", "input": " N/A", "output": "h"},
        # NaN, words and signs that stand for nothing; a context that the prompt was made of; names in another spelling
        ("user: c", "assistant: x"):
            {"messages": [{"role": "system", "content": "None"}, {**users("c")[0], "tool_calls": NAN},
                          {"role": "assistant", "content": "x", "reasoning": "null"}], "tools": NAN, "history": NAN},
        ("user: d",): {"messages": [{"role": "system", "content": "\u200b"}, *users("d")], "system": "undefined"},
        (f"user: Read: {RAIN} Why?",): {"prompt": f"Read: {RAIN} Why?", "context": RAIN},
        ("system: x", "user: e", "assistant: y"): {"systemPrompt": "x", "Messages": users("e"), "Output": "y"},
        ("system: s", "user: f"): {"custom_id": "7", "body.instructions": "s", "body.input": "f"},
        ("user: b", "assistant: None"):
            {"prompt": "None", "question": "b", "input": float("nan"), "context": "nan", "answer": "None"},
    }.items(),
)  # fmt: skip
def test_a_usual_shape_is_read_with_its_answer_where_answers_are_kept(turns, row):
    def read(*, keep_answers: bool) -> list[str]:
        return [f"{turn['role']}: {turn['content']}" for turn in read_messages(row, keep_answers=keep_answers)]

    if turns[-1].startswith("assistant") and "\n\nb" not in turns[0]:  # with their answers, messages stay as they are
        assert read(keep_answers=True) == [*turns]
    assert read(keep_answers=False) == [turn for turn in turns if not turn.startswith("assistant")]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": users("a"), "tools": [{"name": "f"}]}, "row with tools"),
        ({"body": {"messages": users("a"), "tools": [{"name": "f"}]}}, "row with body.tools"),
        ({"prompt": "a", "tools": '[{"name": "f"}]'}, "row with tools"),
        ({"messages": users("a"), "available_tools": '[{"name": "f"}]'}, "row with available_tools"),
        ({"messages": users("a"), "toolConfig": {"tools": [{"toolSpec": {}}]}}, "row with tool_config.tools"),
        ({"question": "What is this?", "image": {"bytes": "ff"}}, "row with image"),
        ({"messages": [{**users("a")[0], "images": ["ff"]}]}, "turn with images"),
        ({"messages": [{**SYSTEM, "tools": '[{"name": "f"}]'}, *users("a")]}, "turn with tools"),
        ({"prompt": "a", "chat_history": [["b", "c"]]}, "row with chat_history"),
        ({"input_ids": [1, 2, 3]}, "no column of messages or prompts"),
        ({"role": "assistant", "text": "b"}, "one turn of a conversation"),
        ({"role": "prompter", "text": "b", "parent_id": "1"}, "one turn of a conversation"),
        ({"role": "user", "text": "b", "conversation_id": "1", "turn": 2}, "one turn of a conversation"),
        ({"type": "message", "user": "U1", "text": "b", "parent_user_id": "U2"}, "one turn of a conversation"),
        ({"prompt": str(users("a"))}, TURNS_OF_PYTHON),
        ({"prompt": f"array({users('a')}, dtype=object)"}, TURNS_OF_PYTHON),
        ({"input": "[HumanMessage(content='a')]"}, TURNS_OF_PYTHON),
        ({"messages": str(users("a"))}, TURNS_OF_PYTHON),
        ({"sender": "bot", "text": "b"}, "one turn of a conversation"),
        ({"type": "message", "user": "U1", "text": "b"}, "one turn of a conversation"),
        ({"text": "b", "parentMessageId": "1"}, "one turn of a conversation"),
        ({"role": "user", "text": "b", "sessionId": "1"}, "one turn of a conversation"),
        ({"Question": "b", "Turn_no": 2}, "one turn of a conversation"),
        ({"query": "b", "messageIndex": 2}, "one turn of a conversation"),
        ({"role": "user", "text": "b"}, "one turn of a conversation"),
        ({"event": "bot", "text": "b"}, "one turn of a conversation"),
        ({"author": "user", "text": "b"}, "one turn of a conversation"),
        ({"role": "user", "content": [{"type": "text", "text": {"value": "b"}}]}, "one turn of a conversation"),
        ({"type": "user", "message": users("b")[0]}, "one turn of a conversation"),
        ({"dialogue_id": 1, "speaker": "Customer", "text": "b"}, "one turn of a conversation"),
        ({"prompt": "a", "chatHistory": [["b", "c"]]}, "row with chat_history"),
        ({"body": {"input": "b", "previous_response_id": "1"}}, "row with body.previous_response_id"),
        ({"turns": [json.dumps(turn) for turn in users("a", "b")]}, TURNS_AS_TEXT),
        ({"messages": users(json.dumps([{"type": "text", "text": "a"}, {"type": "image"}]))}, TURNS_AS_TEXT),
        ({"messages": users("\u200b")}, "empty user turn"),
        ({"system": json.dumps([{"type": "text", "content": "x"}]), "prompt": "a"},
         "system turn with turns or their parts as JSON text: write them as JSON"),
        ({"question": "Which?", "choices": ["rain", "half a pair \ud83d"]}, "content is not valid Unicode"),
        ({"text": "### Human: a\n### Assistant: b"}, "text with the turns of a rendered conversation"),
        ({"text": "A talk.\n### Human: a"}, "text with the turns of a rendered conversation"),
        ({"text": "\n\nHuman: a\nb\n\nAssistant: c"}, "text with the turns of a rendered conversation"),
        ({"text": "<|im_start|>user\na<|im_end|>"}, "text with the turns of a rendered conversation"),
        ({"question": "a", "context": {"b": 1}}, "context is not text"),
        ({"prompt": "a", "history": [["b", "c"]]}, "row with history"),
        ({"system": "x", "messages": [SYSTEM, *users("a")]}, "another system prompt in a column than in the turns"),
        ({"messages": "a"}, "messages is not a list"),
        ({"question": b"a"}, "question is neither text nor a list"),
        ({"messages": ["a"]}, "messages holds something other than turns"),
        ({"turns": [["a"]]}, "turns holds something other than turns"),
        ({"messages": []}, "no user turn"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "no user turn"),
        ({"prompt": " "}, "no user turn"),
        ({"question": "nan", "answer": "b"}, "no user turn"),
        ({"question": "-", "answer": "b"}, "no user turn"),
        ({"question": float("nan"), "answer": "b"}, "no user turn"),
        ({"messages": [*users("a"), {"role": "tool", "content": "7"}]}, "tool turn"),
        ({"messages": [{"role": "narrator", "content": "a"}]}, "unknown role"),
        ({"messages": [{"type": "item_reference", "id": "1"}]}, "unknown role"),
        ({"messages": [{"type": "Default", "content": "a"}]}, "turn without a role"),
        ({"messages": [{"role": {"name": "Ann"}, "content": "a"}]}, "turn without a role"),
        ({"messages": [*users("a"), {"role": "environment", "content": "7"}]}, "tool turn"),
        ({"turns": [{"content": "a", "id": 1}]}, "turn without a role"),
        ({"messages": [{"content": "a"}]}, "turn without a role"),
        ({"messages": [{"question": "a", "input": "x", "answer": "b"}]}, "turn without a role"),
        ({"messages": users([{"text": "a", "thought": True}])}, "content with parts other than text"),
        ({"messages": users(None)}, "turn without content"),
        ({"messages": users([{"type": "text", "text": "a"}, {"type": "image"}])}, "content with parts other than text"),
        ({"messages": users("half a pair \ud83d")}, "content is not valid Unicode"),
        ({"title": "a"}, "no column of messages or prompts"),
        ({"messages": [{"role": "assistant", "content": "The rest of it is:"}, *users("Go on, please.")]},
         "conversation that begins with an answer"),
        ({"messages": [{"type": "function_call", "name": "f", "arguments": "{}"}, *users("a")]}, "tool turn"),
    ],
)  # fmt: skip
def test_what_would_make_another_prompt_is_refused_with_a_reason(row, reason):
    with pytest.raises(Refused) as refused:
        read_messages(row, keep_answers=False)
    assert refused.value.reason == reason


@pytest.mark.parametrize(
    ("row", "place"),
    [
        ({"input": {"messages": users("a")}}, "input.messages"),
        ({"prompt": json.dumps({"messages": users("a")})}, "prompt.messages"),
        ({"log": {"requestBody": json.dumps({"messages": users("a")})}}, "log.requestBody.messages"),
        ({"chosen": users("a"), "rejected": users("a")}, "chosen"),
        ({"chosen": {"role": ["user"], "content": ["a"]}}, "chosen"),
        ({"chat": json.dumps(users("a"))}, "chat"),
        ({"history": users("a")}, "history"),
        ({"inputs": {"messages": [{"type": "human", "content": "a"}]}}, "inputs.messages"),
        ({"request": {"contents": [{"role": "user", "parts": [{"text": "a"}]}]}}, "request.contents"),
        ({"attributes": {"gen_ai.prompt": json.dumps(users("a"))}}, "attributes.gen_ai.prompt"),
        ({"attributes.input.value": json.dumps({"messages": users("a")})}, "attributes.input.value.messages"),
    ],
)
def test_turns_in_another_column_are_refused_by_its_name_which_can_be_given(row, place):
    with pytest.raises(Refused, match="turns in another column") as refused:
        read_messages(row, keep_answers=False)
    assert refused.value.name == place
    assert read_messages(row, keep_answers=False, shape=build_layout({"messages": place}, None)) == users("a")


@pytest.mark.parametrize(
    "row",
    [
        {"image_path": "train/0001.png"},
        {"imageUrl": "https://acme.org/7"},
        {"file_name": "COCO_0001.jpg"},
        {"clip": "talk.WAV"},
        {"scan": [{"bytes": b"ff", "path": None}]},
        {"image_id": 458752},
        {"figure": "data:image/png;base64,iVBO"},
        {"metadata": {"picture": "7.webp"}},
        {"question": "<image>\nWhat is this?"},
        {"question": "What is this?\n<image_1>"},
        {"messages": [{**users("What?")[0], "screenshot": "7.png"}]},
    ],
)
def test_a_question_about_a_file_of_image_or_sound_is_refused_whatever_names_it(row):
    with pytest.raises(Refused, match="image, sound or video"):
        read_messages({"question": "What is this?", **row}, keep_answers=False)
    kept = read_messages(
        {"question": "What?", **row}, keep_answers=False, shape=build_layout({"attachments": []}, None)
    )
    assert kept[0]["content"] in ("What?", row.get("question"))


@pytest.mark.parametrize(
    "row",
    [
        {"image_count": 0, "has_image": "false", "image_description": "two cats on a mat"},
        {"url": "https://acme.org/7.png", "avatar": "jane.png", "path": "src/main.py"},
        {"video": None, "images": []},
        {"question": "<video>\n  <source src=a.mp4>\n</video>\nWhy does it not play?"},
        {"question": "Is <image> a tag of HTML?"},
    ],
)
def test_what_only_speaks_of_images_stays_a_prompt(row):
    assert read_messages({"question": "Why?", **row}, keep_answers=False) == users(row.get("question", "Why?"))


def test_what_stands_next_to_the_known_names_is_counted(prepare):
    rows = [
        {"messages": [{**users("a")[0], "name": "Ann"}], "mood": "calm", "metadata": {"mood": "x", "source": "s"}},
        {"messages": users("b"), "prompt": "b", "score": 3, "history": [], "license": "MIT"},
        {"instruction": "c", "input": "web", "text": "all of c", "chosen": "x", "mood": None, "license": "MIT"},
        {"messages": [*users("d"), {"role": "assistant", "content": "x", "weight": 0.5}, *users("e")], "mood": "odd"},
    ]
    ledger = prepare([{"license": "MIT", **row} for row in rows])
    unread = {"mood": 2, "chosen": 1, "metadata.mood": 1, "score": 1, "text": 1}
    expected = {f"column not read: {name}": count for name, count in unread.items()}
    assert ledger["sources"]["chats"]["found"]["reading"] == {
        **expected,
        "key of turns not read: name": 1,
        "added to the question: input": 1,
    }
    assert "| chats | column not read: mood | 2 |" in (prepare.folder / "report.md").read_text()


@pytest.mark.parametrize(
    ("row", "note"),
    [
        # A column that an export wrote as text may be a question, too
        ({"prompt": json.dumps(["a", "b"])}, (VALUE, "prompt")),
        ({"inputs": json.dumps({"question": "a"})}, (VALUE, "inputs")),
        ({"messages": users(json.dumps("a"))}, (VALUE, "messages")),
        ({"prompt": "['a', 'b']"}, (VALUE, "prompt")),
        ({"prompt": json.dumps({"from": "USD", "value": 1})}, (VALUE, "prompt")),
        ({"messages": [*users("a"), SYSTEM, *users("b")]}, ("system turns between questions without answers", None)),
        ({"prompt": "a", "Prompt": "b"}, ("column not read", "Prompt")),
        ({"messages": [{**users("a")[0], "text": "b"}]}, ("key of turns not read", "text")),
        ({"instruction": "Translate.", "source": "It was a dark and stormy night at sea."},
         ("source that is a text, not a name", "source")),
        ({"id": "1", "conversation_id": "2", "query": "And then?"},
         ("question without earlier ones of its conversation, if there are any", "conversation_id")),
        ({"prompt": "a", "Prompt": "a"}, None),
        ({"messages": [SYSTEM, *users("a"), {"role": "assistant", "content": "x"}, SYSTEM, *users("b")]}, None),
        ({"messages": [{**users([{"text": "a"}])[0], "text": "a "}]}, None),
        ({"prompt": "[sic] 'a'", "source": "Stack Exchange: rain and snow"}, None),
        ({"prompt": "a", "session_id": None}, None),
    ],
)  # fmt: skip
def test_what_may_be_read_in_two_ways_is_counted(tmp_path, row, note):
    [found] = read_file(write(tmp_path / "a.jsonl", [row]))
    assert isinstance(found, Prompt)
    assert found.notes == (() if note is None else (note,))


def test_what_stands_next_to_turns_inside_an_object_is_read_or_counted(prepare):
    body = {"messages": users("a"), "system": "x", "tools": [], "seed": 1}
    others = {"messages": users("b"), "tools": [{"name": "f"}]}
    rows = [{"request": {"body": json.dumps(each), "url": "u"}, "license": "MIT"} for each in (body, others)]
    ledger = prepare(rows, fields={"messages": "request.body.messages"})
    assert [turn["content"] for turn in prepare.prompts()[0]["messages"]] == ["x", "a"]
    assert reasons(prepare) == ["row with request.body.tools"]
    with pytest.raises(Refused, match="image, sound or video"):
        read_messages(
            {"input": {"messages": users("a")}, "scan": "7.png"},
            keep_answers=False,
            shape=build_layout({"messages": "input.messages"}, None),
        )
    found = {"column not read: request.body.seed": 1, "column not read: request.url": 1}
    assert ledger["sources"]["chats"]["found"]["reading"] == found


def test_columns_of_a_table_are_counted_and_searched_for_files_like_those_of_json(prepare):
    rows = [
        {"prompt": "a", "score": 1, "scan": None},
        {"prompt": "b", "score": 2, "scan": {"bytes": b"f", "path": "b.png"}},
    ]
    pq.write_table(pa.Table.from_pylist(rows), prepare.root / "a.parquet")
    [source] = prepare(path=str(prepare.root / "a.parquet"), license="MIT")["sources"].values()
    assert source["found"]["reading"] == {"column not read: score": 1}
    assert source["named"] == {"row with a file of image, sound or video": {"scan": 1}}


def test_a_column_of_a_table_without_a_value_or_with_numbers_is_no_file(tmp_path):
    columns = {"image_path": pa.nulls(2), "video_seconds": [1.5, 2.5], "image_id": [None, 7]}
    pq.write_table(pa.table({"prompt": ["a", "b"], **columns}), tmp_path / "a.parquet")
    first, second = read_file(tmp_path / "a.parquet")
    assert isinstance(first, Prompt) and first.notes == (("column not read", "video_seconds"),)
    assert isinstance(second, Refused) and second.name == "image_id"


def test_named_columns_and_roles_take_the_place_of_the_usual_ones():
    row = {"Frage": "a", "prompt": "not this", "meta": {"rolle": "Be brief."}, "tools": [1]}
    shape = build_layout({"prompt": "frage", "system": ["meta.rolle"], "attachments": []}, None)
    assert read_messages(row, keep_answers=False, shape=shape) == [SYSTEM, *users("a")]
    turns = {"verlauf": [{"wer": "Kundin", "was": "a"}, {"wer": "bot", "was": "b"}]}
    shape = build_layout({"messages": "verlauf", "role": "wer", "content": "was"}, {"Kundin": "user"})
    assert read_messages(turns, keep_answers=True, shape=shape) == [*users("a"), {"role": "assistant", "content": "b"}]
    row = {**turns, "system": "Be brief.", "verlauf": turns["verlauf"][:1], "answer": "b"}
    assert read_messages(row, keep_answers=True, shape=shape)[::2] == [SYSTEM, {"role": "assistant", "content": "b"}]
    shape = build_layout({"prompt": "frage", "content": "was"}, None)
    assert read_messages({"Frage": "a"}, keep_answers=False, shape=shape) == users("a")
    assert read_messages({"Frage": ["a", "b"]}, keep_answers=False, shape=shape) == users("a", "b")


def test_each_source_has_columns_of_its_own_and_a_table_is_read_by_them(prepare):
    table = pa.Table.from_pylist([{"Frage": "a", "Lizenz": "MIT", "Metadata": {"source": "forum"}}])
    pq.write_table(table, prepare.root / "a.parquet")
    fields = {"prompt": "Frage", "license": ["Lizenz"]}
    other = str(write(prepare.root / "b.jsonl", [chat("b")]))
    prepare(sources=[{"path": str(prepare.root / "a.parquet"), "fields": fields}, other])
    assert texts(prepare) == ["a", "b"] and [found["source"] for found in prepare.prompts()] == ["forum", "b"]


def test_licences_and_origins_are_read_under_the_names_that_people_give_them(prepare):
    cases: list[tuple[dict, str]] = [
        ({"LICENSE": "MIT"}, ""),
        ({"licenses": ["MIT", "Apache-2.0"]}, ""),
        ({"metadata": {"license": "MIT"}}, ""),
        ({"metadata": '{"License": "MIT"}'}, ""),
        ({"license": "MIT", "metadata": {"license": "GPL-3.0-only"}}, "license not allowed: MIT AND GPL-3.0-only"),
        ({"license": "MIT", "dataset": "ShareGPT"}, "source forbidden: ShareGPT"),
        ({"license": "MIT", "Model": "gpt-4o"}, "source forbidden: output of OpenAI"),
        ({"license": "MIT", "models": ["mistral", "claude-3-opus"]}, "source forbidden: output of Claude"),
        ({"license": "MIT", "metadata": {"source": "WildChat"}}, "source forbidden: WildChat"),
    ]
    prepare([{"prompt": str(number), **row} for number, (row, _) in enumerate(cases)])
    for found, expected in zip(reasons(prepare), [reason for _, reason in cases if reason], strict=True):
        assert found.startswith(expected)
    assert all(set(prompt) == {"id", "source", "license", "messages"} for prompt in prepare.prompts())
