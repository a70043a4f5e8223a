"""Calls of tools in answers: those that are the stored ones go on to the stored results, over the templates of families
that render calls, each as its targets write them."""

import json
from typing import Any

import pytest
from answering import QUICK, read_answer_rows, run, write_prompts
from chats import SETTINGS, SYSTEM, TEMPLATES, assistant, make_chat, make_tokenizer, user
from exported_head import tiny_chat
from stores import ASSETS

import eagle3.answers.huggingface
from eagle3.answers.calls import LOSES_CALLS, called, calls_in
from eagle3.answers.chat import LOSES_TEXT, LOSES_TOOLS, Chat, RefusedConversation
from eagle3.answers.dialogue import CALLS_TOOL, NO_CALL, OTHER_CALL, Dialogue
from eagle3.answers.generate import generate
from eagle3.answers.imported import CALL_IN_PARTS, ImportedAnswers, imported_rows
from eagle3.engine.endpoint import Answer
from eagle3.settings.precomputing import ChatSettings

NAME = "look_up_weather"
PARAMETERS = {"type": "object", "properties": {"town": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": name, "parameters": PARAMETERS}}
    for name in (NAME, "weather")
]
OSLO, ROME = {"town": "Oslo", "days": 2}, {"town": "Rome", "days": 3}
END_OF_CALLS = {"gptoss": "<|call|>", "glm4moe": "<|observation|>"}  # elsewhere a call ends as other answers do


def hermes(name: str, arguments: dict) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def llama(name: str, arguments: dict) -> str:
    return json.dumps({"name": name, "parameters": arguments})


def harmony(name: str, arguments: dict) -> str:
    analysis = f'<|channel|>analysis<|message|>Not weather, but {NAME} with {{"town": …}}.<|end|><|start|>assistant'
    return f"{analysis}<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{json.dumps(arguments)}"


def glm(name: str, arguments: dict) -> str:
    pairs = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in arguments.items())
    return f"\n<think>Is it {NAME}?</think>\n<tool_call>{name}\n{pairs}</tool_call>"


def nemotron(name: str, arguments: dict) -> str:
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"Is it {NAME}?\n</think>\n<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>\n"


WRITTEN = {
    "glm4moe": glm,
    "gptoss": harmony,
    "llama3_1": llama,
    "llama3_2": llama,
    "nemotron_3_nano": nemotron,
    "qwen2_5": hermes,
    "qwen3": hermes,
    "qwen3_instruct_2507": hermes,
}
ONE_CALL_A_TURN = {"gptoss", "llama3_1", "llama3_2"}
# What a target answers plainly, after the generation prompt.
PLAIN = {"gptoss": "<|channel|>final<|message|>{}", "glm4moe": "\n<think></think>\n{}", "nemotron_3_nano": "</think>{}"}


def family_chat(name: str) -> Chat:
    tokenizer = make_tokenizer(name)
    ends = {tokenizer.eos_token_id}
    if name in END_OF_CALLS:
        tokenizer.add_tokens([END_OF_CALLS[name]], special_tokens=True)
        ends.add(tokenizer.convert_tokens_to_ids(END_OF_CALLS[name]))
    settings = ChatSettings(**SETTINGS | {"template": str(ASSETS / f"templates/{name}.jinja")})
    return Chat(tokenizer, settings, stop_ids=ends)


@pytest.fixture(scope="module", params=WRITTEN)
def family(request: pytest.FixtureRequest) -> tuple[str, Chat]:
    return request.param, family_chat(request.param)


