"""What the target writes between turns, by which its own rendered conversations are recognised."""

import pytest
from omegaconf import OmegaConf
from stores import ASSETS, CONF
from transformers import AutoTokenizer

from eagle3.answers.chat import Chat
from eagle3.answers.markers import target_markers
from eagle3.settings.precomputing import ChatSettings

SETTINGS = OmegaConf.to_container(OmegaConf.load(CONF / "chat" / "default.yaml"))


@pytest.mark.parametrize(
    ("template", "between"),
    [
        (None, "<|im_end|>\n<|im_start|>assistant"),
        ("qwen3", "<|im_end|>\n<|im_start|>assistant"),
        ("gemma3", "<end_of_turn>\n<start_of_turn>model"),
        ("deepseekv3", "<\uff5cAssistant\uff5c>"),
    ],
)
def test_the_marks_between_a_question_and_its_answer_are_those_of_the_template(template, between):
    tokenizer = AutoTokenizer.from_pretrained(ASSETS / "tiny")
    path = template and str(ASSETS / "templates" / f"{template}.jinja")
    # The tokenizer is not the template's own, and has no token that ends its turns.
    markers = target_markers(
        Chat(tokenizer, ChatSettings(**{**SETTINGS, "template": path, "stop_tokens": []}), stop_ids=[2])
    )
    assert markers.between == between
    assert {"<|im_start|>", "<|im_end|>"} <= markers.tokens
