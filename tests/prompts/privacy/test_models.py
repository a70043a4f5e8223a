"""Names by a model: a real token classifier trained here for seconds; spaCy and presidio where they are installed."""

import os
import pickle
import sys
from pathlib import Path

import pytest
import torch
from prompt_stage import default_settings
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertForTokenClassification, PreTrainedTokenizerFast

from eagle3.errors import InputError
from eagle3.prompts.privacy.models import SpacyModel
from eagle3.prompts.privacy.models.names import OVERLAP, WINDOW, windows
from eagle3.prompts.rules import GROUPS, Rules
from tests.prompts.privacy.test_policy import build_privacy, contents, prompt

LABELS = {0: "O", 1: "B-PER", 2: "B-LOC", 3: "B-ORG"}
NAMES = {"ada": 1, "grace": 1, "london": 2, "lisbon": 2, "acme": 3, "initech": 3}
OTHER = ["my", "name", "is", "i", "live", "in", "and", "work", "at", "the", "x", "."]
CONTEXT = 64  # tokens


@pytest.fixture(scope="module")
def classifier(tmp_path_factory) -> Path:
    """A BERT of 10 k parameters that has learned which of 18 words are names."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *NAMES, *OTHER]
    vocabulary = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[PAD]")
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(words), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=CONTEXT, id2label=LABELS, label2id={name: index for index, name in LABELS.items()},
    )  # fmt: skip
    model = BertForTokenClassification(config)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    ids = torch.randint(4, len(words), (16, CONTEXT), generator=torch.Generator().manual_seed(1))
    labels = torch.tensor([NAMES.get(word, 0) for word in words])[ids]
    for _ in range(60):
        loss = model(input_ids=ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    folder = tmp_path_factory.mktemp("classifier")
    model.eval().save_pretrained(folder)
    fast.save_pretrained(folder)
    return folder


def with_classifier(folder: Path, *overrides: str, policy: str = "strict"):
    model = ["privacy/model=huggingface", f"privacy.model.path={folder}", "privacy.model.stride=8"]
    return build_privacy(*model, *overrides, policy=policy)


def test_strict_runs_with_a_token_classifier_and_drops_names(classifier, caplog):
    strict = with_classifier(classifier)
    assert strict.unseen() == ["STREET_ADDRESS"] and "NOT seen and let through: STREET_ADDRESS;" in caplog.text
    verdict = strict(prompt("my name is ada and i live in london", "i work at acme"))
    assert verdict.reason == "personal data: LOCATION, ORGANIZATION, PERSON"
    assert verdict.counts == {"LOCATION": 1, "ORGANIZATION": 1, "PERSON": 1}
    assert strict(prompt("my name is x")).reason is None


def test_what_a_model_takes_for_a_name_is_hashed_as_an_id_and_stays_as_a_source_to_credit(classifier):
    strict = with_classifier(classifier)
    assert len(strict.safe_id("ada")) == len(strict.safe_source("ada@web.de")) == 16
    assert strict.safe_source("ada") == "ada"


def test_each_entity_of_a_model_has_its_own_action(classifier):
    actions = ("privacy.model.actions.PERSON=mask", "privacy.model.actions.LOCATION=keep")
    verdict = with_classifier(classifier, *actions)(prompt("my name is grace and i live in lisbon"))
    assert contents(verdict.prompt) == ["my name is <PERSON> and i live in lisbon"]
    assert verdict.counts == {"PERSON": 1, "LOCATION": 1}


def test_a_text_longer_than_the_model_reads_is_read_whole(classifier):
    masking = with_classifier(classifier, "privacy.model.actions.PERSON=mask")
    filler = "the x " * ((WINDOW + OVERLAP) // 6)
    for text in ("the x " * CONTEXT + "ada", filler + "ada " + "the x " * 50, "ada " + filler):
        assert contents(masking(prompt(text)).prompt) == [text.replace("ada", "<PERSON>")]


def test_a_model_that_changed_in_its_place_makes_the_prompts_again(classifier):
    rules = Rules({group: default_settings()[group] for group in GROUPS}, privacy=with_classifier(classifier))
    before = rules.inputs()
    assert rules.inputs() == before
    os.utime(classifier / "model.safetensors", (1, 1))
    assert rules.inputs() != before


def test_a_name_in_the_overlap_of_two_windows_counts_once(classifier):
    text = "the x " * ((WINDOW - OVERLAP + 100) // 6) + "ada" + " the x" * 200
    assert sum("ada" in window for _, window in windows(text)) == 2
    assert with_classifier(classifier)(prompt(text)).counts == {"PERSON": 1}


def test_windows_are_whole_texts_that_overlap_and_start_with_whole_words():
    for text in ("", "short", "word " * 9000, "x" * 45_000, "a" * (WINDOW - 1) + " b"):
        pieces = list(windows(text))
        assert all(text.startswith(window, start) for start, window in pieces)
        assert all(len(window) <= WINDOW for _, window in pieces)
        ends = [start + len(window) for start, window in pieces]
        assert ends[-1] == len(text)
        assert all(start <= end - OVERLAP for (start, _), end in zip(pieces[1:], ends, strict=False))
    assert all(window.startswith("word") for _, window in windows("word " * 9000))


def test_a_model_goes_to_another_process_unloaded_and_works_there(classifier):
    strict = with_classifier(classifier)
    before = strict(prompt("my name is ada"))
    data = pickle.dumps(strict)
    assert len(data) < 20_000
    assert pickle.loads(data)(prompt("my name is ada")) == before


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, r"prompts\.privacy\.model\.path=.* holds no readable config\.json \(FileNotFoundError\)"),
        ({"config.json": "{"}, r"holds no readable config\.json \(JSONDecodeError\)"),
        ({"config.json": '{"id2label": {"0": "O", "1": "B-PER"}}'},
         r"knows no LOCATION, ORGANIZATION \(its labels: B-PER, O\)"),
    ],
)  # fmt: skip
def test_a_folder_that_is_no_fitting_model_is_refused_before_any_row_is_read(tmp_path, files, message):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match=message):
        with_classifier(tmp_path)


def test_weights_other_than_safetensors_are_refused(classifier, tmp_path):
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((classifier / name).read_bytes())
    (tmp_path / "pytorch_model.bin").write_bytes(b"a pickle")
    with pytest.raises(OSError, match="safetensors"):
        with_classifier(tmp_path)(prompt("my name is ada"))


def test_a_library_that_is_missing_is_named_with_its_extra(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "spacy", None)
    with pytest.raises(InputError, match=r"prompts/privacy/model=spacy needs the package spacy; .*'eagle3\[spacy\]'"):
        SpacyModel(path=str(tmp_path), actions={"PERSON": "drop"})


@pytest.fixture
def spacy_pipeline(tmp_path) -> Path:
    spacy = pytest.importorskip("spacy")
    pipeline = spacy.blank("en")
    patterns = [("PERSON", "Ada Lovelace"), ("GPE", "London"), ("ORG", "Acme")]
    pipeline.add_pipe("entity_ruler").add_patterns([{"label": label, "pattern": text} for label, text in patterns])
    pipeline.to_disk(tmp_path / "pipeline")
    return tmp_path / "pipeline"


def test_a_spacy_pipeline_finds_names(spacy_pipeline):
    strict = build_privacy("privacy/model=spacy", f"privacy.model.path={spacy_pipeline}", policy="strict")
    verdict = strict(prompt("I am Ada Lovelace, from London.", "Hello!", "I work at Acme."))
    assert verdict.counts == {"PERSON": 1, "LOCATION": 1, "ORGANIZATION": 1}


def test_presidio_finds_names_with_the_engine_of_its_configuration(spacy_pipeline, tmp_path):
    pytest.importorskip("presidio_analyzer")
    engine = tmp_path / "engine.yaml"
    engine.write_text(f"nlp_engine_name: spacy\nmodels:\n- {{lang_code: en, model_name: {spacy_pipeline}}}\n")
    strict = build_privacy("privacy/model=presidio", f"privacy.model.path={engine}", policy="strict")
    assert strict(prompt("I am Ada Lovelace, from London.")).reason == "personal data: LOCATION, PERSON"
    assert {engine, spacy_pipeline / "meta.json"} <= set(strict.model.files())
