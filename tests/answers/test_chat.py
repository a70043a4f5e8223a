"""Prompts as a server would build them, and answer masks that are exact or refused, over 14 families' templates."""

import datetime

import pytest
from stores import ASSETS
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from eagle3.answers.chat import END_OF_TURN_INSIDE, NO_END_OF_TURN, NOT_CONTINUED, Chat, RefusedConversation
from eagle3.errors import InputError

CHATML = ["<|im_start|>", "<|im_end|>"]
LLAMA = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
# name: (special tokens, BOS, end of turn)
TEMPLATES = {
    "cohere": (
        ["<BOS_TOKEN>", "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>"],
        "<BOS_TOKEN>",
        "<|END_OF_TURN_TOKEN|>",
    ),
    "deepseekv3": (
        ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"],  # noqa: RUF001
        "<｜begin▁of▁sentence｜>",  # noqa: RUF001
        "<｜end▁of▁sentence｜>",  # noqa: RUF001
    ),
    "gemma3": (["<bos>", "<start_of_turn>", "<end_of_turn>"], "<bos>", "<end_of_turn>"),
    "glm4moe": (["[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>"], None, "<|user|>"),
    "gptoss": (["<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|return|>"], None, "<|return|>"),
    "lfm2": (["<|startoftext|>", *CHATML], "<|startoftext|>", "<|im_end|>"),
    "llama3": (LLAMA, "<|begin_of_text|>", "<|eot_id|>"),
    "llama3_1": (LLAMA, "<|begin_of_text|>", "<|eot_id|>"),
    "llama3_2": (LLAMA, "<|begin_of_text|>", "<|eot_id|>"),
    "nemotron_3_nano": ([*CHATML, "<think>", "</think>"], None, "<|im_end|>"),
    "phi3": (["<|system|>", "<|user|>", "<|assistant|>", "<|end|>"], None, "<|end|>"),
    "qwen2_5": (CHATML, None, "<|im_end|>"),
    "qwen3": ([*CHATML, "<think>", "</think>"], None, "<|im_end|>"),
    "qwen3_instruct_2507": (CHATML, None, "<|im_end|>"),
}
# What these templates write between the generation prompt and the answer's text: the target generates it too.
BEFORE_ANSWER = {
    "glm4moe": "\n<think></think>\n",
    "gptoss": "<|channel|>final<|message|>",
    "qwen3": "<think>\n\n</think>\n\n",
}
STRIPPING = {"cohere", "gemma3", "glm4moe", "llama3", "llama3_1", "llama3_2"}
# Their generation prompt opens a reasoning span which they leave out of, or close at once in, a written answer.
NEVER_EXACT = {"deepseekv3", "nemotron_3_nano"}


def user(content):
    return {"role": "user", "content": content}


def assistant(content):
    return {"role": "assistant", "content": content}


SYSTEM = {"role": "system", "content": "Answer in French."}
CONVERSATIONS = {
    "plain": [user("Two and two?"), assistant("Four, of course.")],
    "multi-turn": [user("Two and two?"), assistant("Four."), user("Sure?"), assistant("Yes!"), user("Why?")],
    "system": [SYSTEM, user("Two and two?"), assistant("Quatre.")],
    "empty answer": [user("Say nothing."), assistant("")],
    "leading whitespace": [user("  indented\n"), assistant("\n    return 4")],
}


def make_tokenizer(name=None):
    tokenizer = AutoTokenizer.from_pretrained(ASSETS / "tiny")
    if name:
        special, bos, end = TEMPLATES[name]
        tokenizer.add_tokens(special, special_tokens=True)
        tokenizer.bos_token = bos
        tokenizer.eos_token = end
    return tokenizer


def make_chat(name, **changes):
    tokenizer = make_tokenizer(name)
    stop_ids = {tokenizer.eos_token_id}
    settings = {"template": str(ASSETS / f"templates/{name}.jinja"), "template_kwargs": {}, "date": "2026-01-01"}
    return Chat(tokenizer, **{"stop_ids": stop_ids, **settings, **changes})


def decode(chat, ids):
    return chat.tokenizer.decode(ids, clean_up_tokenization_spaces=False)


@pytest.fixture(scope="module", params=TEMPLATES)
def family(request):
    return request.param, make_chat(request.param)


