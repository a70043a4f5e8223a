"""Prompts as a server would build them and contents as it would return them, over 14 families' templates."""

import datetime
import inspect
import os
from functools import cache

import pytest
import transformers
from chats import CONVERSATIONS, SETTINGS, SYSTEM, TEMPLATES, content, decode, loop, make_chat, make_tokenizer, user
from stores import ASSETS
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from eagle3.adapters.library import numbers
from eagle3.answers import template_limits
from eagle3.answers.build import target_markers
from eagle3.answers.chat import LOSES_TEXT, Chat, RefusedConversation
from eagle3.answers.dialogue import Dialogue
from eagle3.errors import InputError
from eagle3.settings.precomputing import TEMPLATE_PARAMETERS, ChatSettings


@pytest.fixture(scope="module", params=TEMPLATES)
def family(request):
    return request.param, make_chat(request.param)


def test_a_tokenizer_that_adds_bos_gives_one_bos():
    chat = make_chat("llama3")
    template = "<|begin_of_text|> $A"
    bos = ("<|begin_of_text|>", chat.tokenizer.bos_token_id)
    chat.tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=template, special_tokens=[bos])
    assert chat.tokenizer("hi")["input_ids"][0] == bos[1]
    assert chat.prompt_ids([user("hi")]).count(bos[1]) == 1


def test_prompts_equal_what_the_tokenizer_itself_renders(family):
    name, _ = family
    source = (ASSETS / f"templates/{name}.jinja").read_text()
    before = datetime.date.today()
    chat = make_chat(name, date=str(before))
    for messages in CONVERSATIONS.values():
        theirs = chat.tokenizer.apply_chat_template(
            messages, chat_template=source, add_generation_prompt=True, return_dict=False
        )
        if datetime.date.today() == before:  # at midnight theirs moves on
            assert chat.prompt_ids(messages) == theirs


@pytest.mark.parametrize(("name", "wanted"), [("llama3_2", "Today Date: 01 Jan 2026"), ("gptoss", "date: 2026-01-01")])
def test_templates_that_read_the_clock_see_the_configured_day(name, wanted):
    chat = make_chat(name)
    assert wanted in decode(chat, chat.prompt_ids([user("hi")]))
    other = make_chat(name, date="2026-01-02")
    assert other.prompt_ids([user("hi")]) != chat.prompt_ids([user("hi")])


MESSAGES = "{% for m in messages %}{{ m.content }}{% endfor %}"


def test_the_pinned_clock_formats_like_the_real_one(tmp_path):
    template, directives = tmp_path / "clock.jinja", "%Y-%m-%d, %d %B %Y, %A, %b %-d, %H:%M"
    # Leading white space, then a block: shadowing the clock must not change how the template itself renders.
    template.write_text("  {% if true %}\n  {{ strftime_now('" + directives + "') }}\n{% endif %}" + MESSAGES)
    chat = make_chat("llama3", template=str(template), date="2024-02-09", stop_tokens=[])
    assert decode(chat, chat.prompt_ids([user("")])) == f"  {datetime.datetime(2024, 2, 9):{directives}}\n"


def test_a_tokenizer_without_bos_renders_a_template_that_joins_it_to_a_text():
    tokenizer = make_tokenizer()
    assert tokenizer.bos_token is None
    path = str(ASSETS / "templates" / "llama3.jinja")
    chat = Chat(tokenizer, ChatSettings(**{**SETTINGS, "template": path, "stop_tokens": []}), stop_ids={2})
    text = tokenizer.decode(chat.prompt_ids([user("Hi")]))
    assert text.startswith("<|start_header_id|>user<|end_header_id|>")


def test_what_the_template_refuses_is_a_refusal_that_never_quotes_the_conversation(tmp_path):
    with pytest.raises(RefusedConversation, match="Conversation roles must alternate"):
        make_chat("gemma3").prompt_ids([user("a"), user("b")])
    template = tmp_path / "quoting.jinja"
    template.write_text("{{ raise_exception('cannot say ' + messages[0].content) }}")
    with pytest.raises(RefusedConversation) as refusal:
        make_chat("llama3", template=str(template)).prompt_ids([user("my secret")])
    assert "secret" not in str(refusal.value) and refusal.value.__suppress_context__


