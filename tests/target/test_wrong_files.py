"""A damaged or hand-edited file of a target is one line, or harmless: never a traceback, whatever is wrong with it."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chats import SETTINGS
from wrong_json import TEXTS, mutations, one_printable_line

from eagle3.answers.chat import Chat
from eagle3.errors import InputError
from eagle3.settings.precomputing import ChatSettings
from eagle3.target.stored import stored_target
from eagle3.target.tensors import INDEX

EVERY = int(os.environ.get("EVERY_FAULT", "5"))  # all: EVERY_FAULT=1 python -m pytest FILE
LANGUAGE: dict[str, Any] = {"hidden_size": 192, "num_hidden_layers": 8, "dtype": "bfloat16"}
MORE: dict[str, dict[str, Any]] = {
    "config.json": {
        "text_config": LANGUAGE, "quantization_config": {"quant_method": "fp8"}, "cache_implementation": "dynamic",
        "rope_scaling": {"rope_type": "linear", "factor": 2.0}, "layer_types": ["full_attention"] * 8,
    },
    "generation_config.json": {"eos_token_id": [2], "cache_implementation": None, "temperature": 0.7},
    "tokenizer_config.json": {"model_max_length": 4096, "chat_template": "{{ messages[0]['content'] }}"},
    INDEX: {"metadata": {}, "weight_map": {"model.embed_tokens.weight": "model.safetensors"}},
}  # fmt: skip


@pytest.fixture
def target_copy(tiny_path: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_path, tmp_path / "target"))


def faults(file: str, content: str | None) -> Iterator[tuple[str, str]]:
    start = json.loads(content) if content else {}
    for name, changed in mutations(start):
        yield name, json.dumps(changed)
    for key, value in MORE[file].items():
        for name, changed in mutations({key: value}):
            yield f"with {name}", json.dumps(start | changed)
    for text in TEXTS:
        yield f"text {text[:12]}", text


@pytest.mark.parametrize("file", MORE)
def test_no_wrong_value_in_a_file_is_a_traceback(file, target_copy):
    place = target_copy / file
    all_faults = [*faults(file, place.read_text() if place.exists() else None)]
    for name, text in [*all_faults[::EVERY], *all_faults[-len(TEXTS) :]]:
        place.write_text(text, encoding="latin-1")
        try:
            read(target_copy)
        except InputError as error:
            assert one_printable_line(error), (name, str(error))
        except Exception as error:
            raise AssertionError(name) from error


def read(folder: Path) -> None:
    files = stored_target(path=str(folder))
    assert files.identity and files.facts and files.embedding is not None
    chat = Chat(files.tokenizer, ChatSettings(**SETTINGS | {"reasoning_parser": None}), stop_ids=files.stop_ids)
    chat.prompt_ids([{"role": "user", "content": "Hello."}])


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("config.json", '{"text_config": [1]}', r"config\.json: text_config=\[1\]: .*dictionary"),
        ("config.json", '{"num_hidden_layers": 99999}', r"config\.json: num_hidden_layers=99999: .*less than"),
        ("generation_config.json", '{"eos_token_id": "</s>"}', r"eos_token_id\S*='</s>': .*integer"),
        ("tokenizer_config.json", '{"model_max_length": "x"}', r"tokenizer_config\.json: model_max_length='x': "),
        (INDEX, '{"weight_map": {"a": "../b.safetensors"}}', rf"{INDEX}: weight_map\.a='\.\./b\.safetensors': "),
    ],
)
def test_a_wrong_value_is_named_with_file_key_and_rule(file, text, message, target_copy):
    place = target_copy / file
    whole = json.loads(place.read_text()) if place.exists() else {}
    place.write_text(json.dumps(whole | json.loads(text)))
    with pytest.raises(InputError, match=message):
        read(target_copy)
