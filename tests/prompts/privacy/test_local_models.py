"""Models with labels of their own: an ONNX graph that is written here, and a small GLiNER with random weights."""

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertConfig, PreTrainedTokenizerFast

from eagle3.errors import InputError
from eagle3.prompts.privacy.models.classifiers import TOKENS
from tests.prompts.privacy.test_policy import build_privacy, contents, prompt

LABELS = ["O", "B-GIVEN_NAME", "I-SURNAME", "B-CITY", "B-STREET_NAME", "I-STREET_NAME"]
WORDS = {"ada": 1, "lovelace": 2, "london": 3, "elm": 4, "road": 5}
OTHER = ["my", "name", "is", "i", "live", "in", "at", "the", "x", ".", "person", "password", "street", "address"]


def make_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {word: index for index, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS, *OTHER])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    special = {"unk_token": "[UNK]", "pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=64, **special)


# ONNX


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
def onnx_folder(tmp_path_factory) -> Path:
    pytest.importorskip("onnxruntime")
    folder = tmp_path_factory.mktemp("onnx")
    tokenizer = make_tokenizer()
    table = np.zeros((len(tokenizer), len(LABELS)))
    table[:, 0] = 9  # sure that it is nothing
    for word, label in WORDS.items():
        table[tokenizer.vocab[word], [0, label]] = 0, 9
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"id2label": dict(enumerate(LABELS))}))
    (folder / "onnx").mkdir()
    (folder / "onnx" / "model_q4.onnx").write_bytes(lookup_graph(table))
    return folder


def with_rampart(folder: Path, *overrides: str):
    return build_privacy("privacy/model=rampart", f"privacy.model.path={folder}", *overrides)


def test_an_onnx_graph_finds_names_places_and_streets(onnx_folder):
    rampart = with_rampart(onnx_folder)
    assert rampart.unseen() == ["ORGANIZATION"]
    verdict = rampart(prompt("my name is ada lovelace . i live at elm road in london"))
    assert verdict.counts == {"PERSON": 1, "STREET_ADDRESS": 1, "LOCATION": 1}


def test_tokens_of_one_entity_are_one_mask_and_long_texts_are_read_whole(onnx_folder):
    masking = with_rampart(onnx_folder, *(f"privacy.model.actions.{each}=mask" for each in ("PERSON", "LOCATION")))
    filler = "the x " * TOKENS
    text = f"ada lovelace {filler}ada lovelace {filler}london"
    masked = contents(masking(prompt(text)).prompt)
    assert masked == [text.replace("ada lovelace", "<PERSON>").replace("london", "<LOCATION>")]


def test_tokens_below_the_threshold_do_not_count(onnx_folder):
    assert with_rampart(onnx_folder, "privacy.model.threshold=1")(prompt("my name is ada")).reason is None


def test_an_onnx_folder_without_its_graph_is_refused(onnx_folder):
    with pytest.raises(InputError, match=r"holds no model\.onnx.*prompts\.privacy\.model\.file"):
        with_rampart(onnx_folder, "privacy.model.file=model.onnx")


# GLiNER


@pytest.fixture(scope="module")
def gliner_folder(tmp_path_factory) -> Path:
    """A GLiNER of random weights: at a threshold of 0 it finds something, whatever it is asked."""
    gliner = pytest.importorskip("gliner")
    from safetensors.torch import save_model

    folder = tmp_path_factory.mktemp("gliner")
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["<<ENT>>", "<<SEP>>", "[FLERT]"], special_tokens=True)
    tokenizer.save_pretrained(folder)
    encoder = BertConfig(
        vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=64,
    ).to_dict()  # fmt: skip
    settings = {
        "model_name": "none", "encoder_config": encoder, "hidden_size": 16, "max_len": 32, "max_width": 3,
        "vocab_size": len(tokenizer), "class_token_index": len(tokenizer) - 3, "has_rnn": False,
        "span_mode": "markerV0",
    }  # fmt: skip
    from gliner.model import UniEncoderSpanGLiNER

    model = UniEncoderSpanGLiNER(gliner.GLiNERConfig(**settings), tokenizer=tokenizer, backbone_from_pretrained=False)
    save_model(model.model, str(folder / "model.safetensors"))
    (folder / "gliner_config.json").write_text(json.dumps(settings))
    return folder


def with_gliner(folder: Path, *overrides: str, threshold: float = 0.0, policy: str = "strict"):
    settings = [f"path={folder}", "window=16", "overlap=4", f"threshold={threshold}"]
    return build_privacy(
        "privacy/model=gliner", *(f"privacy.model.{each}" for each in settings), *overrides, policy=policy
    )


def test_a_gliner_in_a_folder_sees_all_kinds_without_network_and_says_so(gliner_folder, monkeypatch, caplog):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    strict = with_gliner(gliner_folder)
    assert strict.unseen() == strict.partly_seen() == [] and not caplog.records
    verdict = strict(prompt("my name is ada . " * 20))
    assert verdict.reason and set(verdict.counts) <= set(strict.model.actions)
    assert with_gliner(gliner_folder, threshold=1.0)(prompt("my name is ada")).reason is None


def test_a_gliner_reads_to_the_end_of_a_text_that_is_longer_than_it_takes(gliner_folder):
    found = list(with_gliner(gliner_folder).model.find("the x " * 100 + "ada"))
    assert max(span.end for _, span in found) > 550


def test_an_entity_without_words_to_ask_with_is_refused(gliner_folder):
    with pytest.raises(InputError, match=r"actions\.BADGE has no words to ask.*labels\.BADGE"):
        with_gliner(gliner_folder, "+privacy.model.actions.BADGE=drop")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("model.safetensors", None, r"holds no model\.safetensors"),
        (
            "tokenizer_config.json",
            '{"auto_map": {"AutoTokenizer": "code.Mine"}}',
            r"names code of its own \(auto_map\)",
        ),
        ("gliner_config.json", '{"model_name": "x/y"}', r"holds no encoder_config"),
        (
            "gliner_config.json",
            '{"encoder_config": {"a": 1}, "max_len": 8}',
            r"window=16 is more than the model reads: 8",
        ),
    ],
)
def test_what_would_be_fetched_unpickled_or_run_is_refused(gliner_folder, tmp_path, name, text, message):
    for file in gliner_folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / name).unlink()
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match=message):
        with_gliner(tmp_path)