# --- the end of a turn -----------------------------------------------------------------------------------------------


def test_the_token_that_ends_a_turn_in_the_template_ends_answers(family):
    name, chat = family
    assert "stop_tokens" not in chat.settings and chat.stop_ids == {chat.tokenizer.eos_token_id}
    other = make_chat(name, stop_ids={0})  # as of a base model that was tuned on another template than its own
    assert other.settings["stop_tokens"] == [TEMPLATES[name][2]]
    assert other.stop_ids == {0, chat.tokenizer.eos_token_id}


TURNS = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}END{% endfor %}"
PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"


@pytest.mark.parametrize(
    ("end", "after", "added"),
    [
        ("<|im_end|>\n", "{% if not add_generation_prompt %}<|endoftext|>{% endif %}", ["<|im_end|>"]),
        ("{{ ' \n' if loop.last else '\n' }}", "", ["<|im_start|>"]),  # it writes no end: the next turn is one
        ("{{ '<|endoftext|>' if loop.last else '\n' }}", "", []),  # after the last turn alone
        ("</think><|endoftext|>", "", []),  # another mark before the end
    ],
)
def test_the_end_of_a_turn_is_what_the_template_writes_after_an_answer(tmp_path, end, after, added):
    path = tmp_path / "turns.jinja"
    path.write_text(TURNS.replace("END", end) + PROMPT + after)
    chat = make_chat("qwen3", template=str(path), stop_ids={0})
    assert chat.settings.get("stop_tokens", []) == added


def test_a_template_that_ends_turns_with_plain_text_needs_stop_tokens(tmp_path, caplog):
    path = tmp_path / "plain.jinja"
    path.write_text(TURNS.replace("END", "</turn>\n") + PROMPT)
    with pytest.raises(
        InputError, match=r"chat\.stop_tokens=auto, but .*'</turn>\\n' after an answer.*\(<\|im_end\|>\)"
    ):
        make_chat("qwen2_5", template=str(path))
    assert make_chat("qwen2_5", template=str(path), stop_tokens=[]).stop_ids == {2}
    assert make_chat("qwen2_5", template=str(path), stop_tokens=["<|im_start|>"]).stop_ids == {1, 2}
    with pytest.raises(InputError, match=r"chat\.stop_tokens=\['</turn>'\]: </turn> is no single token"):
        make_chat("qwen2_5", template=str(path), stop_tokens=["</turn>"])
    assert make_chat("qwen2_5", stop_ids={0}, stop_tokens=[]).stop_ids == {0}
    assert "chat.stop_tokens=[] leaves out <|im_end|>" in caplog.text


# --- variables of the template ---------------------------------------------------------------------------------------


def test_a_prompt_is_rendered_with_its_own_variables(caplog):
    chat = make_chat("qwen3", template_kwargs={"enable_thinking": True, "colour": "blue"})
    own = chat.for_prompt({"chat_template_kwargs": {"enable_thinking": False, "shade": 1}})
    assert own.prompt([user("Hi")]) == chat.prompt([user("Hi")]) + "<think>\n\n</think>\n\n"
    prompt = {"id": "1", "messages": [user("Hi")], "chat_template_kwargs": {"enable_thinking": False}}
    dialogue = Dialogue(prompt, chat, seed=0, max_prompt_tokens=None, on_length="keep")
    assert dialogue.prompt_ids == own.prompt_ids([user("Hi")])
    assert chat.for_prompt({"chat_template_kwargs": {"shade": 2}}).prompt([user("Hi")]) == chat.prompt([user("Hi")])
    assert caplog.messages == [
        "chat.template_kwargs: colour has no effect, because the chat template does not read it",
        "chat_template_kwargs of prompts: shade has no effect, because the chat template does not read it",
    ]


