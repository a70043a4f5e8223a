"""Prompts that heads are measured on: those that training held out, and conversations of any shape."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from exported_head import FINGERPRINT, make_origin, tiny_chat, tiny_target
from stores import TARGET_CONFIG, grow_store, open_store, random_samples
from transformers import LlamaConfig

from eagle3.answers.chat import RefusedConversation
from eagle3.decoding.speculate import Decoded, Measurement, plain_greedy
from eagle3.errors import InputError
from eagle3.features.split import split_fraction
from eagle3.head_files.files import read_files
from eagle3.prompts import Source
from eagle3.serving.check.prompts import (
    file_conversations,
    longest_prompt,
    prompt_source,
    validation_prompts,
    with_history,
)
from eagle3.serving.check.turns import first_turn
from eagle3.settings.serving import PromptFile
from eagle3.storage.files import write_jsonl


def talk(*texts: Any) -> list[dict[str, Any]]:
    """A question, an answer, and so on; an answer that is None is lacking."""
    roles = ("user", "assistant")
    turns = [{"role": roles[number % 2], "content": text} for number, text in enumerate(texts)]
    return [turn for turn in turns if turn["content"] is not None]


def test_validation_prompts_are_the_tokens_before_each_answer_of_the_lowest_shares(store_path):
    features = open_store(store_path)
    samples = [features.read(ref) for ref in features.samples]
    samples = sorted(
        (sample for sample in samples if sample.turns[0] == 0), key=lambda sample: split_fraction(sample.id)
    )
    expected = [
        [sample.input_ids[: sample.turns.tolist().index(turn)].tolist() for turn in (1, 2) if turn in sample.turns]
        for sample in samples
    ]
    assert {len(prompts) for prompts in expected} == {1, 2}
    below = sum(split_fraction(sample.id) < 0.5 for sample in samples)
    store = make_origin(FINGERPRINT, TARGET_CONFIG, path=str(store_path), hash=features.fingerprint, val_fraction=0.5)
    first: Any = {"turns": "first", "max_length": 99}
    assert validation_prompts(store, limit=3, **first).prompts == [prompts[0] for prompts in expected[:3]]
    assert validation_prompts(store, limit=3, **first).from_validation
    assert validation_prompts(store, limit=None, **first).prompts == [prompts[0] for prompts in expected[:below]]
    every = validation_prompts(store, limit=None, turns="all", max_length=99)
    assert every.prompts == [ids for prompts in expected[:below] for ids in prompts]
    assert every.conversations == [number for number, prompts in enumerate(expected[:below]) for _ in prompts]
    with pytest.raises(InputError, match="is no longer the store of the training"):
        validation_prompts(replace(store, hash="other"), limit=3, **first)


def test_validation_prompts_are_those_of_the_training_where_the_store_has_gained_samples(store_path):
    features = open_store(store_path)
    shards = features.samples.shards_by_store()
    facts = {"path": str(store_path), "hash": features.fingerprint, "shards": shards, "val_fraction": 0.5}
    store = make_origin(FINGERPRINT, TARGET_CONFIG, **facts)
    before = validation_prompts(store, turns="all", limit=None, max_length=99).prompts
    grow_store(store_path, random_samples(90)[60:])
    assert validation_prompts(store, turns="all", limit=None, max_length=99).prompts == before
    grown = open_store(store_path)
    store = replace(store, hash=grown.fingerprint, shards=grown.samples.shards_by_store())
    assert len(validation_prompts(store, turns="all", limit=None, max_length=99).prompts) > len(before)


ROWS = [
    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]},
    {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]},
    {"turns": ["Hi", "And then?"]},
    {"prompt": "Hi"},
    {"messages": [{"role": "tool", "content": "Hi"}]},
    {"prompt": "word " * 4096},
]


def write_source(folder: Path, rows: list[dict]) -> Source:
    write_jsonl(folder / "rows.jsonl", rows)
    source = prompt_source(PromptFile(path=str(folder / "rows.jsonl"), config=None, split=None, fields={}, turns="all"))
    assert source is not None
    return source


def test_prompts_of_every_shape_are_measured_turn_by_turn_or_only_the_first(make_measurer, tmp_path, monkeypatch):
    measurer = make_measurer()
    asked = partial(file_conversations, measurer.chat, write_source(tmp_path, ROWS), limit=None, max_length=99)
    found = replace(measurer, asked=asked(turns="first")).prompts(None)
    first = measurer.chat.prompt_ids(talk("Hi"))
    assert (found.prompts, found.conversations, found.turns) == ([first] * 4, [0, 1, 2, 3], "first")
    assert sorted(found.left_out.values()) == [1, 1]
    assert "no user turn" in found.left_out
    assert found.origin == f"prompts.path={tmp_path}/rows.jsonl"
    monkeypatch.chdir(tmp_path)
    every = replace(measurer, asked=asked(turns="all")).prompts(None)
    assert every.origin == "prompts.path=rows.jsonl"
    assert (every.prompts[:3], every.prompts[4:]) == ([first] * 3, [first])
    assert (every.conversations, every.turns, every.left_out) == ([0, 1, 2, 2, 3], "all", found.left_out)


def test_a_later_prompt_has_the_targets_greedy_answer_where_the_row_has_none(make_measurer, tmp_path, caplog):
    rows = [{"turns": ["Hi", "And then?", "Why?"]}, {"turns": ["Name a colour.", "Another."]}, {"prompt": "Hi"}]
    measurer = make_measurer()
    source = write_source(tmp_path, rows)
    asked = file_conversations(measurer.chat, source, turns="all", limit=None, max_length=measurer.room)
    found = replace(measurer, asked=asked).prompts(None)
    assert found.conversations == [0, 0, 0, 1, 1, 2]
    expected = []
    for row in rows:
        texts: list[str] = []
        for question in row.get("turns", [row.get("prompt")]):
            texts.append(question)
            expected.append(measurer.chat.prompt_ids(talk(*texts)))
            answer = plain_greedy(measurer.target, expected[-1], 6)
            texts.append(measurer.chat.answer_text(expected[-1], answer) or "")
    assert found.prompts == expected
    assert "2 of 2 answers that later prompts need were cut at max_new_tokens=6" in caplog.text


def test_answers_of_the_row_are_the_history_as_they_are(tmp_path):
    texts = ("Hi", "Ho", "And then?", "<think>Hm.</think>\n\nThis.", "Why?", "Because.")
    rows = [{"messages": talk(*texts)}, {"messages": talk("Hi", [{"type": "image"}], "And then?")}]
    chat = tiny_chat(reasoning_parser=["<think>", "</think>"])
    found = file_conversations(chat, write_source(tmp_path, rows), turns="all", limit=None, max_length=999)
    first, lacking = found.first
    assert lacking.needs_answer and not first.needs_answer
    prompts = with_history(replace(tiny_target(), model=None), replace(found, first=[first]), max_new_tokens=1).prompts
    seen = [*texts[:3], "This.", *texts[4:]]  # what a server returns, and a chat sends back
    assert prompts == [chat.prompt_ids(talk(*seen[:count])) for count in (1, 3, 5)]


def test_stored_calls_and_results_of_tools_are_history_too(tmp_path):
    (tmp_path / "tools.jinja").write_text(
        "{{ tools[0].function.name if tools }}{% for m in messages %}{{ m.role }}:{{ m.content }}"
        "{% for call in m.tool_calls or [] %}{{ call.function.arguments.x }}{% endfor %}<|im_end|>{% endfor %}"
    )
    call = {"function": {"name": "look_up", "arguments": {"x": "sky"}}}
    messages = [*talk("Hi"), {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "blue"}]
    rows = [{"messages": [*messages, *talk("Then?")], "tools": [{"name": "look_up"}]}]
    chat = tiny_chat(template=str(tmp_path / "tools.jinja"))
    found = file_conversations(chat, write_source(tmp_path, rows), turns="all", limit=None, max_length=999)
    asked = found.first[0].following([])
    assert asked is not None and asked.needs_answer  # what the target makes of the result
    assert chat.decode(asked.ids) == "look_upuser:Hi<|im_end|>assistant:sky<|im_end|>tool:blue<|im_end|>"
    with pytest.raises(RefusedConversation, match="names a tool of the conversation"):
        asked.following(chat.encode("look_up again"))


def test_a_conversation_ends_before_a_prompt_that_cannot_be_made_and_the_reason_is_counted(tmp_path):
    rows = [{"messages": talk("Hi", "Ho", "word " * 999, "So.", "And then?")}, {"prompt": "Hi"}]
    chat = tiny_chat(reasoning_parser=["<think>", "</think>"])
    found = file_conversations(chat, write_source(tmp_path, rows), turns="all", limit=None, max_length=200)
    prompts = with_history(tiny_target(), found, max_new_tokens=1)
    assert prompts.conversations == [0, 1]
    assert prompts.left_out == {
        "later turns: empty, or longer than the target's context less the answer: 200 tokens": 1
    }
    lacking = first_turn(chat, {"messages": talk("Hi", None, "And then?")}, "all", 999)
    with pytest.raises(RefusedConversation, match="has no content that a server would put into the next prompt"):
        lacking.following(chat.encode("<think>Hm"))


def test_answers_of_all_turns_are_lossless_and_the_error_is_over_conversations(make_measurer, exported, tmp_path):
    rows = [{"turns": ["Hi", "And then?"]}, {"prompt": "Name a colour."}, {"turns": ["Why?", "How?"]}]
    measurer = make_measurer()
    asked = file_conversations(measurer.chat, write_source(tmp_path, rows), turns="all", limit=2, max_length=99)
    prompts = replace(measurer, asked=asked).prompts(None)
    result = measurer.measured(read_files(exported), prompts, lossless=True)
    assert result.lossless == 1.0
    assert (result.prompts, result.conversations, result.turns) == (3, 2, "all")
    where = f"3 prompts of 2 conversations (prompts.path={tmp_path}/rows.jsonl, prompts.turns=all"
    assert measurer.finding(result, None).message.endswith(f"{where})")
    fewer = replace(result, left_out={"no user turn": 4})
    assert measurer.finding(fewer, None).message.endswith(f"{where}, left out: 4 (no user turn))")
    decoded = Measurement([Decoded([5] * 4, 3, [accepted, 0], 0, "length") for accepted in (2, 1, 0)], 1.0, 1.0)
    # Without one conversation or the other: 1 + 0 / 3 and 1 + 3 / 6.
    assert measurer.summary(decoded, prompts).standard_error == pytest.approx(0.25)


def test_prompts_of_a_file_are_rendered_with_their_own_variables_and_tools(tmp_path):
    template = "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}{{ 'Think:' if thinking }}"
    (tmp_path / "modes.jinja").write_text(template + "{{ tools[0].function.name if tools }}")
    rows = [{"prompt": "Hi"}, {"prompt": "Hi", "chat_template_kwargs": {"thinking": True}}]
    rows += [{"prompt": "Hi", "tools": [{"name": "look_up"}]}]
    source, chat = write_source(tmp_path, rows), tiny_chat(template=str(tmp_path / "modes.jinja"))
    found = file_conversations(chat, source, turns="all", limit=None, max_length=99)
    texts = ["Hi<|im_end|>", "Hi<|im_end|>Think:", "Hi<|im_end|>look_up"]
    assert [chat.decode(turn.ids) for turn in found.first] == texts


def test_the_longest_prompt_leaves_room_for_its_answer_the_drafts_and_the_token_behind_them():
    def longest(context: int) -> int:
        return longest_prompt(LlamaConfig(max_position_embeddings=context), max_new_tokens=20, steps=7)

    assert longest(100) == 100 - 20 - 7 - 1
    with pytest.raises(InputError, match=r"max_new_tokens=20 and 7 drafts leave no room .* context of 28 tokens; set"):
        longest(28)


def test_a_column_of_the_users_choice_groups_the_prompts(tmp_path):
    """As SPEED-Bench's categories, in its columns: `source` is there too, and says something else."""
    rows = [
        {"question_id": str(number), "category": category, "turns": [f"Question {number}", "And then?"], "source": web}
        for number, (category, web) in enumerate([("coding", "a"), ("math", "a"), ("math", "b")])
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "test.parquet")

    def sources(**fields: str) -> list[str]:
        path = str(tmp_path / "test.parquet")
        source = prompt_source(PromptFile(path=path, config=None, split=None, fields=fields, turns="first"))
        assert source is not None
        return file_conversations(tiny_chat(), source, turns="first", limit=None, max_length=99).sources

    assert sources(source="category") == ["coding", "math", "math"]
    assert sources() == ["a", "a", "b"]
    with pytest.raises(InputError, match=r"prompts\.fields=\{source: categry\}: no prompt of .*test\.parquet has that"):
        sources(source="categry")
