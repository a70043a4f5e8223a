"""Answers made elsewhere: the target's own tokens or refused by name, over real tokenizers and templates."""

from collections import Counter

import pytest
from chats import CONVERSATIONS, SETTINGS, TEMPLATES, assistant, decode, loop, make_chat, user

from eagle3.answers.chat import Chat
from eagle3.answers.imported import (
    CONTROL_TOKEN_BEFORE,
    CONTROL_TOKEN_INSIDE,
    EMPTY,
    END_OF_TURN_INSIDE,
    FOREIGN_IDS,
    HAS_THE_ANSWER,
    INEXACT,
    NO_END_OF_TURN,
    NOT_CONTINUED,
    NOT_THE_PROMPT,
    NOT_THE_TEXT,
    NOT_TRAINED,
    NOT_WHOLE,
    PADDED,
    REASONING_OPEN,
    TWO_ANSWERS,
    UNKNOWN_END,
    answer_rows,
)
from eagle3.settings.precomputing import ChatSettings
from tests.answers.tokenizer_kinds import KINDS, build_tokenizer, texts

# What these templates write between the generation prompt and the answer's text; the target need not have written it.
INSERTED = {
    "glm4moe": "\n<think></think>\n",
    "gptoss": "<|channel|>final<|message|>",
    "qwen3": "<think>\n\n</think>\n\n",
}
STRIPPING = {"cohere", "gemma3", "glm4moe", "llama3", "llama3_1", "llama3_2", "qwen3"}  # white space around an answer
OPENING = {"deepseekv3", "nemotron_3_nano"}  # their generation prompt begins the reasoning


@pytest.fixture(scope="module", params=TEMPLATES)
def family(request):
    return request.param, make_chat(request.param)


def refusals(chat, *messages, **changes):
    return [row.refused for row in answer_rows(chat, list(messages), **changes)]


def test_the_mask_is_the_answer_and_its_end_of_turn_or_the_row_is_refused(family):
    name, chat = family
    rows, answers = [], []
    for messages in CONVERSATIONS.values():
        found = answer_rows(chat, messages)
        said = [message["content"] for message in messages if message["role"] == "assistant"]
        assert [row.turn for row in found] == list(range(len(said)))
        rows, answers = rows + found, answers + said
    for row, answer in zip(rows, answers, strict=True):
        if not answer:  # a server that took the reasoning out, or the calls, leaves this
            assert row.refused == EMPTY
        elif name in OPENING:
            assert row.refused == REASONING_OPEN
        elif name in STRIPPING and answer != answer.strip():
            assert row.refused == NOT_WHOLE
        else:
            assert row.refused is None
            assert decode(chat, row.answer_ids) == answer + TEMPLATES[name][2]
            assert decode(chat, row.prompt_ids) == chat.prompt(row.messages[:-1]) + INSERTED.get(name, "")
            prompt_ids = chat.prompt_ids(row.messages[:-1])
            assert row.prompt_ids[: len(prompt_ids)] == prompt_ids


# --- tokenizers ------------------------------------------------------------------------------------------------------

# Templates of three habits: text after the end token, text before the answer that joins it, a mark alone.
FORMS = {
    "lines": "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content + '</s>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}",
    "words": "{% for m in messages %}{{ m.role + ': ' + m.content + '</s>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}",
    "marks": "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '</s>' }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}",
}
CONTROL = ["<|user|>", "<|assistant|>"]
ANSWERS = ["Four, of course.\nOr more.", " Hello there", "\n\n    return 4\n", "a", "  b  ", "x = [1, 2]", "Yes!\t"]


@pytest.fixture(scope="module", params=[(kind, form) for kind in KINDS for form in FORMS], ids=": ".join)
def cell(request, tmp_path_factory):
    kind, form = request.param
    path = tmp_path_factory.mktemp("forms") / "form.jinja"
    path.write_text(FORMS[form])
    tokenizer = build_tokenizer(kind, CONTROL)
    return (
        kind,
        form,
        Chat(tokenizer, ChatSettings(**{**SETTINGS, "template": str(path)}), stop_ids={tokenizer.eos_token_id}),
    )


