"""Prompts that heads are measured on: those that training held out, and conversations of any shape."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from exported_head import FINGERPRINT, origin_of, tiny_chat
from stores import TARGET_CONFIG, grow_store, open_store, random_samples

from eagle3.errors import InputError
from eagle3.features.split import split_fraction
from eagle3.serving.check.accept_length import Measurer
from eagle3.serving.check.prompts import file_prompts, longest_prompt, prompt_source, validation_prompts
from eagle3.settings.serving import PromptFile
from eagle3.storage.files import write_jsonl


def test_validation_prompts_are_the_prompt_parts_of_the_lowest_shares(store_path: Path) -> None:
    features = open_store(store_path)
    samples = [features.read(ref) for ref in features.samples]
    samples = sorted(
        (sample for sample in samples if sample.turns[0] == 0), key=lambda sample: split_fraction(sample.id)
    )
    expected = [sample.input_ids[: sample.turns.tolist().index(1)].tolist() for sample in samples]
    below = sum(split_fraction(sample.id) < 0.5 for sample in samples)
    store = origin_of(FINGERPRINT, TARGET_CONFIG, path=str(store_path), hash=features.fingerprint, val_fraction=0.5)
    assert validation_prompts(store, limit=3, max_length=99).prompts == expected[:3]
    assert validation_prompts(store, limit=3, max_length=99).from_validation
    assert validation_prompts(store, limit=None, max_length=99).prompts == expected[:below]
    with pytest.raises(InputError, match="is no longer the store of the training"):
        validation_prompts(replace(store, hash="other"), limit=3, max_length=99)


def test_validation_prompts_are_those_of_the_training_where_the_store_has_gained_samples(store_path: Path) -> None:
    features = open_store(store_path)
    shards = features.samples.shards_by_store()
    facts = {"path": str(store_path), "hash": features.fingerprint, "shards": shards, "val_fraction": 0.5}
    store = origin_of(FINGERPRINT, TARGET_CONFIG, **facts)
    before = validation_prompts(store, limit=None, max_length=99).prompts
    grow_store(store_path, random_samples(90)[60:])
    assert validation_prompts(store, limit=None, max_length=99).prompts == before
    grown = open_store(store_path)
    store = replace(store, hash=grown.fingerprint, shards=grown.samples.shards_by_store())
    assert len(validation_prompts(store, limit=None, max_length=99).prompts) > len(before)


def test_prompts_of_every_shape_are_measured_up_to_the_first_user_turn(
    make_measurer: Callable[..., Measurer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]},
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]},
        {"turns": ["Hi", "And then?"]},
        {"prompt": "Hi"},
        {"messages": [{"role": "tool", "content": "Hi"}]},
        {"prompt": "word " * 4096},
    ]
    write_jsonl(tmp_path / "rows.jsonl", rows)
    source = prompt_source(PromptFile(path=str(tmp_path / "rows.jsonl"), split=None, fields={}))
    measurer = make_measurer(source=source, limit=None)
    found = measurer.prompts(None)
    assert found.prompts == [measurer.chat.prompt_ids([{"role": "user", "content": "Hi"}])] * 4
    assert sorted(found.left_out.values()) == [1, 1]
    assert "no user turn" in found.left_out
    assert found.origin == f"prompts.path={tmp_path}/rows.jsonl"
    monkeypatch.chdir(tmp_path)
    assert measurer.prompts(None).origin == "prompts.path=rows.jsonl"


def test_prompts_of_a_file_are_rendered_with_their_own_variables_and_tools(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}{{ 'Think:' if thinking }}"
    (tmp_path / "modes.jinja").write_text(template + "{{ tools[0].function.name if tools }}")
    rows = [{"prompt": "Hi"}, {"prompt": "Hi", "chat_template_kwargs": {"thinking": True}}]
    rows += [{"prompt": "Hi", "tools": [{"name": "look_up"}]}]
    write_jsonl(tmp_path / "rows.jsonl", rows)
    source, chat = (
        prompt_source(PromptFile(path=str(tmp_path / "rows.jsonl"), split=None, fields={})),
        tiny_chat(template=str(tmp_path / "modes.jinja")),
    )
    assert source is not None
    found = file_prompts(chat, source, limit=None, max_length=99)
    assert [chat.decode(ids) for ids in found.prompts] == ["Hi<|im_end|>", "Hi<|im_end|>Think:", "Hi<|im_end|>look_up"]


def test_the_longest_prompt_leaves_room_for_its_answer_the_drafts_and_the_token_behind_them() -> None:
    assert longest_prompt(100, max_new_tokens=20, steps=7) == 100 - 20 - 7 - 1
    with pytest.raises(InputError, match=r"max_new_tokens=20 and 7 drafts leave no room .* context of 28 tokens; set"):
        longest_prompt(28, max_new_tokens=20, steps=7)


def test_a_column_of_the_users_choice_groups_the_prompts(tmp_path: Path) -> None:
    """As SPEED-Bench's categories, in its columns: `source` is there too, and says something else."""
    rows = [
        {"question_id": str(number), "category": category, "turns": [f"Question {number}", "And then?"], "source": web}
        for number, (category, web) in enumerate([("coding", "a"), ("math", "a"), ("math", "b")])
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "test.parquet")

    def sources(**fields: str) -> list[str]:
        source = prompt_source(PromptFile(path=str(tmp_path / "test.parquet"), split=None, fields=fields))
        assert source is not None
        return file_prompts(tiny_chat(), source, limit=None, max_length=99).sources

    assert sources(source="category") == ["coding", "math", "math"]
    assert sources() == ["a", "a", "b"]
    with pytest.raises(InputError, match=r"prompts\.fields=\{source: categry\}: no prompt of .*test\.parquet has that"):
        sources(source="categry")