def stored(*arguments: dict, name: str = NAME) -> dict:
    calls = [
        {"type": "function", "id": f"call{number:05d}", "function": {"name": name, "arguments": each}}
        for number, each in enumerate(arguments)
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def result(content: str, number: int = 0) -> dict:
    return {"role": "tool", "content": content, "tool_call_id": f"call{number:05d}"}


def record(*messages: dict, **parts: Any) -> dict:
    return {"id": "1", "source": "s", "license": "MIT", "messages": [*messages], "tools": TOOLS} | parts


RAIN = '{"sky": "rain"}\n"now"'  # some templates write it as JSON
CONVERSATION = [user("Oslo?"), stored(OSLO), result(RAIN), user("Sure?")]


def begin(chat: Chat, *messages: dict, **parts: Any) -> Dialogue:
    prompt = record(*(messages or CONVERSATION), **parts)
    return Dialogue(prompt, chat, seed=0, max_prompt_tokens=None, on_length="keep")


def say(dialogue: Dialogue, chat: Chat, text: str, end: str | None = None) -> None:
    assert dialogue.waiting
    end_id = chat.tokenizer.convert_tokens_to_ids(end) if end else chat.tokenizer.eos_token_id
    dialogue.answer(Answer([*chat.encode(text), end_id], "stop"))


def reasons(dialogue: Dialogue) -> list[str]:
    return [error.reason for error in dialogue.errors]


WITHOUT_TOOLS = {"cohere", "deepseekv3", "gemma3", "llama3", "phi3"}  # templates that never read them
QUESTION = user(f"Does {NAME} know Oslo?")


@pytest.mark.parametrize("name", TEMPLATES)
def test_tools_are_rendered_as_the_tokenizer_itself_renders_them_or_the_conversation_is_refused(name):
    chat = make_chat(name)
    if name in WITHOUT_TOOLS:
        assert chat.prompt_ids([QUESTION])
        with pytest.raises(RefusedConversation, match=LOSES_TOOLS):
            chat.with_tools(TOOLS).prompt_ids([QUESTION])
        return
    for messages in ([QUESTION], [SYSTEM, QUESTION, assistant("Yes."), user("And Rome?")]):
        theirs = chat.tokenizer.apply_chat_template(
            messages, tools=TOOLS, chat_template=chat._template, add_generation_prompt=True, return_dict=False
        )
        assert chat.with_tools(TOOLS).prompt_ids(messages) == theirs != chat.prompt_ids(messages)


def test_tools_stay_over_all_turns_and_a_call_that_no_result_is_stored_for_ends_the_conversation():
    chat = family_chat("qwen2_5")
    for answers in (("Rain.", "Sun.", "Because."), ("Rain.", "Sun.", hermes(NAME, OSLO))):  # nothing follows the last
        dialogue = begin(chat, user("Oslo?"), user("Rome?"), user("Why?"))
        for answer in answers:
            say(dialogue, chat, answer)
        assert not dialogue.waiting and dialogue.errors == []
        [row] = dialogue.rows  # each prompt continues the one before, with the tools first
        assert len(row.turns) == 3 and chat.decode(row.input_ids).count(f'"description": "{NAME}"') == 1
    dialogue = begin(chat, user("Oslo?"), user("Rome?"), user("Why?"))
    say(dialogue, chat, "Rain.")
    say(dialogue, chat, hermes(NAME, OSLO))
    assert not dialogue.waiting and reasons(dialogue) == [CALLS_TOOL]
    assert [len(row.turns) for row in dialogue.rows] == [2]  # the call itself is an answer of the target's


def test_a_tool_that_only_the_reasoning_names_ends_no_conversation():
    chat = family_chat("qwen3")
    dialogue = begin(chat, user("Oslo?"), user("Rome?"))
    say(dialogue, chat, f"<think>\nIs it {NAME}?\n</think>\n\nRain.")
    assert dialogue.waiting and dialogue.errors == []


def test_after_the_stored_call_its_result_is_given_and_is_not_trained(family):
    name, chat = family
    dialogue = begin(chat)
    wrote = WRITTEN[name](NAME, dict(reversed(OSLO.items())))
    say(dialogue, chat, wrote, END_OF_CALLS.get(name))
    shown = json.dumps(RAIN)[1:-1] if name in ("gptoss", "llama3_1", "llama3_2") else RAIN
    prompt = chat.decode(dialogue.prompt_ids)
    assert prompt.count(shown) == 1 and prompt.count("Oslo") >= 2
    say(dialogue, chat, PLAIN.get(name, "{}").format("It rains."))
    say(dialogue, chat, PLAIN.get(name, "{}").format("Yes."))
    assert not dialogue.waiting and reasons(dialogue) == []
    trained = [chat.decode(row.input_ids[begin:end]) for row in dialogue.rows for begin, end in row.turns]
    assert len(trained) == 3 and trained[0].startswith(wrote) and not any(shown in each for each in trained)
    assert "It rains." in trained[1] and "Yes." in trained[2]


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3_instruct_2507"])
def test_a_call_as_the_template_writes_it_continues_the_row(name):
    chat = family_chat(name)
    dialogue = begin(chat)
    for text in (WRITTEN[name](NAME, dict(reversed(OSLO.items()))), "It rains.", "Yes."):
        say(dialogue, chat, text)
    [row] = dialogue.rows
    assert len(row.turns) == 3 and row.messages[1]["tool_calls"][0]["function"]["arguments"] == OSLO
    given = [
        chat.decode(row.input_ids[end:begin]) for (_, end), (begin, _) in zip(row.turns, row.turns[1:], strict=False)
    ]
    assert ["rain" in each for each in given] == [True, False]


OTHERS = [
    (NAME, OSLO | {"town": "Bergen"}), (NAME, {"town": "Oslo"}), (NAME, OSLO | {"unit": "C"}), ("weather", OSLO),
]  # fmt: skip


def test_another_call_ends_the_conversation_and_is_an_answer_itself(family):
    name, chat = family
    for other in OTHERS:
        dialogue = begin(chat)
        say(dialogue, chat, WRITTEN[name](*other), END_OF_CALLS.get(name))
        assert not dialogue.waiting and reasons(dialogue) == [OTHER_CALL], other
        assert [len(row.turns) for row in dialogue.rows] == [1]


def test_a_plain_answer_and_a_call_in_each_others_place_end_the_conversation(family):
    name, chat = family
    dialogue = begin(chat)
    say(dialogue, chat, PLAIN.get(name, "{}").format("No idea."))
    assert not dialogue.waiting and reasons(dialogue) == [NO_CALL] and len(dialogue.rows) == 1
    dialogue = begin(chat, user("Oslo?"), user("Sure?"))
    say(dialogue, chat, WRITTEN[name](NAME, OSLO), END_OF_CALLS.get(name))
    assert not dialogue.waiting and len(dialogue.rows) == 1
    assert len(reasons(dialogue)) == 1 and (name == "gptoss" or reasons(dialogue) == [CALLS_TOOL])


def test_calls_at_a_time_are_compared_in_order_or_refused_where_the_template_knows_one(
    family,
):
    name, chat = family
    turns = [user("Oslo, Rome?"), stored(OSLO, ROME), result("rain"), result("sun", 1), user("Sure?")]
    both = [WRITTEN[name](NAME, OSLO), WRITTEN[name](NAME, ROME).rpartition("</think>")[2].removeprefix("\n")]
    dialogue = begin(chat, *turns)
    say(dialogue, chat, "\n".join(both), END_OF_CALLS.get(name))
    if name in ONE_CALL_A_TURN:
        one = LOSES_CALLS if name == "gptoss" else "only supports single tool-calls"
        assert not dialogue.waiting and len(reasons(dialogue)) == 1 and one in reasons(dialogue)[0]
        return
    prompt = chat.decode(dialogue.prompt_ids)
    assert dialogue.waiting and "rain" in prompt and "sun" in prompt
    another = WRITTEN[name]("weather", ROME).rpartition("</think>")[2].removeprefix("\n")
    for others in (both[:1], both[1:], both[::-1], [*both, both[1]], [*both, another]):
        dialogue = begin(chat, *turns)
        say(dialogue, chat, "\n".join(others), END_OF_CALLS.get(name))
        assert reasons(dialogue) == [OTHER_CALL], others


def test_what_stands_before_a_call_is_the_content_as_a_server_returns_it():
    chat = family_chat("qwen3").with_tools(TOOLS)
    before = [user("Oslo?")]
    text = f"<think>\n{hermes('weather', ROME)}?\n</think>\n\nI look.\n{hermes(NAME, OSLO)}"
    calls = stored(OSLO)["tool_calls"]
    assert called(chat, before, chat.encode(text), calls) == {**stored(OSLO), "content": "I look."}
    path = str(ASSETS / "templates/qwen3.jinja")
    without_parser = tiny_chat(template=path, reasoning_parser=None).with_tools(TOOLS)  # <think> is no special token
    message = called(without_parser, before, without_parser.encode(text), calls)
    assert message and message["content"].startswith("<think>") and message["content"].endswith("I look.")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('{"name": "f", "arguments": {"a": 1}}', [("f", {"a": 1})]),
        ('[{"name": "f", "arguments": {}, "id": "1"}, {"name": "g", "parameters": {}}]', [("f", {}), ("g", {})]),
        ('[TOOL_CALLS]f[ARGS]{"a": {"b": 1}}', [("f", {"a": {"b": 1}})]),
        ('<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a": 1}', [("f", {"a": 1})]),
        ('function<sep>f\n```json\n{"a": 1}\n```<sep>f.g-h\n{}', [("f", {"a": 1}), ("f.g-h", {})]),
        ('if {"a": 1}, re-f {"a": 1}', []),
        ('An object {"a": 1} and a broken one {"name": "f", "argu', []),
        ("{" * 5000, []),
    ],
)  # fmt: skip
def test_calls_are_found_in_the_forms_that_hold_json(text, found):
    assert calls_in(text, {"f", "g", "f.g-h"}) == found