def test_every_row_is_the_rendered_text_up_to_its_end_token_and_every_tokenizer_gives_rows(cell):
    kind, form, chat = cell
    kept = 0
    for answer in [*ANSWERS, *texts()[1:40:2]]:
        messages = [user("Two and two?"), assistant(answer)]
        (row,) = answer_rows(chat, messages)
        if row.refused:
            assert row.refused == INEXACT
            continue
        kept += 1
        rendered = chat.render(messages, add_generation_prompt=False)
        behind_prompt = rendered[len(chat.prompt(messages[:1])) : rendered.rindex("</s>") + 4]
        before = decode(chat, chat.prompt_ids(messages[:1]))
        assert decode(chat, row.prompt_ids + row.answer_ids) == before + behind_prompt
        assert decode(chat, row.prompt_ids + row.answer_ids).endswith(answer + "</s>")
        assert row.answer_ids.count(chat.tokenizer.eos_token_id) == 1
    assert kept or (
        form == "marks" and kind in ("SentencePiece, legacy", "Metaspace, always", "byte-level with prefix")
    )


def test_tokens_that_the_target_wrote_come_back_as_they_were_or_not_at_all(cell):
    """The reference: what the target would write is known, and its text is what a server reads off it in its place."""
    kind, form, chat = cell
    prompt = [user("Two and two?")]
    prompt_ids = chat.prompt_ids(prompt)
    came_back = Counter()
    for text in [*ANSWERS, *texts()[1:40:2]]:
        in_context = chat.encode(chat.prompt(prompt) + text)
        written = in_context[len(prompt_ids) :]
        if in_context[: len(prompt_ids)] != prompt_ids or chat.tokenizer.unk_token_id in written:
            continue
        content = decode(chat, prompt_ids + written)[len(decode(chat, prompt_ids)) :]
        (row,) = answer_rows(chat, [*prompt, assistant(content)])
        came_back[row.refused] += 1
        if row.refused is None and form != "words":  # there the template writes a space of its own before the answer
            assert row.answer_ids == [*written, chat.tokenizer.eos_token_id], (kind, text)
            assert row.prompt_ids == prompt_ids
    assert set(came_back) <= {None, INEXACT} and came_back[None] >= came_back[INEXACT]


# --- what a template does to answers ---------------------------------------------------------------------------------

# The habits of two published templates, written short: DeepSeek-V3.1 ends an empty reasoning in the prompt and in front
# of every answer, Llama 2 puts a space before an answer and before its end token.
WRITTEN = {
    "deepseekv31": (
        "deepseekv3",
        "{% for m in messages %}{{ '<｜User｜>' + m.content if m.role == 'user' else "  # noqa: RUF001
        "'<｜Assistant｜></think>' + m.content.split('</think>')[-1] + eos_token }}{% endfor %}"  # noqa: RUF001
        "{% if add_generation_prompt %}{{ '<｜Assistant｜>' + ('<think>' if thinking else '</think>') }}{% endif %}",  # noqa: RUF001
    ),
    "llama2": (
        "phi3",
        "{% for m in messages %}{{ '[INST] ' + m.content + ' [/INST]' if m.role == 'user' else "
        "' ' + m.content + ' ' + eos_token }}{% endfor %}",
    ),
}


def build_chat(name, tmp_path, **changes):
    if name not in WRITTEN:
        return make_chat(name, **changes)
    family, template = WRITTEN[name]
    (tmp_path / "written.jinja").write_text(template)
    return make_chat(family, template=str(tmp_path / "written.jinja"), **changes)


def answer_end(name):
    return TEMPLATES[WRITTEN[name][0] if name in WRITTEN else name][2]


def test_white_space_that_the_template_joins_to_the_answer_is_of_its_first_token(tmp_path):
    chat = build_chat("llama2", tmp_path)
    (row,) = answer_rows(chat, [user("Say"), assistant("the word")])
    assert chat.tokenizer.convert_ids_to_tokens(row.answer_ids)[0] == "Ġthe"
    # It writes a space before the end token too, so that the target's own end is not known.
    assert decode(chat, row.answer_ids) == " the word"


