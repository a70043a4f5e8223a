"""The scripts of docs/how-to/moving.md, with rows as the other projects write them, over the templates of families."""

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
from chats import SETTINGS, TEMPLATES, assistant, make_tokenizer, user
from page_commands import blocks
from prompt_stage import read_messages, write
from stores import ASSETS, ROOT

from eagle3.answers.chat import Chat
from eagle3.answers.imported import AnswerRow, answer_rows
from eagle3.prompts.reading.prompt import Refused
from eagle3.settings.precomputing import ChatSettings

Row = dict[str, Any]
SYSTEM = {"role": "system", "content": "Answer in French."}
THOUGHT = "Easy: two and two."


def build_chat(family: str) -> Chat:
    tokenizer = make_tokenizer(family)
    tokenizer.chat_template = (ASSETS / f"templates/{family}.jinja").read_text()
    return Chat(tokenizer, ChatSettings(**SETTINGS), stop_ids={tokenizer.eos_token_id})


def converted(
    script: str,
    chat: Chat,
    rows: list[Row],
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> tuple[list[Row], str]:
    """Run a script of the page; what it prints, and its words on what it left out."""
    [block] = [each for each in blocks(ROOT / "docs/how-to/moving.md") if each.title == f"team/{script}.py"]
    (folder / f"{script}.py").write_text(block.text)
    chat.tokenizer.save_pretrained(folder / "target")
    monkeypatch.setattr(sys, "argv", [script, str(folder / "target"), str(write(folder / "rows.jsonl", rows))])
    runpy.run_path(str(folder / f"{script}.py"))
    printed = capsys.readouterr()
    return [json.loads(line) for line in printed.out.splitlines()], printed.err


def imported(chat: Chat, row: Row) -> list[AnswerRow]:
    """Read a row as the prompts stage does, and its answers as the answers stage does."""
    return answer_rows(chat.for_prompt(row), read_messages(row, keep_answers=True))


def regenerated(chat: Chat, name: str, talk: list[Row], reasoning: str) -> list[Row]:
    """Write a row for each answer as scripts/response_regeneration/script.py of vllm-project/speculators does at commit
    c05b95b (_sample_from_response): the prompt as a server renders it, `text` with special tokens, no conversation."""
    rows: list[Row] = []
    for place in [place for place, turn in enumerate(talk) if turn["role"] == "assistant"]:
        prompt_ids = chat.prompt_ids(talk[:place])
        answer_ids = chat.encode(reasoning + talk[place]["content"] + TEMPLATES[name][2])
        ids = [*prompt_ids, *answer_ids]
        metadata = {"idx": 0, "finish_reason": "stop", "is_tool_call": False, "usage": {}, "endpoint": "http://x"}
        rows.append(
            {
                "id": f"conv-0_gen{len(rows)}",
                "primary_id": "conv-0",
                "input_ids": ids,
                "loss_mask": [0] * len(prompt_ids) + [1] * len(answer_ids),
                "text": chat.tokenizer.decode(ids, skip_special_tokens=False),
                "metadata": metadata | {"sampling_params": {"temperature": 0}},
            }
        )
    return rows


TALK = [user("Two and two?"), assistant("Four."), user("Sure?"), assistant("Yes!"), user("Why?"), assistant("So.")]


@pytest.mark.parametrize(
    ("family", "system"),
    [("deepseekv3", [SYSTEM]), ("gemma3", [SYSTEM]), ("gptoss", [SYSTEM]), ("llama3", []), ("qwen2_5", []),
     ("qwen3", [])],
)  # fmt: skip
def test_regenerated_rows_of_speculators_keep_their_ids(family, system, tmp_path, capsys, monkeypatch):
    chat = build_chat(family)
    rows = regenerated(chat, family, [*system, *TALK], "<think>\nEasy.\n</think>\n\n" if family == "qwen3" else "")
    [row], said = converted("from_speculators", chat, rows, tmp_path, capsys, monkeypatch)
    assert row["id"] == "conv-0" and said.startswith("0 answers left out")
    asked = [turn["content"] for turn in row["messages"] if turn["role"] == "user"]
    assert [text.rpartition("\n")[2] for text in asked] == ["Two and two?", "Sure?", "Why?"]
    if system:
        assert any(SYSTEM["content"] in turn["content"] for turn in row["messages"][:2])
    answers = imported(chat, row)
    assert [answer.refused for answer in answers] == [None] * 3
    for answer, theirs in zip(answers, rows, strict=True):
        assert answer.prompt_ids + answer.answer_ids == theirs["input_ids"]
        assert len(answer.answer_ids) == sum(theirs["loss_mask"])


@pytest.mark.parametrize("keep_answers", [False, True])
def test_regenerated_rows_of_speculators_are_refused_with_the_page_that_helps(keep_answers):
    for row in regenerated(build_chat("qwen2_5"), "qwen2_5", TALK, ""):
        with pytest.raises(Refused, match=r"row of token ids, as speculators .*docs/how-to/moving\.md"):
            read_messages(row, keep_answers=keep_answers)


def test_regenerated_rows_end_where_a_tool_is_called(tmp_path, capsys, monkeypatch):
    chat = build_chat("qwen2_5")
    rows = regenerated(chat, "qwen2_5", TALK, "")
    rows[1]["metadata"] |= {"is_tool_call": True, "finish_reason": "tool_calls"}
    [row], said = converted("from_speculators", chat, rows, tmp_path, capsys, monkeypatch)
    assert [answer.refused for answer in imported(chat, row)] == [None] and said.startswith("2 answers left out")


@pytest.mark.parametrize("family", ["deepseekv3", "glm4moe", "nemotron_3_nano", "qwen3"])
def test_the_reasoning_of_rows_of_specforge_is_trained(family, tmp_path, capsys, monkeypatch):
    """As scripts/regenerate_train_data.py of sgl-project/SpecForge writes them at commit a6b6b02 with --reasoning save
    (call_sglang)."""
    chat = build_chat(family)
    turns = [{**turn, "reasoning_content": THOUGHT} if turn["role"] == "assistant" else turn for turn in TALK[:4]]
    cuts = [[turns[0], turns[1] | {"content": content}] for content in ("", None)]  # while they reasoned
    rows: list[Row] = [{"conversations": talk} for talk in [*cuts, turns]]
    rows += [rows[-1] | {"status": "error", "error": "Connection error."}]  # of its file of errors
    found, said = converted("from_specforge", chat, rows, tmp_path, capsys, monkeypatch)
    if family == "deepseekv3":
        assert found == [] and said.startswith("4 conversations left out: a failed request, a cut answer, or a chat")
        return
    [row] = found
    assert said.startswith("3 conversations left out")
    for answer, turn in zip(imported(chat, row), turns[1::2], strict=True):
        assert answer.refused is None
        text = chat.decode(answer.answer_ids)
        assert text.count(THOUGHT) == 1 and turn["content"] in text
        assert THOUGHT not in chat.decode(answer.prompt_ids)


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_next_to_the_content_is_refused_with_the_page_that_helps(key):
    row = {"messages": [user("2+2?"), assistant("Four.") | {key: "Easy."}]}
    with pytest.raises(Refused, match=rf"turn with {key} .*docs/how-to/moving\.md"):
        read_messages(row, keep_answers=True)


@pytest.mark.parametrize(
    "completion", ["Four.", [assistant("Four.")], [assistant("Four."), user("Sure?"), assistant("Yes!")]]
)
def test_prompt_and_completion_of_trl_are_read_as_they_are(completion):
    """As docs/source/dataset_formats.md of huggingface/trl has them at commit f2cd577: texts, or lists of turns."""
    row = {"prompt": "2+2?" if isinstance(completion, str) else [user("2+2?")], "completion": completion}
    chat = build_chat("qwen2_5")
    answers = imported(chat, row)
    assert [answer.refused for answer in answers] == [None] * (2 if len(completion) == 3 else 1)
    assert chat.decode(answers[0].answer_ids) == "Four.<|im_end|>"