def test_arguments_are_compared_as_json_values():
    chat = family_chat("qwen2_5").with_tools(TOOLS)
    for own, is_same in (("1.0", True), ("1", True), ("true", False), ('"1"', False), ("1.5", False)):
        text = f'<tool_call>{{"arguments":{{"days":{own}}},"name":"{NAME}"}}</tool_call>'
        assert (called(chat, [user("a")], chat.encode(text), stored({"days": 1})["tool_calls"]) is not None) == is_same


MISTRAL = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST]{{ tools | tojson }}{{ m.content }}[/INST]"
    "{% elif m.tool_calls %}[TOOL_CALLS] [{% for call in m.tool_calls %}"
    "{% if call.id | length != 9 %}{{ raise_exception('id') }}{% endif %}{{ ', ' if not loop.first }}"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}, "id": "{{ call.id }}"}'
    "{% endfor %}]<|im_end|>{% elif m.role == 'tool' %}[TOOL_RESULTS] "
    '{"content": {{ m.content }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]'
    "{% else %} {{ m.content }}<|im_end|>{% endif %}{% endfor %}"
)


def test_a_template_that_demands_and_writes_ids_is_compared_without_them(tmp_path):
    (tmp_path / "mistral.jinja").write_text(MISTRAL)
    chat = tiny_chat(template=str(tmp_path / "mistral.jinja"))
    dialogue = begin(chat)
    say(dialogue, chat, f"[TOOL_CALLS][{json.dumps({'name': NAME, 'arguments': OSLO})}]")
    assert '"call_id": "call00000"' in chat.decode(dialogue.prompt_ids)
    dialogue = begin(chat)
    say(dialogue, chat, f"[TOOL_CALLS][{json.dumps({'name': NAME, 'arguments': ROME})}]")
    assert reasons(dialogue) == [OTHER_CALL]