THOUGHT = "<think>\nEasy.\n</think>\n\nFour."


@pytest.mark.parametrize(
    ("name", "changes", "prompt_end", "answer"),
    [
        ("deepseekv3", {}, "<｜Assistant｜><think>\n", "Easy.\n</think>\n\nFour."),  # noqa: RUF001  cuts the reasoning
        ("deepseekv31", {"thinking": True}, "<｜Assistant｜><think>", "\nEasy.\n</think>\n\nFour."),  # noqa: RUF001
        ("nemotron_3_nano", {}, "assistant\n<think>\n", "Easy.\n</think>\n\nFour."),
        ("glm4moe", {}, "<|assistant|>", THOUGHT),  # writes no end of turn, strips earlier reasoning
        ("qwen3", {}, "<|im_start|>assistant\n", THOUGHT),
        ("llama3", {}, "<|end_header_id|>\n\n", THOUGHT),  # knows of no reasoning
    ],
)
def test_an_answer_with_its_reasoning_follows_the_prompt_whole(tmp_path, name, changes, prompt_end, answer):
    chat = build_chat(name, tmp_path, template_kwargs=changes)
    talk = [user("Two and two?"), assistant(THOUGHT), user("Sure?"), assistant(THOUGHT)]
    for row in answer_rows(chat, talk):
        assert row.refused is None
        assert row.prompt_ids == chat.prompt_ids(row.messages[:-1])
        assert decode(chat, row.prompt_ids).endswith(prompt_end)
        assert decode(chat, row.answer_ids) == answer + answer_end(name)


ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>"


def test_reasoning_inside_the_content_is_taken_where_the_template_has_a_field_for_it():
    """gpt-oss' template refuses its own marks in a content, and writes a field `thinking` with the last answer."""
    chat = make_chat("gptoss")
    answer = f"{ANALYSIS}Easy: 2 + 2.{FINAL}Four."
    talk = [user("Two and two?"), assistant(answer), user("Sure?"), assistant(answer)]
    for row in answer_rows(chat, talk):
        assert row.refused is None and row.messages[1]["content"] == ("Four." if row.turn else answer)
        assert row.prompt_ids == chat.prompt_ids(row.messages[:-1])
        assert decode(chat, row.answer_ids) == f"{answer}<|return|>"
    for cut in (f"{ANALYSIS}Easy: 2", f"{ANALYSIS}Easy: 2 + 2.{FINAL}Fo"):
        (row,) = answer_rows(chat, [talk[0], assistant(cut)], unstated="length")
        assert row.refused is None and decode(chat, row.answer_ids) == cut
    for text, reason in (
        (f"{ANALYSIS}Easy: 2 + 2.", REASONING_OPEN),
        (f"{ANALYSIS}Easy.{FINAL}Four.{FINAL}Five.", REASONING_OPEN),
        (f"{ANALYSIS}Easy.<|end|>{FINAL}Four.", CONTROL_TOKEN_INSIDE),
        (f"{ANALYSIS}Easy.{FINAL}Four.<|return|>", END_OF_TURN_INSIDE),
    ):
        assert refusals(chat, talk[0], assistant(text)) == [reason]


@pytest.mark.parametrize("name", ["deepseekv3", "nemotron_3_nano"])
def test_reasoning_that_the_prompt_began_may_come_without_its_start(name):
    chat = make_chat(name)
    whole, half = (answer_rows(chat, [user("2+2?"), assistant(text)])[0] for text in (THOUGHT, THOUGHT[8:]))
    assert whole.refused is None and whole.answer_ids == half.answer_ids


CLOSED = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n\n</think>\n\n' }}{% endif %}"