@pytest.mark.parametrize("conversation", CONVERSATIONS)
def test_the_mask_is_the_rendered_answer_and_its_end_of_turn(family, conversation):
    name, chat = family
    messages = CONVERSATIONS[conversation]
    rows = chat.answer_rows(messages)
    answers = [message["content"] for message in messages if message["role"] == "assistant"]
    assert [row.turn for row in rows] == list(range(len(answers)))
    if name in NEVER_EXACT:
        assert {row.refused for row in rows} == {NOT_CONTINUED}
        return
    for row, answer in zip(rows, answers, strict=True):
        assert row.refused is None
        expected = expected_answer(name, answer)
        assert decode(chat, row.answer_ids) == expected + TEMPLATES[name][2]
        prompt = decode(chat, row.prompt_ids)
        assert row.prompt_ids == chat.prompt_ids(row.messages[:-1])
        last_question = row.messages[-2]["content"].strip()
        assert last_question in prompt and (not answer or answer not in prompt[prompt.rindex(last_question) :])


def expected_answer(name, answer):
    if name in STRIPPING:
        answer = answer.strip()
    if name == "qwen3":
        answer = answer.lstrip("\n")
    if name == "glm4moe" and not answer:
        return "\n<think></think>"
    return BEFORE_ANSWER.get(name, "") + answer


def test_nemotron_is_exact_without_thinking_or_with_written_thoughts():
    silent = make_chat("nemotron_3_nano", template_kwargs={"enable_thinking": False})
    for messages in CONVERSATIONS.values():
        for row in silent.answer_rows(messages):
            assert decode(silent, row.answer_ids) == row.messages[-1]["content"].rstrip() + "<|im_end|>"
    thinking = make_chat("nemotron_3_nano")
    (row,) = thinking.answer_rows([user("2+2?"), assistant("<think>\nEasy.\n</think>\nFour.")])
    assert decode(thinking, row.answer_ids) == "Easy.\n</think>\nFour.<|im_end|>"


def test_bos_appears_once_even_when_the_tokenizer_would_add_its_own(family):
    name, chat = family
    bos = TEMPLATES[name][1]
    prompt = chat.prompt_ids(CONVERSATIONS["system"][:2])
    assert prompt.count(chat.tokenizer.bos_token_id) == (1 if bos else 0)
    if bos:
        assert prompt[0] == chat.tokenizer.bos_token_id


def test_a_tokenizer_that_adds_bos_gives_one_bos():
    chat = make_chat("llama3")
    template = "<|begin_of_text|> $A"
    bos = ("<|begin_of_text|>", chat.tokenizer.bos_token_id)
    chat.tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=template, special_tokens=[bos])
    assert chat.tokenizer("hi")["input_ids"][0] == bos[1]
    assert chat.prompt_ids([user("hi")]).count(bos[1]) == 1
    (row,) = chat.answer_rows([user("hi"), assistant("ho")])
    assert [*row.prompt_ids, *row.answer_ids].count(bos[1]) == 1


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


@pytest.mark.parametrize("directive", ["%Y-%m-%d", "%d %B %Y", "%A", "%b %-d", "%H:%M"])
def test_the_pinned_clock_formats_like_the_real_one(tmp_path, directive):
    template = tmp_path / "clock.jinja"
    # Leading white space, then a block: shadowing the clock must not change how the template itself renders.
    template.write_text("  {% if true %}\n  {{ strftime_now('" + directive + "') }}\n{% endif %}")
    chat = make_chat("llama3", template=str(template), date="2024-02-09")
    assert decode(chat, chat.prompt_ids([user("")])) == f"  {datetime.datetime(2024, 2, 9):{directive}}\n"


def test_a_tokenizer_without_bos_renders_a_template_that_joins_it_to_a_text():
    tokenizer = make_tokenizer()
    assert tokenizer.bos_token is None
    path = str(ASSETS / "templates" / "llama3.jinja")
    chat = Chat(tokenizer, template=path, template_kwargs={}, date="2026-01-01", stop_ids={2})
    text = tokenizer.decode(chat.prompt_ids([user("Hi")]))
    assert text.startswith("<|start_header_id|>user<|end_header_id|>")


def test_the_date_of_templates_with_a_default_date_is_left_alone():
    chat = make_chat("llama3_1")
    assert "26 Jul 2024" in decode(chat, chat.prompt_ids([user("hi")]))
    chat = make_chat("llama3_1", template_kwargs={"date_string": "1 May 2025"})
    assert "1 May 2025" in decode(chat, chat.prompt_ids([user("hi")]))


def test_an_answer_that_contains_the_end_of_turn_is_refused():
    chat = make_chat("qwen2_5")
    rows = chat.answer_rows([user("a"), assistant("b<|im_end|>c"), user("d"), assistant("e")])
    assert [row.refused for row in rows] == [END_OF_TURN_INSIDE, None]


