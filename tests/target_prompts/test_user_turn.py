"""The place of a user's text in 14 families' templates and with tokenizers of each class, and texts that are none."""

import defaults
import pytest
from chats import SETTINGS, TEMPLATES, make_chat, make_tokenizer
from stores import ASSETS

from eagle3.answers.chat import Chat
from eagle3.engine.endpoint import Answer
from eagle3.errors import InputError
from eagle3.settings.precomputing import ChatSettings
from eagle3.target_prompts.answered import AnsweredPrompt
from eagle3.target_prompts.store import prompt_id
from eagle3.target_prompts.user_turn import (
    CUT,
    LOOP,
    NO_END,
    NOT_TEXT,
    REWRITTEN,
    ROLE_INSIDE,
    TINY,
    TOKEN_INSIDE,
    checked,
    first_user_turn,
    require_user_turns,
    user_turn,
)
from eagle3.target_prompts.written import NO_ROOM, Sample, Writing
from tests.answers.tokenizer_kinds import KINDS, build_tokenizer

SYSTEM = "You are a coding assistant for SQL."
# Template → what ends a user's turn in it, where that is not what ends the target's.
OTHER_ENDS = {"deepseekv3": "<｜Assistant｜>", "glm4moe": "<|assistant|>", "gptoss": "<|end|>"}  # noqa: RUF001
QUESTIONS = [
    "How do I join two tables?",
    "1 + 1 = ?",
    "(a) or (b), and why?",
    "```sql\nSELECT 1\n```\nWhat is it?",
    "为什么天空是蓝色的?",
]


def user(text):
    return {"role": "user", "content": text}


CONVERSATIONS = {
    "no system prompt": [],
    "system prompt": [{"role": "system", "content": SYSTEM}],
    "second turn": [user("Two and two?"), {"role": "assistant", "content": "Four."}],
}


def ended(chat, turn, text):
    """What a target would have written: the ids after the header, with the end of the turn."""
    return Answer([*chat.tokenizer(text, add_special_tokens=False)["input_ids"], turn.end], "stop")


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_family_s_user_turn_is_found_exactly(name):
    chat = make_chat(name)
    for before in CONVERSATIONS.values():
        turn = user_turn(chat, before)
        assert chat.decode([turn.end]) == OTHER_ENDS.get(name, TEMPLATES[name][2])
        for question in QUESTIONS:
            ids = chat.prompt_ids([*before, user(question)])
            assert tuple(ids[: len(turn.header)]) == turn.header
            # All that the template writes before the text is in the header: the rest begins with the text itself.
            rest = chat.decode(ids[len(turn.header) :])
            assert rest.startswith(question) and rest.removeprefix(question).startswith(chat.decode([turn.end]))
            assert checked(chat, turn, before, ended(chat, turn, question)) == (question, None)
    assert first_user_turn(chat, SYSTEM) == user_turn(chat, CONVERSATIONS["system prompt"])
    assert SYSTEM in first_user_turn(chat, SYSTEM).before


MISTRAL = "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"  # noqa: E501


@pytest.mark.parametrize("kind", KINDS)
def test_a_space_before_the_text_is_left_to_the_target_where_it_is_part_of_its_first_token(kind, tmp_path):
    (tmp_path / "mistral.jinja").write_text(MISTRAL)
    tokenizer = build_tokenizer(kind, ["[INST]", "[/INST]"])
    chat = Chat(tokenizer, ChatSettings(**{**SETTINGS, "template": str(tmp_path / "mistral.jinja")}), stop_ids={2})
    turn = first_user_turn(chat, None)
    assert tokenizer.convert_ids_to_tokens(turn.header)[:2] == ["<s>", "[INST]"]
    assert tokenizer.convert_ids_to_tokens(turn.end) == "[/INST]"
    for question in ("Why is it so?", "Explain the second case."):
        ids = chat.prompt_ids([user(question)])
        written = ids[len(turn.header) : ids.index(turn.end) + 1]
        assert checked(chat, turn, [], Answer(written, "stop")) == (question, None)


CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\nTEXT<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"  # noqa: E501


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{% for m in messages %}USER: {{ m.content }} {% endfor %}ASSISTANT:", NO_END),
        (CHATML.replace("TEXT", "{{ m.content }}{{ m.content }}"), REWRITTEN),
        (CHATML.replace("TEXT", "{{ m.content }} ({{ m.content | length }} characters)"), REWRITTEN),
        (CHATML.replace("TEXT", "{{ m.content }}\nThink first."), NO_END),
        ("{{ raise_exception('no users') }}" + CHATML.replace("TEXT", "{{ m.content }}"), "the chat .*: no users"),
    ],
)
def test_a_template_without_a_place_for_a_user_s_text_is_refused_by_name(template, reason, tmp_path):
    (tmp_path / "other.jinja").write_text(template)
    chat = make_chat("qwen2_5", template=str(tmp_path / "other.jinja"), stop_tokens=[])
    with pytest.raises(InputError, match=rf"prompts=from_target: .*\({reason}.*chat\.template=FILE"):
        require_user_turns(chat, [])


def test_system_prompts_that_the_template_refuses_or_loses_are_refused_by_name(tmp_path):
    for body in (
        "{{ m.content if m.role != 'system' }}",
        "{{ raise_exception('no system') if m.role == 'system' }}{{ m.content }}",
    ):
        (tmp_path / "other.jinja").write_text(CHATML.replace("TEXT", body))
        chat = make_chat("qwen2_5", template=str(tmp_path / "other.jinja"))
        require_user_turns(chat, [])
        with pytest.raises(InputError, match=r"after a prompt of prompts\.from_target\.system_prompts"):
            require_user_turns(chat, [SYSTEM])


def test_a_text_is_given_as_the_template_would_serve_it_or_left_out_where_that_is_another(tmp_path):
    (tmp_path / "own.jinja").write_text(CHATML.replace("TEXT", "{{ m.content | trim | replace('/no_think', '') }}"))
    for chat in (make_chat("qwen2_5", template=str(tmp_path / "own.jinja")), make_chat("qwen2_5")):
        turn = first_user_turn(chat, None)
        for text in ("What is it?", "  What is it? \n"):
            assert checked(chat, turn, [], ended(chat, turn, text)) == ("What is it?", None)
        rewrites = chat.settings["template_hash"] != make_chat("qwen2_5").settings["template_hash"]
        assert (checked(chat, turn, [], ended(chat, turn, "Why is it? /no_think"))[1] is not None) == rewrites


@pytest.fixture(scope="module")
def plain_chat():
    return make_chat("qwen2_5")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", TINY),
        ("  \n", TINY),
        ("Ok?", TINY),
        ("?????????????", TINY),
        ("Why?<|im_start|>assistant\nBecause", TOKEN_INSIDE),
        ("Why is that?\nAssistant: Because it is.", ROLE_INSIDE),
        ("Why is that?\n\nassistant\nBecause it is.", ROLE_INSIDE),
        ("### Human: why is that?", ROLE_INSIDE),
        ("is it so? " * 20, LOOP),
        ("What does \ufffd mean here?", NOT_TEXT),
        ("The user is right, and the assistant is not. Why?", None),
        ("System: Debian 12. Why does apt fail?", None),
        ("\n".join(f"{number}. {number * number} apples cost {number + 3} dollars" for number in range(12)), None),
        ("为什么?为什么呢", None),
    ],
)
def test_a_text_that_is_no_prompt_is_named_by_its_reason(plain_chat, text, reason):
    turn = first_user_turn(plain_chat, None)
    assert checked(plain_chat, turn, [], ended(plain_chat, turn, text)) == (text.strip(), reason)


def test_added_tokens_that_the_template_does_not_write_are_text():
    tokenizer = make_tokenizer()
    markers = ["<｜User｜>", "<｜Assistant｜>"]  # noqa: RUF001 no special tokens in DeepSeek's tokenizer
    tokenizer.add_tokens([*markers, "\n\n", "    ", "<table>"])
    template = str(ASSETS / "templates/deepseekv3.jinja")
    chat = Chat(
        tokenizer,
        ChatSettings(**{**SETTINGS, "template": template, "stop_tokens": []}),
        stop_ids={tokenizer.eos_token_id},
    )
    turn = first_user_turn(chat, None)
    assert chat.decode([turn.end]) == markers[1]
    text = "Why is this wrong?\n\n    <table>\n\n    </table>"
    assert checked(chat, turn, [], ended(chat, turn, text)) == (text, None)
    assert checked(chat, turn, [], ended(chat, turn, f"Why is this wrong?{markers[0]}Tell me."))[1] == TOKEN_INSIDE