def test_a_result_without_a_stored_call_before_it_is_never_given():
    chat = family_chat("qwen2_5")
    for turns in ([user("Oslo?"), result("7")], [user("Oslo?"), stored(OSLO), stored(ROME), result("7")]):
        for text in ("Rain.", hermes(NAME, OSLO)):
            dialogue = begin(chat, *turns)
            say(dialogue, chat, text)
            assert reasons(dialogue) == [OTHER_CALL if "tool_call" in text else NO_CALL]


def test_a_template_without_calls_keeps_the_first_answer_and_says_why_it_is_the_last():
    chat = family_chat("lfm2")
    dialogue = begin(chat)
    say(dialogue, chat, f'<|tool_call_start|>[{NAME}(town="Oslo", days=2)]<|tool_call_end|>')
    assert reasons(dialogue) == [LOSES_CALLS] and len(dialogue.rows) == 1
    for name in ("cohere", "deepseekv3", "gemma3", "llama3", "phi3"):
        assert reasons(begin(family_chat(name))) == [LOSES_TOOLS]


def test_a_result_that_the_template_cuts_ends_the_conversation(tmp_path):
    source = (ASSETS / "templates/qwen2_5.jinja").read_text()
    before, result, after = source.rpartition("message.content")
    (tmp_path / "cutting.jinja").write_text(f"{before}{result}[:3]{after}")
    chat = tiny_chat(template=str(tmp_path / "cutting.jinja"))
    dialogue = begin(chat)
    say(dialogue, chat, hermes(NAME, OSLO))
    assert reasons(dialogue) == [LOSES_TEXT] and len(dialogue.rows) == 1


# --- the stage --------------------------------------------------------------------------------------------------------

TINY = {"temperature": 0.0, "max_new_tokens": 40}


def tiny_with_tools() -> Chat:
    return tiny_chat(template=str(ASSETS / "templates/qwen2_5.jinja"))


