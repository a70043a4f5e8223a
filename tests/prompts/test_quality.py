"""Rules about the text, lengths in tokens, rows of token ids, and text that was decoded wrongly."""

from importlib.util import find_spec
from pathlib import Path

import pytest
from prompt_stage import Prepare, chat, prepare, reasons
from stores import ROOT
from transformers import AutoTokenizer

from eagle3.errors import InputError
from eagle3.prompts.quality import UnicodeRepair
from eagle3.prompts.reading.prompt import Prompt

__all__ = ["prepare"]
TINY = ROOT / "tests" / "assets" / "tiny"
QUESTION = "Why does the sky look blue at noon and red in the evening?"


@pytest.mark.parametrize(
    ("bounds", "text", "reason"),
    [
        ({"max_repeated_lines": 0.3}, f"{QUESTION}\nyes\nyes\nyes\n", "too many repeated lines"),
        ({"max_repeated_words": 0.3}, "one two three four five " * 4, "too many repeated words"),
        ({"min_words_with_letters": 0.5}, "what is 1 2 3 4 5 6 7", "too few words with letters"),
        ({"max_word_characters": 100}, f"what is {'QUJD' * 40}", "a word too long"),
        ({"max_control_characters": 0.01}, "what\x00 is \ufffd this", "too many control characters"),
    ],
)
def test_a_bound_refuses_what_is_past_it_and_nothing_without_it(
    prepare: Prepare, bounds: dict, text: str, reason: str
) -> None:
    assert prepare([chat(QUESTION), chat(text)])["prompts"] == 2
    ledger = prepare([chat(QUESTION), chat(text)], quality=bounds)
    assert ledger["sources"]["chats"]["rejected"] == {reason: 1}


def test_lengths_are_counted_in_the_targets_tokens(prepare: Prepare) -> None:
    texts = [QUESTION, "short", QUESTION * 20]
    counts = [len(AutoTokenizer.from_pretrained(TINY).encode(text, add_special_tokens=False)) for text in texts]
    bounds = {"min_tokens": counts[1] + 1, "max_tokens": counts[0]}
    prepare([chat(text) for text in texts], length=bounds, tokenizer=str(TINY))
    assert reasons(prepare) == [f"fewer than {counts[1] + 1} tokens", f"more than {counts[0]} tokens"]


def test_rows_of_token_ids_are_the_text_that_the_tokenizer_says(prepare: Prepare) -> None:
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    chatted = tokenizer.apply_chat_template([{"role": "user", "content": "a"}], return_dict=False)
    rows = [
        {"license": "MIT", "input_ids": ids}
        for ids in (tokenizer.encode(QUESTION, add_special_tokens=False), chatted, [1 << 30], [])
    ]
    prepare(rows, tokenizer=str(TINY))
    assert [prompt["messages"] for prompt in prepare.prompts()] == [[{"role": "user", "content": QUESTION}]]
    refused = "token ids that are no plain text of prompts.tokenizer"
    assert reasons(prepare) == [refused, refused, "no column of messages or prompts"]


def test_a_folder_without_a_tokenizer_is_told(prepare: Prepare, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"prompts\.tokenizer=.* has no tokenizer\.json that can be read"):
        prepare([chat("a")], tokenizer=str(tmp_path))


def test_text_that_was_decoded_wrongly_is_mended_and_counted() -> None:
    """The examples of ftfy's documentation."""
    pytest.importorskip("ftfy")
    texts = {"âœ” No problems": "✔ No problems", "l’humanitÃ©": "l’humanité", "&lt;b&gt; déjà vu": "&lt;b&gt; déjà vu"}  # noqa: RUF001
    for broken, whole in texts.items():
        prompt = Prompt(id="1", source="s", license=None, messages=[{"role": "user", "content": broken}])
        found = UnicodeRepair()(prompt)
        assert found.counts == ({"repaired": 1} if broken != whole else {})
        assert (found.prompt or prompt).messages == [{"role": "user", "content": whole}]


@pytest.mark.skipif(find_spec("ftfy") is not None, reason="ftfy is installed")
def test_a_missing_library_is_told_before_a_row_is_read(prepare: Prepare) -> None:
    with pytest.raises(InputError, match=r"prompts\.quality\.repair_unicode.*\[unicode\]"):
        prepare([chat("a")], quality={"repair_unicode": True})