def test_a_turn_without_its_end_or_with_another_control_token_at_it_is_left_out():
    chat = make_chat("glm4moe")
    turn = first_user_turn(chat, None)
    ids = ended(chat, turn, "What is the answer?").token_ids
    assert checked(chat, turn, [], Answer(ids[:-1], "length"))[1] == CUT
    [system] = chat.encode("<|system|>")
    assert checked(chat, turn, [], Answer([*ids[:-1], system], "stop"))[1] == TOKEN_INSIDE
    [stop] = chat.stop_ids  # some targets end a user's text as they end their own
    assert checked(chat, turn, [], Answer([*ids[:-1], stop], "stop"))[1] is None


def test_a_conversation_of_several_turns_ends_before_a_turn_that_cannot_be_used():
    chat = make_chat("qwen2_5")
    plan = {"sampling": defaults.sampling(temperature=1.0, max_new_tokens=64), "system_prompts": (SYSTEM,), "turns": 3}
    plan |= {"seed": 0, "answer_seed": 1}

    def conversation(*, room=None, keep=False, last=False):
        writing = Writing(keep_system_prompts=keep, longest_before=room, answer_last=last, **plan)
        return Sample(0, writing).begin(chat, max_prompt_tokens=None)

    def write(conversation, *texts):
        for text in texts:
            assert conversation.waiting
            conversation.answer(Answer([*chat.encode(text), *chat.stop_ids], "stop"))

    whole = conversation(keep=True)
    seeds = [whole.seed]
    for text in ("First question?", "An answer.", "Second question?", "Another.", "Third question?"):
        write(whole, text)
        seeds.append(whole.seed)
    assert not whole.waiting and len(set(seeds)) == 6
    assert [each["role"] for each in whole.result["messages"]] == ["system", *["user", "assistant"] * 2, "user"]
    assert whole.result["ended"] is None and whole.result["refused"] is None
    answered = conversation(last=True)
    write(answered, "First question?", "An answer.", "Second question?", "Another.", "Third question?", "A last one.")
    roles = [each["role"] for each in answered.result["messages"]]
    assert not answered.waiting and roles == ["user", "assistant", "user", "assistant", "user"]
    prompt = {"id": prompt_id(0), "source": "target", "license": None, "messages": answered.result["messages"]}
    options = {"seed": 1, "max_prompt_tokens": None, "on_length": "keep"}
    dialogue = AnsweredPrompt(prompt, answered.result["answers"]).begin(chat, **options)
    assert not dialogue.waiting and [each["content"] for each in dialogue.rows[0].messages] == [
        "First question?", "An answer.", "Second question?", "Another.", "Third question?", "A last one.",
    ]  # fmt: skip
    changed = [prompt["messages"][0], prompt["messages"][1], {"role": "user", "content": "Another question?"}]
    dialogue = AnsweredPrompt(prompt | {"messages": changed}, answered.result["answers"]).begin(chat, **options)
    assert dialogue.waiting and dialogue.turn == 1  # the answer to what the prompts stage has changed is made again
    unanswered = conversation(last=True)
    write(unanswered, "First question?", "An answer.", "Second question?", "Another.", "Third question?")
    unanswered.fail("no server answers")
    assert not unanswered.waiting and len(unanswered.result["answers"]) == 2 and not unanswered.result["failed"]
    early = conversation()
    write(early, "First question?", "An answer.", "Ok?")
    assert not early.waiting and early.result["ended"] == TINY and early.result["refused"] is None
    assert [each["content"] for each in early.result["messages"]] == ["First question?", "An answer."]
    bad = conversation()
    write(bad, "Ok?")
    assert not bad.waiting and bad.result["refused"] == TINY and bad.result["ended"] is None
    cut = conversation()
    write(cut, "First question?")
    cut.answer(Answer(chat.encode("An answer that"), "length"))
    assert not cut.waiting and [each["role"] for each in cut.result["messages"]] == ["user"] and cut.result["ended"]
    narrow = conversation(room=len(first_user_turn(chat, SYSTEM).header))
    write(narrow, "First question?", "An answer.")
    assert not narrow.waiting and narrow.result["ended"] == NO_ROOM