def test_the_arguments_of_the_renderer_are_no_variables():
    parameters = {*inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters} - {"self", "kwargs"}
    parameters |= {*inspect.signature(render_jinja_template).parameters} - {"kwargs"}
    if numbers(transformers.__version__) < (5, 20):
        parameters.add("sanitize_control_tokens")
    assert {*parameters, "messages"} == TEMPLATE_PARAMETERS


# --- marks of the target, in prompts ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "between"),
    [
        (None, "<|im_end|>\n<|im_start|>assistant"),
        ("qwen3", "<|im_end|>\n<|im_start|>assistant"),
        ("gemma3", "<end_of_turn>\n<start_of_turn>model"),
        ("deepseekv3", "<\uff5cAssistant\uff5c>"),
    ],
)
def test_the_marks_between_a_question_and_its_answer_are_those_of_the_template(name, between):
    path = name and str(ASSETS / "templates" / f"{name}.jinja")
    # The tokenizer is not the template's own, and has no token that ends its turns.
    settings = ChatSettings(**{**SETTINGS, "template": path, "stop_tokens": []})
    markers = target_markers(Chat(make_tokenizer(), settings, stop_ids=[2]))
    assert markers.between == between and {"<|im_start|>", "<|im_end|>"} <= markers.tokens


# --- limits ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "limit"),
    [
        ("{{ 7 ** (9 ** 9) }}", "does not end within 1 s"),  # never ends when it is compiled, in a single instruction
        ("{{ 'a'.center(10 ** 10) }}", "takes more than"),
        ("{% for _ in range(99) %}{{ 'a' * 999999 }}{% endfor %}", "writes"),
    ],
)
def test_a_template_without_bound_is_one_line(tmp_path, monkeypatch, source, limit):
    monkeypatch.setattr(template_limits, "CPU_SECONDS", 1)
    path = tmp_path / "endless.jinja"
    path.write_text(source + MESSAGES)
    with pytest.raises(InputError, match=rf"the chat template {limit}.*chat\.template=FILE"):
        make_chat("llama3", template=str(path))


@pytest.mark.parametrize(
    ("source", "limit"),
    [
        ("{{ 'a' * 2 ** 25 }}", "writes more than"),
        ("{% set n = namespace(a=messages) %}{% for _ in range(40) %}{% set n.a = n.a + n.a %}{% endfor %}", "memory"),
    ],
)
def test_a_template_without_bound_for_some_conversations_refuses_those(tmp_path, source, limit):
    path = tmp_path / "long.jinja"
    path.write_text("{% if 'a long' in messages[0].content %}" + source + "{% endif %}" + MESSAGES)
    chat = make_chat("llama3", template=str(path), stop_tokens=[])
    with pytest.raises(RefusedConversation, match=rf"{limit}.* for this conversation; .*chat\.template=FILE"):
        chat.prompt([user("a long question of twenty characters")])
    assert chat.prompt([user("short")]) == "short"


def test_a_template_that_is_stopped_again_and_again_ends_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(template_limits, "CPU_SECONDS", 1)
    monkeypatch.setattr(template_limits, "MOST_STOPPED", 2)
    monkeypatch.setattr("eagle3.answers.chat.renderer", cache(template_limits.Renderer))
    path = tmp_path / "long.jinja"
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    path.write_text("{% if 'long' in messages[0].content %}" + endless + "{% endif %}" + MESSAGES)
    chat = make_chat("llama3", template=str(path), stop_tokens=[])
    with pytest.raises(RefusedConversation, match=r"does not end within 1 s.* for this conversation; .*template=FILE"):
        chat.prompt([user("long")])
    with pytest.raises(InputError, match=r"for 2 conversations by now; .*chat\.template=FILE"):
        chat.prompt([user("long")])


GPT_OSS = "<|channel|>analysis<|message|>Easy.<|end|><|start|>assistant<|channel|>final<|message|>"


