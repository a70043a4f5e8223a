"""Names by a model: an ONNX graph that is written here, with the labels of Rampart."""

import json
import os
import pickle
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from privacy_checks import build_privacy, contents, prompt
from prompt_stage import default_settings
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from eagle3.errors import InputError
from eagle3.prompts.privacy.names import TOKENS
from eagle3.prompts.privacy.policy import BY_A_WORD
from eagle3.prompts.rules import Rules
from eagle3.settings.prompts import PromptSettings
from eagle3.settings.types import validated

LABELS = ["O", "B-GIVEN_NAME", "I-SURNAME", "B-CITY", "B-STREET_NAME", "I-STREET_NAME"]
NAMES = {"ada": 1, "lovelace": 2, "london": 3, "elm": 4, "road": 5}
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *NAMES, "my", "name", "is", "i", "live", "in", "at", "the", "x", "."]


def field(number: int, value: int | str | bytes) -> bytes:
    """Return one field in protobuf's wire format."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    data = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(data)) + data


def varint(value: int) -> bytes:
    return bytes([value]) if value < 128 else bytes([value & 127 | 128]) + varint(value >> 7)


def tensor_type(name: str, kind: int, *dims: str) -> bytes:
    shape = b"".join(field(1, field(2, dim)) for dim in dims)
    return field(1, name) + field(2, field(1, field(1, kind) + field(2, shape)))


def lookup_graph(table: np.ndarray) -> bytes:
    """Return an ONNX model whose logits are rows of a table, [words, labels], by the ids of the input."""
    floats, integers = 1, 7
    node = field(1, "table") + field(1, "input_ids") + field(2, "logits") + field(4, "Gather")
    weights = b"".join(field(1, size) for size in table.shape)
    weights += field(2, floats) + field(8, "table") + field(9, table.astype(np.float32).tobytes())
    graph = field(1, node) + field(2, "lookup") + field(5, weights)
    graph += field(11, tensor_type("input_ids", integers, "batch", "tokens"))
    graph += field(12, tensor_type("logits", floats, "batch", "tokens", "labels"))
    return field(1, 8) + field(7, graph) + field(8, field(2, 13))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A model that knows five words."""
    pytest.importorskip("onnxruntime")
    folder = tmp_path_factory.mktemp("model")
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    table = np.zeros((len(WORDS), len(LABELS)))
    table[:, 0] = 9  # sure that it is nothing
    for word, label in NAMES.items():
        table[WORDS.index(word), [0, label]] = 0, 9
    (folder / "config.json").write_text(json.dumps({"id2label": dict(enumerate(LABELS))}))
    (folder / "onnx").mkdir()
    (folder / "onnx" / "model_q4.onnx").write_bytes(lookup_graph(table))
    return folder


def with_model(folder: Path, *overrides: str, policy: str = "strict"):
    return build_privacy("privacy/model=onnx", f"privacy.model.path={folder}", *overrides, policy=policy)


def test_strict_runs_with_a_model_of_persons_and_places_and_says_what_it_does_not_see(folder, caplog):
    strict = with_model(folder)
    in_part = [*BY_A_WORD, "PASSWORD in prose"]
    assert strict.blind_spots() == {"unseen": ["COORDINATES", "ORGANIZATION"], "partly_seen": in_part}
    assert f"NOT detected: COORDINATES, ORGANIZATION; detected only in part: {in_part[0]}" in caplog.text
    assert "add prompts/privacy/model" not in caplog.text
    verdict = strict(prompt("my name is ada lovelace . i live at elm road in london"))
    assert verdict.reason == "personal data: LOCATION, PERSON, STREET_ADDRESS"
    assert verdict.counts == {"PERSON": 1, "STREET_ADDRESS": 1, "LOCATION": 1}
    assert strict(prompt("my name is x")).reason is None


def test_strict_refuses_a_model_that_is_not_asked_for_places(folder):
    with pytest.raises(InputError, match=r"model=incomplete: the strict policy needs a model that sees LOCATION"):
        with_model(folder, "~privacy.model.actions.LOCATION")


def test_what_a_model_takes_for_a_name_is_hashed_as_an_id_and_stays_as_a_source_to_credit(folder):
    strict = with_model(folder)
    assert len(strict.safe_id("ada")) == len(strict.safe_source("ada@web.de")) == 16
    assert strict.safe_source("ada") == "ada"


def test_each_entity_of_a_model_has_its_own_action_and_tokens_below_the_threshold_do_not_count(folder):
    actions = ("privacy.model.actions.PERSON=mask", "privacy.model.actions.LOCATION=keep")
    text = prompt("my name is ada and i live in london")
    verdict = with_model(folder, *actions)(text)
    assert contents(verdict.prompt) == ["my name is <PERSON> and i live in london"]
    assert verdict.counts == {"PERSON": 1, "LOCATION": 1}
    assert with_model(folder, "privacy.model.threshold=1")(text).counts == {}


def test_tokens_of_one_entity_are_one_mask_and_long_texts_are_read_whole(folder):
    masking = with_model(folder, *(f"privacy.model.actions.{each}=mask" for each in ("PERSON", "LOCATION")))
    filler = "the x " * 10 * TOKENS
    text = f"ada lovelace {filler}ada lovelace {filler}london"
    masked = contents(masking(prompt(text)).prompt)
    assert masked == [text.replace("ada lovelace", "<PERSON>").replace("london", "<LOCATION>")]


def test_a_name_in_the_overlap_of_two_pieces_counts_once(folder):
    strict = with_model(folder)
    for before in range(TOKENS - 40, TOKENS + 4):
        assert strict(prompt("x " * before + "ada" + " x" * 60)).counts == {"PERSON": 1}


def test_a_model_that_changed_in_its_place_makes_the_prompts_again(folder):
    rules = Rules(validated(PromptSettings, default_settings() | {"path": "."}), privacy=with_model(folder))
    before = rules.inputs()
    assert rules.inputs() == before
    os.utime(folder / "onnx" / "model_q4.onnx", (1, 1))
    assert rules.inputs() != before


def test_a_model_goes_to_another_process_unloaded_and_works_there(folder):
    data = pickle.dumps(with_model(folder))
    assert len(data) < 20_000
    assert pickle.loads(data)(prompt("my name is ada")).reason == "personal data: PERSON"


def test_a_folder_that_is_no_fitting_model_is_refused_before_any_row_is_read(folder, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(folder, model)
    (model / "config.json").write_text('{"id2label": {"0": "O", "1": "B-PER"}}')
    with pytest.raises(InputError, match=r"does not know LOCATION, STREET_ADDRESS \(its labels: B-PER, O\)"):
        with_model(model)
    (model / "tokenizer.json").unlink()
    with pytest.raises(InputError, match=r"model\.path=.* has no tokenizer\.json; .* as prompts\.privacy\.model\.file"):
        with_model(model)


def test_a_library_that_is_missing_is_named_with_its_extra(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(InputError, match=r"prompts/privacy/model=onnx needs the package onnxruntime; .*'\.\[onnx\]'"):
        with_model(tmp_path)