def test_an_answer_whose_end_is_no_stop_token_is_refused():
    chat = make_chat("qwen2_5", stop_ids={0})
    assert chat.answer_rows(CONVERSATIONS["plain"])[0].refused == NO_END_OF_TURN


def test_what_the_template_refuses_is_a_refusal_of_that_conversation_only():
    chat = make_chat("gemma3")
    with pytest.raises(RefusedConversation, match="Conversation roles must alternate"):
        chat.prompt_ids([user("a"), user("b")])
    first, second = chat.answer_rows([user("a"), assistant("b"), assistant("c")])
    assert first.refused is None and "roles must alternate" in second.refused


def test_refusals_never_quote_the_conversation(tmp_path):
    template = tmp_path / "quoting.jinja"
    template.write_text("{{ raise_exception('cannot say ' + messages[0].content) }}")
    with pytest.raises(RefusedConversation) as refusal:
        make_chat("llama3", template=str(template)).prompt_ids([user("my secret")])
    assert "secret" not in str(refusal.value) and refusal.value.__suppress_context__


def test_sentencepiece_answers_get_no_space_of_their_own():
    vocabulary = {token: index for index, token in enumerate(["<unk>", "[INST]", "[/INST]", "</s>", *"▁ahi"])}
    backend = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Metaspace(prepend_scheme="first")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>")
    tokenizer.add_tokens(["[INST]", "[/INST]"], special_tokens=True)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '[INST]' + m.content + '[/INST]' if m.role == 'user' else m.content + eos_token }}"
        "{% endfor %}"
    )
    chat = Chat(tokenizer, template=None, template_kwargs={}, date="2026-01-01", stop_ids={3})
    (row,) = chat.answer_rows([user("hi"), assistant("ahi")])
    assert tokenizer.convert_ids_to_tokens(row.answer_ids) == ["a", "h", "i", "</s>"]


def test_answer_text_drops_the_end_of_turn_and_keeps_white_space():
    chat = make_chat("qwen2_5")
    ids = chat.tokenizer("  four\n <|im_end|>")["input_ids"]
    assert chat.answer_text(ids) == chat.answer_text(ids[:-1]) == "  four\n "


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("gptoss", "<|channel|>analysis<|message|>Easy.<|end|><|start|>assistant<|channel|>final<|message|>Four."),
        ("gptoss", "<|channel|>final<|message|>Four."),
        ("qwen3", "<think>\nEasy.\n</think>\n\nFour."),
        ("nemotron_3_nano", "Easy.\n</think>\nFour."),  # its generation prompt opened the reasoning
        ("qwen2_5", "Four."),
    ],
)
def test_the_content_of_an_answer_is_what_follows_its_reasoning(name, answer):
    chat = make_chat(name)
    ids = chat.tokenizer(answer + TEMPLATES[name][2], add_special_tokens=False)["input_ids"]
    assert chat.answer_text(ids) == "Four."


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("gptoss", "<|channel|>analysis<|message|>Easy."),
        ("gptoss", "<|channel|>final<|message|>Four.<|end|><|start|>assistant<|channel|>final<|message|>Five."),
        ("gptoss", "<|channel|>commentary to=functions.sum<|message|>[2, 2]"),
        ("qwen3", "<think>\nEasy."),
        ("qwen3", "<think>\nEasy.\n</think>\n\nFour.<think>"),
        ("llama3", "Four.<|start_header_id|>user<|end_header_id|>"),
    ],
)
def test_an_answer_whose_special_tokens_hide_its_content_has_none(name, answer):
    chat = make_chat(name)
    assert chat.answer_text(chat.tokenizer(answer, add_special_tokens=False)["input_ids"]) is None


def test_bad_settings_name_their_key(tmp_path):
    (tmp_path / "broken.jinja").write_text("{% if %}")
    bare = make_tokenizer()
    bare.chat_template = None
    good = {"template": None, "template_kwargs": {}, "date": "2026-01-01", "stop_ids": {2}}
    cases = [
        ({}, r"chat\.template=null .* chat\.template=FILE"),
        ({"template": str(tmp_path / "none.jinja")}, r"chat\.template=.*none\.jinja cannot be read"),
        ({"template": str(tmp_path / "broken.jinja")}, r"not valid Jinja \(line 1\); mend chat\.template"),
        ({"template": str(ASSETS / "templates/phi3.jinja"), "date": "1st of May"}, r"chat\.date=1st of May"),
        ({"template": str(ASSETS / "templates/phi3.jinja"), "template_kwargs": {"tokenize": True}}, "template_kwargs"),
    ]
    for changes, message in cases:
        with pytest.raises(InputError, match=message):
            Chat(bare, **{**good, **changes})