@pytest.mark.parametrize(
    ("name", "changes", "prompt_end"),
    [
        ("glm4moe", {"enable_thinking": False}, "<|assistant|>\n<think></think>\n"),
        ("qwen3", {"enable_thinking": False}, "assistant\n<think>\n\n</think>\n\n"),
        ("nemotron_3_nano", {"enable_thinking": False}, "assistant\n<think></think>"),
        ("deepseekv31", {}, "<｜Assistant｜></think>"),  # noqa: RUF001
    ],
)
def test_behind_a_prompt_that_closes_an_empty_reasoning_an_answer_is_exact(tmp_path, name, changes, prompt_end):
    chat = build_chat(name, tmp_path, template_kwargs=changes)
    for row in answer_rows(chat, [user("2+2?"), assistant("Four."), user("Sure?"), assistant("Yes.")]):
        assert row.refused is None and decode(chat, row.prompt_ids).endswith(prompt_end)
        assert decode(chat, row.answer_ids) == row.messages[-1]["content"] + answer_end(name)


def test_a_template_may_leave_the_closed_reasoning_out_of_what_it_writes(tmp_path):
    turn = "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    path = tmp_path / "closing.jinja"
    path.write_text("{% for m in messages %}" + turn + "{% endfor %}" + CLOSED)
    chat = make_chat("qwen3", template=str(path))
    (row,) = answer_rows(chat, [user("2+2?"), assistant("Four.")])
    assert decode(chat, row.prompt_ids).endswith("assistant\n<think>\n\n</think>\n\n")
    assert decode(chat, row.answer_ids) == "Four.<|im_end|>"
    path.write_text(path.read_text().replace("<think>\n\n</think>", "<think>\nBe brief.\n</think>"))
    assert refusals(make_chat("qwen3", template=str(path)), user("2+2?"), assistant("Four.")) == [NOT_CONTINUED]


OPEN = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n[THINK]' }}{% endif %}"


def test_reasoning_that_the_prompt_opens_and_nothing_closes_is_refused(tmp_path):
    turn = "{{ '<|im_start|>' + m.role + '\n' + ('[THINK]' if m.role == 'assistant' else '') + m.content }}<|im_end|>\n"
    (tmp_path / "open.jinja").write_text("{% for m in messages %}" + turn + "{% endfor %}" + OPEN)
    chat = make_chat("qwen2_5", template=str(tmp_path / "open.jinja"), reasoning_parser=["[THINK]", "[/THINK]"])
    assert refusals(chat, user("2+2?"), assistant("Four.")) == [REASONING_OPEN]
    assert refusals(chat, user("2+2?"), assistant("Easy.[/THINK]Four.")) == [None]


@pytest.mark.parametrize(("parser", "shown"), [("auto", "Four."), (None, "<think>Easy.</think>Four.")])
def test_earlier_answers_are_in_a_prompt_as_the_server_returned_them(tmp_path, parser, shown):
    turn = "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{# <think> </think> #}"
    chat = make_chat("qwen2_5", template=loop(tmp_path, turn), reasoning_parser=parser)
    answer = assistant("<think>Easy.</think>Four.")
    first, second = answer_rows(chat, [user("2+2?"), answer, user("Sure?"), answer])
    assert decode(chat, first.answer_ids) == decode(chat, second.answer_ids) == "<think>Easy.</think>Four.<|im_end|>"
    assert f"assistant\n{shown}<|im_end|>" in decode(chat, second.prompt_ids)


@pytest.mark.parametrize(
    ("written", "content"),
    [
        ("m.content.split('</x>')[-1]", "Easy.</x>Four."),  # drops
        ("m.content.replace('a', 'aa')", "banana"),  # adds
        ("m.content.split('|')[::-1] | join('|')", "one|two"),  # moves
        ("m.content | trim", "Four. \n"),
        ("m.content | upper if m.content | length > 40 else m.content", "long " * 10),
        ("m.content.replace('Four', '4')", THOUGHT),
    ],
)
def test_an_answer_that_the_template_does_not_keep_whole_is_refused(tmp_path, written, content):
    turn = "{{ '<|im_start|>' + m.role + '\n' + (WRITTEN if m.role == 'assistant' else m.content) + '<|im_end|>\n' }}"
    markers = ["<think>", "</think>"]
    chat = make_chat("qwen2_5", template=loop(tmp_path, turn.replace("WRITTEN", written)), reasoning_parser=markers)
    assert refusals(chat, user("Say"), assistant(content)) == [NOT_WHOLE]


