"""Conversations that offer tools: rendered as the tokenizer itself renders them, or refused where a template cannot."""

import pytest
from chats import SYSTEM, TEMPLATES, assistant, make_chat, user
from stores import ASSETS

from eagle3.answers.chat import LOSES_TOOLS, RefusedConversation
from eagle3.answers.dialogue import CALLS_TOOL, Dialogue
from eagle3.answers.imported import ImportedAnswers, imported_rows
from eagle3.engine.endpoint import Answer

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look_up_weather",
            "description": "The weather of a town",
            "parameters": {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]},
        },
    }
]
WITHOUT_TOOLS = {"cohere", "deepseekv3", "gemma3", "llama3", "phi3"}  # templates that never read them
QUESTION = user("Does look_up_weather know Oslo?")


@pytest.mark.parametrize("name", sorted(set(TEMPLATES) - WITHOUT_TOOLS))
@pytest.mark.parametrize("messages", [[QUESTION], [SYSTEM, QUESTION, assistant("Yes."), user("And Rome?")]])
def test_tools_are_rendered_as_the_tokenizer_itself_renders_them(name: str, messages: list[dict]) -> None:
    chat = make_chat(name, template_kwargs={})
    source = (ASSETS / f"templates/{name}.jinja").read_text()
    theirs = chat.tokenizer.apply_chat_template(
        messages, tools=TOOLS, chat_template=chat._template, add_generation_prompt=True, return_dict=False
    )
    assert chat.with_tools(TOOLS).prompt_ids(messages) == theirs != chat.prompt_ids(messages)
    assert "tools" in source


@pytest.mark.parametrize("name", sorted(WITHOUT_TOOLS))
def test_a_template_that_does_not_render_tools_refuses_the_conversation(name: str) -> None:
    chat = make_chat(name)
    assert chat.prompt_ids([QUESTION])
    with pytest.raises(RefusedConversation, match=LOSES_TOOLS):
        chat.with_tools(TOOLS).prompt_ids([QUESTION])


def record(*questions: str) -> dict:
    messages = [user(question) for question in questions]
    return {"id": "1", "source": "s", "license": "MIT", "messages": messages, "tools": TOOLS}


def answered(*answers: str) -> Dialogue:
    chat = make_chat("qwen2_5")
    dialogue = Dialogue(record("Oslo?", "Rome?", "Why?"), chat, seed=0, max_prompt_tokens=None, on_length="keep")
    for answer in answers:
        assert dialogue.waiting
        ids = [*chat.encode(answer), chat.tokenizer.eos_token_id]
        dialogue.answer(Answer(ids, "stop"))
    return dialogue


def test_tools_stay_over_all_turns_of_a_conversation() -> None:
    dialogue = answered("Rain.", "Sun.", "Because.")
    assert not dialogue.waiting and dialogue.errors == []
    [row] = dialogue.rows  # each prompt goes on from the one before, the tools in front
    text = make_chat("qwen2_5").decode(row.input_ids)
    assert len(row.turns) == 3 and text.count('"name": "look_up_weather"') == 1


def test_a_conversation_ends_where_an_answer_may_call_a_tool() -> None:
    call = '<tool_call>\n{"name": "look_up_weather", "arguments": {"town": "Oslo"}}\n</tool_call>'
    dialogue = answered("Rain.", call)
    assert not dialogue.waiting
    assert [error.reason for error in dialogue.errors] == [CALLS_TOOL]
    assert [len(row.turns) for row in dialogue.rows] == [2]  # the call itself is an answer of the target's
    assert answered("Rain.", "Sun.", call).errors == []  # nothing follows it


def test_a_tool_that_only_the_reasoning_names_ends_no_conversation() -> None:
    chat = make_chat("qwen3")
    dialogue = Dialogue(record("Oslo?", "Rome?"), chat, seed=0, max_prompt_tokens=None, on_length="keep")
    answer = "<think>\nIs it look_up_weather?\n</think>\n\nRain."
    dialogue.answer(Answer([*chat.encode(answer), chat.tokenizer.eos_token_id], "stop"))
    assert dialogue.waiting and dialogue.errors == []


def test_imported_answers_are_read_behind_the_tools() -> None:
    prompt = record("Oslo?")
    prompt["messages"].append(assistant("Rain."))
    settings = {"max_prompt_tokens": None, "context": None}
    chat = make_chat("qwen2_5")
    [row], errors = imported_rows(prompt, chat, ImportedAnswers(finish_reason="stop"), **settings)
    assert errors == [] and "look_up_weather" in chat.decode(row.input_ids)
    without = make_chat("llama3")
    rows, [error] = imported_rows(prompt, without, ImportedAnswers(finish_reason="stop"), **settings)
    assert rows == [] and error.reason == LOSES_TOOLS
