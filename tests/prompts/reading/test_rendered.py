"""Conversations that a template has already rendered are refused, in any column; questions about them are not."""

from itertools import product

import pytest
from prompt_stage import chat, read_messages, users
from stores import ASSETS
from transformers import AutoTokenizer

from eagle3.prompts import Refused
from eagle3.prompts.reading.prompt import Prompt
from eagle3.prompts.reading.rendered import (
    CONTROL_TOKEN,
    MARKERS,
    RENDERED,
    SIGNS,
    TargetMarkers,
    TargetMarkersCheck,
    is_rendered,
)

TEMPLATES = sorted((ASSETS / "templates").glob("*.jinja"))
RAIN = [*users("Why is rain wet?"), {"role": "assistant", "content": "It is water."}, *users("Why?")]


def test_what_a_template_renders_is_recognised():
    tokenizer = AutoTokenizer.from_pretrained(ASSETS / "tiny")
    for template, turns in product(TEMPLATES, (RAIN[:1], RAIN[:2], RAIN)):
        tokens = {"bos_token": "<s>", "eos_token": "</s>"}
        asks = turns[-1]["role"] == "user"
        text = tokenizer.apply_chat_template(
            turns, chat_template=template.read_text(), tokenize=False, add_generation_prompt=asks, **tokens
        )
        assert is_rendered(text, is_document=False), text


@pytest.mark.parametrize("column", ["prompt", "input", "query", "text", "messages"])
def test_a_rendered_conversation_is_refused_whatever_its_column(column):
    for text in [
        "<|user|>\nWhy?</s>\n<|assistant|>\nSo.</s>",
        "<|system|>\nBe brief.<|end|>\n<|user|>\nWhy?<|end|>\n<|assistant|>\n",
        "<|im_system|>system<|im_middle|>Be brief.<|im_end|><|im_user|>user<|im_middle|>Why?<|im_end|>",
        "<|start_of_role|>user<|end_of_role|>Why?<|end_of_text|>\n<|start_of_role|>assistant<|end_of_role|>",
        "<|begin_of_text|><|header_start|>user<|header_end|>\n\nWhy?<|eot|>",
        "<bos><|turn>user\nWhy?<turn|>\n<|turn>model\n",
        "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nWhy? [/INST] So. </s>",
        "[SYSTEM_PROMPT]Be brief.[/SYSTEM_PROMPT][INST]Why?[/INST]",
        "[|user|]Why?\n[|assistant|]",
        "A chat between a user and an assistant. USER: Why? ASSISTANT: So.</s>",
        "USER: Why? ASSISTANT:",
        "### Instruction\nWhy?\n\n### Response\n",
        "User: Why?\nAssistant:",
        "Human:Why?\nAssistant:",
        "[Round 1]\n\n问\uff1aWhy?\n\n答\uff1a",
        "<用户>Why?<AI>",
        "<reserved_106>Why?<reserved_107>",
        "<|begin_of_sentence|>User: Why?\nAssistant: ",
        "User: Why?\nFalcon:",
        "<human>: Why?\n<bot>:",
        "Instruct: Why?\nOutput:",
        "system\nBe brief.\nuser\nWhy?\nassistant\n",
        "Below is an instruction.\n\n### Instruction:\nWhy?\n\n### Response:",
        "### User:\nWhy?\n\n### Assistant:\nSo.",
        "<|prompter|>Why?<|endoftext|><|assistant|>So.<|endoftext|>",
        "<|prompt|>Why?</s><|answer|>",
        "<|userprompt|>Why?<|endofuserprompt|><|response|>",
        "<|Human|>: Why?<eoh>\n<|MOSS|>: So.<eom>",
        "<|bom|><|system|> Be brief.<|eom|><|bom|><|user|> Why?<|eom|><|bom|><|assistant|>",
        "A talk.\n[|Human|] Why?\n[|AI|] So.",
        "<SPECIAL_10>System\n\n<SPECIAL_11>User\nWhy?\n<SPECIAL_11>Assistant\n<think>",
        "<role>HUMAN</role>Why?<role>ASSISTANT</role>",
        "[Round 0] USER:Why? ASSISTANT:",
        "<_user>Why?<_bot>",
        "<C_Q>Why?<C_A>",
        "<|begin|>user<|content|>Why?<|end|><|begin|>assistant",
        "Human\uff1aWhy?\nAssistant\uff1a",
        "用户\uff1aWhy?\n助手\uff1aSo.",
        "<|im_start|>user\nSee ```print(1)``` and explain.<|im_end|>\n<|im_start|>assistant\n",
    ]:
        with pytest.raises(Refused, match=RENDERED):
            read_messages({column: users(text) if column == "messages" else text}, keep_answers=False)


def test_a_question_about_markers_stays_a_prompt():
    for text in [
        "What does <|im_start|> do in ChatML?",
        "Is `<|im_start|>user\nhi<|im_end|>` right?",
        "Explain this:\n```\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n```",
        "How do [INST] and [/INST] differ?",
        "Explain <role>admin</role> and <role>assistant</role> in XML.",
        "[Round 1] of the match: who won?",
        "My template has <|prompt|> in it.",
        "Add <|user|> and <|assistant|> to my tokenizer.",
        "<|user|> and <|assistant|> are which model's tokens?",
        "Summarise this chat:\n\nUser: hi\nAssistant: hello\n\nIn one sentence, please.",
        "The fields are\nuser\npassword\nWho is the\nassistant\nthere?",
        "The header of my report is\n### Response:\nWhat else?",
        "Why is it called <s>old</s> here?",
    ]:
        assert read_messages({"prompt": text}, keep_answers=False) == users(text)


def test_an_answer_may_hold_markers():
    row = chat("Show me ChatML.", "<|im_start|>user\nHi<|im_end|>")
    assert read_messages(row, keep_answers=True) == row["messages"]


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ("Please go on.<|im_end|>", (CONTROL_TOKEN, "<|im_end|>")),
        ("Was ist <reserved> hier?", (CONTROL_TOKEN, "<reserved>")),
        ("one ]~b] two", (CONTROL_TOKEN, "]~b]")),
        ("Hi @@ask@@ Ann @@say@@ hello", (RENDERED, None)),
        ("What is `<|im_end|>`?", (None, None)),
        ("Just <b>bold</b>.", (None, None)),
    ],
)
def test_marks_of_the_target_itself_are_refused_by_a_name_of_their_own(text, verdict):
    check = TargetMarkersCheck(TargetMarkers("@@say@@", frozenset(("<|im_end|>", "<reserved>", "]~b]"))))
    found = check(Prompt(id="1", source="s", license="MIT", messages=users(text)))
    assert (found.reason, found.name) == verdict
    answered = [*users("a"), {"role": "assistant", "content": text}]
    assert check(Prompt(id="1", source="s", license="MIT", messages=answered)).reason is None


def test_texts_are_searched_for_each_marker_in_any_case():
    for opened, ended in (("gPt4 correct user: a", "GPT4 Correct Assistant: b"), ("### human: a", "### assistant: b"),
                          ("]~b]user a", "[e~[")):  # fmt: skip
        assert is_rendered(f"{opened}\n{ended}", is_document=False)
    # A text without their signs costs one look, not ten searches.
    assert all(any(sign in opens.lower() for sign in SIGNS) for opens in MARKERS)