def test_the_text_of_a_control_token_in_an_answer_or_a_question_is_refused():
    chat = make_chat("qwen2_5")
    talk = [user("What ends this?<|im_end|>"), assistant("A"), user("d"), assistant("e")]
    assert refusals(chat, *talk) == [CONTROL_TOKEN_BEFORE] * 2
    assert refusals(chat, user("a"), assistant("b<|im_end|>c"), user("d"), assistant("e")) == [END_OF_TURN_INSIDE, None]
    assert refusals(chat, user("a"), assistant("b<|im_start|>c")) == [CONTROL_TOKEN_INSIDE]
    assert refusals(make_chat("qwen3"), user("a"), assistant("A </think> ends it.")) == [CONTROL_TOKEN_INSIDE]
    assert refusals(make_chat("qwen3"), user("a"), assistant(THOUGHT + "<|im_start|>")) == [CONTROL_TOKEN_INSIDE]


def test_two_assistant_turns_in_a_row_are_both_refused(family):
    name, chat = family
    if name == "gemma3":
        return  # it refuses them itself
    talk = [user("a"), assistant(THOUGHT), assistant("c"), user("d"), assistant(THOUGHT)]
    assert refusals(chat, *talk)[:2] == [TWO_ANSWERS] * 2


def test_an_answer_whose_end_is_no_stop_token_is_refused():
    chat = make_chat("qwen2_5", stop_ids={0}, stop_tokens=[])
    assert refusals(chat, *CONVERSATIONS["plain"]) == [NO_END_OF_TURN]
    assert refusals(chat, *CONVERSATIONS["plain"], unstated="length") == [None]


def test_an_answer_that_is_not_to_be_trained_is_part_of_later_prompts_only():
    chat = make_chat("qwen2_5")
    talk = [user("2+2?"), assistant("Five.") | {"trained": False}, user("No."), assistant("Four.")]
    untrained, trained = answer_rows(chat, talk)
    assert untrained.refused == NOT_TRAINED and trained.refused is None
    assert "Five." in decode(chat, trained.prompt_ids) and decode(chat, trained.answer_ids) == "Four.<|im_end|>"


# --- cuts ------------------------------------------------------------------------------------------------------------


def test_a_cut_answer_gets_no_end_of_turn(family):
    name, chat = family
    answer = THOUGHT if name in OPENING else "Four, of cou"
    talk = [user("2+2?"), assistant(answer)]
    (ended,) = answer_rows(chat, talk)
    (cut,) = answer_rows(chat, [talk[0], {**talk[1], "finish_reason": "length"}])
    assert ended.refused is cut.refused is None and cut.finish_reason == "length" and ended.finish_reason == "unstated"
    assert ended.answer_ids[-1] in chat.stop_ids and cut.answer_ids == ended.answer_ids[:-1]
    (taken_for_cut,) = answer_rows(chat, talk, unstated="length")
    assert taken_for_cut.answer_ids == cut.answer_ids and taken_for_cut.finish_reason == "length"
    assert refusals(chat, talk[0], {**talk[1], "finish_reason": "other"}) == [UNKNOWN_END]


def test_an_answer_that_was_cut_while_it_reasoned_is_a_cut_answer():
    chat = make_chat("qwen3")
    talk = [user("2+2?"), assistant("<think>\nEasy, I th")]
    assert refusals(chat, *talk) == [REASONING_OPEN]
    (row,) = answer_rows(chat, talk, unstated="length")
    assert decode(chat, row.prompt_ids) == chat.prompt(talk[:1])
    assert decode(chat, row.answer_ids) == "<think>\nEasy, I th"


# --- by token ids ----------------------------------------------------------------------------------------------------


def by_ids(chat, question, output, *, finish_reason="stop", content=None, **changes):
    made = {"prompt_ids": chat.prompt_ids([user(question)]), "output_ids": chat.encode(output)}
    made["finish_reason"] = finish_reason
    content = output.removesuffix("<|im_end|>") if content is None else content
    return [user(question), assistant(content) | made | changes]