@pytest.fixture
def calling(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let the target answer "Call [ARGUMENTS, …]" by these calls, results by a sentence, and all else by itself; return
    the prompts so far."""
    chat, asked = tiny_with_tools(), []

    def answers(model: Any, prompts: list[list[int]], **settings: Any) -> list[Answer]:
        own = generate(model, prompts, **settings)
        texts = [chat.decode(prompt) for prompt in prompts]
        asked.extend(texts)
        return [_scripted(chat, text) or answer for text, answer in zip(texts, own, strict=True)]

    monkeypatch.setattr(eagle3.answers.huggingface, "generate", answers)
    return asked


def _scripted(chat: Chat, prompt: str) -> Answer | None:
    last = prompt.removesuffix("<|im_end|>\n<|im_start|>assistant\n").rpartition("<|im_start|>user\n")[2]
    if "</tool_response>" in last:
        text = "It rains."
    elif last.startswith("Call "):
        text = "\n".join(hermes(NAME, each) for each in json.loads(last.removeprefix("Call ")))
    else:
        return None
    return Answer([*chat.encode(text), *chat.stop_ids], "stop")


def asks_for(*arguments: dict) -> dict:
    return user(f"Call {json.dumps(arguments)}")


def stage_prompts() -> list[dict]:
    equal = [asks_for(OSLO), stored(OSLO), result(RAIN), user(QUICK[0])]
    parallel = [asks_for(OSLO, ROME), stored(OSLO, ROME), result("rain"), result("sun", 1)]
    in_a_row = [asks_for(OSLO), stored(OSLO), result("rain"), asks_for(ROME), stored(ROME), result("sun")]
    other = [asks_for(ROME), stored(OSLO), result(RAIN), user("And then?")]
    plain = [user(QUICK[1]), stored(OSLO), result(RAIN)]
    rows = {"plain": plain, "other": other, "equal": equal, "parallel": parallel, "in a row": in_a_row}
    return [record(*messages, id=id) for id, messages in rows.items()]


def test_the_stage_goes_on_after_equal_calls_and_counts_those_that_differ(target, tmp_path, calling, caplog):
    chat, out_dir = tiny_with_tools(), write_prompts(tmp_path, stage_prompts())
    counts = run(target, chat, out_dir, **TINY)
    rows = read_answer_rows(out_dir)
    turns = {id: sum(len(row["turns"]) for row in rows.values() if row["prompt_id"] == id) for id in
             ("equal", "parallel", "in a row", "other", "plain")}  # fmt: skip
    assert turns == {"equal": 3, "parallel": 2, "in a row": 4, "other": 1, "plain": 1}
    assert counts.errors == {OTHER_CALL: 1, NO_CALL: 1} and f"{OTHER_CALL}: 1" in caplog.text
    for row in rows.values():
        trained = [chat.decode(row["input_ids"][begin:end]) for begin, end in row["turns"]]
        assert all("tool_response" not in each and each.endswith("<|im_end|>") for each in trained)
    assert all(hermes(NAME, OSLO) not in text for text in calling if QUICK[1] in text)  # what is stored is not shown


# --- imported ---------------------------------------------------------------------------------------------------------


def imported(chat: Chat, *messages: dict) -> tuple[list, list[str]]:
    settings = {"max_prompt_tokens": None, "context": None}
    rows, errors = imported_rows(record(*messages), chat, ImportedAnswers(finish_reason="stop"), **settings)
    return rows, [error.reason for error in errors]


def test_imported_answers_after_results_are_read_and_calls_in_parts_are_refused_by_name():
    chat = family_chat("qwen2_5")
    rows, errors = imported(chat, *CONVERSATION[:3], assistant("It rains."), user("Sure?"), assistant("Yes."))
    assert errors == [CALL_IN_PARTS]
    assert [chat.decode(row.input_ids[slice(*row.turns[0])]) for row in rows] == [
        "It rains.<|im_end|>",
        "Yes.<|im_end|>",
    ]
    assert all(chat.decode(row.input_ids).count(f"<tool_response>\n{RAIN}\n</tool_response>") == 1 for row in rows)


def test_an_imported_call_that_is_the_text_of_its_answer_is_trained():
    chat, text = family_chat("qwen2_5"), hermes(NAME, OSLO)
    rows, errors = imported(chat, user("Oslo?"), assistant(text), {"role": "tool", "content": "7"}, assistant("Seven."))
    assert errors == []
    assert chat.decode(rows[0].input_ids[slice(*rows[0].turns[0])]) == f"{text}<|im_end|>"


def test_imported_answers_after_a_call_that_the_template_loses_are_refused():
    _, errors = imported(family_chat("lfm2"), *CONVERSATION[:3], assistant("It rains."))
    assert errors == [CALL_IN_PARTS, LOSES_CALLS]
    assert imported(family_chat("llama3"), user("Oslo?"), assistant("It rains.")) == ([], [LOSES_TOOLS])