@pytest.mark.parametrize(
    ("name", "prompt", "answer", "wanted"),
    [
        ("gptoss", "", GPT_OSS + "Four.", "Four."),
        ("gptoss", "", "<|channel|>final<|message|>Four.", "Four."),
        ("qwen3", "", "<think>\nEasy.\n</think>\n\nFour.", "Four."),
        ("nemotron_3_nano", "", "Easy.\n</think>\nFour.", "Four."),  # its generation prompt opened the reasoning
        ("deepseekv3", "", "Easy.\n</think>Four.", "Four."),  # no special tokens there
        ("deepseekv3", "<think>\n</think>", "Four.", "Four."),
        ("qwen2_5", "", "  Four.\n ", "  Four.\n "),
        # Reasoning that does not end, or special tokens that hide the content.
        ("deepseekv3", "<think>\n", "Easy.", None),
        ("gptoss", "", "<|channel|>analysis<|message|>Easy.", None),
        ("gptoss", "", "<|channel|>final<|message|>A.<|end|><|start|>assistant<|channel|>final<|message|>B.", None),
        ("gptoss", "", "<|channel|>commentary to=functions.sum<|message|>[2, 2]", None),
        ("qwen3", "", "<think>\nEasy.", None),
        ("qwen3", "", "<think>\nEasy.\n</think>\n\nFour.<think>", None),
        ("llama3", "", "Four.<|start_header_id|>user<|end_header_id|>", None),
    ],
)
def test_the_content_of_an_answer_is_what_follows_its_reasoning(name, prompt, answer, wanted):
    chat = make_chat(name)
    for end in ("", TEMPLATES[name][2]):
        assert content(chat, answer + end, prompt) == wanted


@pytest.mark.parametrize(
    ("parser", "answer", "wanted"),
    [
        (None, GPT_OSS + "Four.", "analysisEasy.assistantfinalFour."),
        (["<|message|>", "<|end|>"], "<|message|>Easy.<|end|>Four.<|start|>", "Four."),
        (["[T]", "[/T]"], "[T]Easy.[/T]\n Four, said <|start|>he. ", "Four, said he."),
    ],
)
def test_what_a_server_returns_is_a_setting_of_its_own(parser, answer, wanted):
    chat = make_chat("gptoss", reasoning_parser=parser)
    assert content(chat, answer) == wanted and chat.settings["reasoning_parser"] == parser


TURN = "{{ '<|im_start|>' + m.role + '\n' }}{% if WHEN %}TEXT{% endif %}{{ '<|im_end|>\n' }}"
IMAGES = "{% for part in m.content %}{% if part.type == 'image' %}<image>{% endif %}{% endfor %}"


@pytest.mark.parametrize(
    ("when", "text", "role"),
    [
        ("true", IMAGES, "assistant and system and user"),
        ("m.role != 'user'", "{{ m.content }}", "user"),
        ("m.role != 'assistant'", "{{ m.content }}", "assistant"),
        ("m.role != 'user' or loop.last", "{{ m.content }}", "user"),  # earlier questions
        ("true", "{{ m.content[:8] }}", "assistant and system and user"),
    ],
)
def test_a_template_that_loses_the_text_of_a_role_is_refused_at_once(tmp_path, when, text, role):
    path = loop(tmp_path, TURN.replace("WHEN", when).replace("TEXT", text))
    with pytest.raises(InputError, match=rf"loses the text of .*{role}.* turns; give one .*chat\.template=FILE"):
        make_chat("qwen2_5", template=path)


def test_a_template_that_reads_lists_of_parts_alone_gets_them(tmp_path):
    parts = "{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}"
    chat = make_chat("qwen2_5", template=loop(tmp_path, TURN.replace("WHEN", "true").replace("TEXT", parts)))
    assert chat.prompt([user("Hi")]) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_text_that_a_template_loses_in_some_conversations_refuses_these(tmp_path):
    for when, text, lost in (
        ("m.role != 'system'", "{{ m.content }}", [SYSTEM, user("Hi")]),
        ("true", "{{ m.content.split('/flag')[0] }}", [user("Hi /flag there")]),
    ):
        chat = make_chat("qwen2_5", template=loop(tmp_path, TURN.replace("WHEN", when).replace("TEXT", text)))
        assert chat.prompt_ids([user("Hi")])
        with pytest.raises(RefusedConversation, match=LOSES_TEXT):
            chat.prompt_ids(lost)