def test_token_ids_are_taken_as_they_are():
    chat = make_chat("qwen2_5")
    letters = [chat.tokenizer.convert_tokens_to_ids(letter) for letter in "Hello"]
    assert letters != chat.encode("Hello")
    stop = chat.tokenizer.eos_token_id
    (row,) = answer_rows(chat, by_ids(chat, "Hi", "Hello", output_ids=[*letters, stop]))
    assert row.refused is None and row.prompt_ids == chat.prompt_ids([user("Hi")])
    assert row.answer_ids == [*letters, stop] and row.messages[-1] == assistant("Hello") | {"finish_reason": "stop"}
    # As servers and decoders give it, asked for special tokens or not.
    for content in ("Hello<|im_start|><|im_end|>", "Hello<|im_start|>", "Hello"):
        assert refusals(chat, *by_ids(chat, "Hi", "Hello<|im_start|><|im_end|>", content=content)) == [None]
    (row,) = answer_rows(chat, by_ids(chat, "Hi", "Hello", finish_reason="length"))
    assert row.refused is None and row.answer_ids == chat.encode("Hello")
    # Templates may drop earlier answers from a prompt.
    assert refusals(chat, user("Hi"), assistant("Yes?"), *by_ids(chat, "Hi", "Hello<|im_end|>")) == [None, None]


@pytest.mark.parametrize(
    ("reason", "output", "changes"),
    [
        (FOREIGN_IDS, "Hello<|im_end|>", {"prompt_ids": [10**6]}),
        (FOREIGN_IDS, "Hello<|im_end|>", {"output_ids": [10**6, 2]}),
        (UNKNOWN_END, "Hello<|im_end|>", {"finish_reason": "other"}),
        (NO_END_OF_TURN, "Hello", {}),
        (END_OF_TURN_INSIDE, "Hello<|im_end|>", {"finish_reason": "length"}),
        (END_OF_TURN_INSIDE, "Hel<|im_end|>lo<|im_end|>", {}),
        (NOT_THE_TEXT, "Hello<|im_end|>", {"content": "<PERSON>"}),  # what the stage before masked is in the ids still
        (NOT_THE_PROMPT, "Hello<|im_end|>", {"prompt_ids": [5]}),
    ],
)
def test_token_ids_that_are_not_what_is_said_of_them_are_refused(reason, output, changes):
    chat = make_chat("qwen2_5")
    question, answer = by_ids(chat, "Hi there", output, **changes)
    assert refusals(chat, question, answer) == [reason]
    del answer["finish_reason"]
    if reason != FOREIGN_IDS:
        assert refusals(chat, question, answer) == [UNKNOWN_END]


def test_prompt_ids_that_hold_the_answer_or_padding_are_refused():
    chat = make_chat("qwen2_5")
    prompt, output, pad = chat.prompt_ids([user("Hi")]), chat.encode("Hello<|im_end|>"), chat.tokenizer.pad_token_id
    for prompt_ids, reason in (
        (prompt + output, HAS_THE_ANSWER),
        ([pad, pad, *prompt], PADDED),
        ([pad, *prompt], PADDED),
    ):
        assert refusals(chat, *by_ids(chat, "Hi", "Hello<|im_end|>", prompt_ids=prompt_ids)) == [reason]
    chat.tokenizer.bos_token = chat.tokenizer.pad_token  # then a prompt may begin with it, once
    for begin, reason in (([pad], None), ([pad, pad], PADDED)):
        assert refusals(chat, *by_ids(chat, "Hi", "Hello<|im_end|>", prompt_ids=[*begin, *prompt])) == [reason]


def test_a_cut_inside_a_character_is_no_other_text():
    chat = make_chat("qwen2_5")
    ids = chat.encode("Grüße, 世")[:-1]
    assert "\ufffd" in decode(chat, ids)
    talk = by_ids(chat, "Hi", "", finish_reason="length", output_ids=ids, content="Grüße, ")
    assert refusals(chat, *talk) == [None]