def test_bad_settings_name_their_key(tmp_path):
    (tmp_path / "broken.jinja").write_text("{% if %}")
    os.mkfifo(tmp_path / "pipe.jinja")
    bare = make_tokenizer()
    bare.chat_template = None
    cases = [
        ({}, r"chat\.template=null .* chat\.template=FILE"),
        ({"template": str(tmp_path / "none.jinja")}, r"chat\.template=.*none\.jinja cannot be read"),
        ({"template": str(tmp_path / "pipe.jinja")}, r"chat\.template=.*pipe\.jinja is no regular file"),
        ({"template": str(tmp_path / "broken.jinja")}, r"not valid Jinja \(line 1\); correct chat\.template"),
    ]
    for changes, message in cases:
        with pytest.raises(InputError, match=message):
            Chat(bare, ChatSettings(**{**SETTINGS, **changes}), stop_ids={2})


def test_a_text_with_a_token_that_has_no_embedding_is_refused_by_its_name():
    tokenizer = AutoTokenizer.from_pretrained(ASSETS / "tiny")
    rows = len(tokenizer)
    tokenizer.add_tokens(["<image_soft_token>"])
    chat = Chat(tokenizer, ChatSettings(**SETTINGS | {"template": None}), stop_ids=[2], rows=rows)
    assert chat.prompt_ids([{"role": "user", "content": "Look."}])
    with pytest.raises(RefusedConversation, match=rf"<image_soft_token> \(id {rows}\).* no embedding"):
        chat.prompt_ids([{"role": "user", "content": "Look: <image_soft_token>"}])


def test_a_template_whose_own_tokens_have_no_embedding_is_refused_at_once():
    tokenizer = AutoTokenizer.from_pretrained(ASSETS / "tiny")
    rows = len(tokenizer)
    tokenizer.add_tokens(["<|eot|>"], special_tokens=True)
    tokenizer.chat_template = tokenizer.chat_template.replace("<|im_end|>", "<|eot|>")
    with pytest.raises(InputError, match=rf"<\|eot\|> \(id {rows}\), for which .*\({rows} rows\); put tokenizer"):
        Chat(tokenizer, ChatSettings(**SETTINGS | {"template": None}), stop_ids=[2], rows=rows)


def test_a_stop_token_that_is_ordinary_text_is_told(caplog):
    tokenizer = AutoTokenizer.from_pretrained(ASSETS / "tiny")
    Chat(tokenizer, ChatSettings(**SETTINGS | {"template": None}), stop_ids=[2, 300, 128009])
    assert [each.getMessage().split(",")[0] for each in caplog.records] == ["the target's eos_token_id=300 is 'un'"]


def test_a_template_without_a_generation_prompt_is_told(caplog):
    tokenizer = AutoTokenizer.from_pretrained(ASSETS / "tiny")
    settings = ChatSettings(**SETTINGS | {"template": None})
    Chat(tokenizer, settings, stop_ids=[2])
    assert not caplog.records
    tokenizer.chat_template = tokenizer.chat_template.partition("{%- if add_generation_prompt")[0]
    Chat(tokenizer, settings, stop_ids=[2])
    assert r"the target itself has to write '<|im_start|>assistant\n' before an answer" in caplog.text


def test_a_template_that_ends_turns_with_an_eos_token_that_is_not_set_is_told(tmp_path, caplog):
    tokenizer = AutoTokenizer.from_pretrained(ASSETS / "tiny")
    tokenizer.chat_template = tokenizer.chat_template.replace("'<|im_end|>\\n'", "eos_token + '\\n'")
    settings = ChatSettings(**SETTINGS | {"template": None})
    Chat(tokenizer, settings, stop_ids=[2])
    assert not caplog.records
    tokenizer.eos_token = None
    Chat(tokenizer, settings, stop_ids=[2])
    assert "the chat template writes eos_token, and the target's tokenizer has none" in caplog.text
