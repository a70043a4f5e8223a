"""Toxicity by a model: real classifiers of a few thousand parameters, made here with weights that know two words."""

import os
import pickle
from pathlib import Path

import pytest
import torch
from prompt_stage import Prepare, chat, default_settings, prepare, reasons
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

from eagle3.errors import InputError
from eagle3.prompts.privacy import Privacy
from eagle3.prompts.reading.prompt import Prompt
from eagle3.prompts.rules import GROUPS, Rules
from eagle3.prompts.toxicity import ToxicityCheck

__all__ = ["prepare"]

WORDS = ["[PAD]", "[UNK]", "you", "idiot", "scum", "please", "thanks", "the", "x"]
CONTEXT = 16  # tokens
SETTINGS = {"label": "insult", "threshold": 0.5, "stride": 4}


def save_classifier(folder: Path, problem: str) -> Path:
    """A randomly initialised BERT, trained for a second to tell the two words from the others."""
    vocabulary = {word: index for index, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    torch.manual_seed(0)
    labels = {0: "none", 1: "insult"}
    config = BertConfig(
        vocab_size=len(WORDS), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=CONTEXT, id2label=labels, label2id={name: key for key, name in labels.items()},
        problem_type=problem, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model = BertForSequenceClassification(config)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    ids = torch.randint(1, len(WORDS), (256, CONTEXT), generator=torch.Generator().manual_seed(1))
    ids[:128][(ids[:128] == 3) | (ids[:128] == 4)] = 7
    insults = ((ids == 3) | (ids == 4)).any(dim=1)
    target = torch.stack([~insults, insults], dim=1).float() if problem.startswith("multi") else insults.long()
    for _ in range(150):
        loss = model(input_ids=ids, labels=target).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval().save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[PAD]").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=["single_label_classification", "multi_label_classification"])
def classifier(request, tmp_path_factory) -> Path:
    return save_classifier(tmp_path_factory.mktemp(request.param), request.param)


def prompt(*contents: str) -> Prompt:
    roles = ("user", "assistant")
    messages = [{"role": roles[number % 2], "content": text} for number, text in enumerate(contents)]
    return Prompt("1", "s", "MIT", messages)


def test_the_score_is_the_probability_of_the_named_label(classifier: Path) -> None:
    text = "the x idiot please x x the you"
    model = BertForSequenceClassification.from_pretrained(classifier).eval()
    logits = model(input_ids=torch.tensor([[WORDS.index(word) for word in text.split()]])).logits[0]
    several = model.config.problem_type == "multi_label_classification"
    expected = (logits.sigmoid() if several else logits.softmax(0)).tolist()
    for label, value in zip(("none", "insult"), expected, strict=True):
        check = ToxicityCheck(path=str(classifier), **{**SETTINGS, "label": label})
        assert check.score(text) == pytest.approx(value, abs=1e-6)


def test_the_users_turns_are_judged_wherever_the_word_stands(classifier: Path) -> None:
    check = ToxicityCheck(path=str(classifier), **SETTINGS)
    filler = "the x please thanks " * 10
    assert check(prompt("the x please thanks the x you thanks")).reason is None
    assert check(prompt(filler)).reason is None
    assert check(prompt(" ")).reason is None
    for text in (f"idiot {filler}", f"{filler} scum", f"{filler} idiot {filler}"):
        assert check(prompt(text)).reason == "toxicity: insult"
    assert check(prompt(filler, "idiot", "thanks")).reason is None  # an answer's


def test_the_threshold_decides(classifier: Path) -> None:
    score = ToxicityCheck(path=str(classifier), **SETTINGS).score("you idiot")
    for threshold, refused in ((score, True), (score + 1e-6, False)):
        check = ToxicityCheck(path=str(classifier), **{**SETTINGS, "threshold": threshold})
        assert (check(prompt("you idiot")).reason is not None) == refused


def test_it_goes_to_another_process_unloaded(classifier: Path) -> None:
    check = ToxicityCheck(path=str(classifier), **SETTINGS)
    score = check.score("you idiot")
    assert len(pickle.dumps(check)) < 2000 and pickle.loads(pickle.dumps(check)).score("you idiot") == score


def test_the_stage_counts_what_it_refuses_and_makes_prompts_again_when_the_model_changes(
    classifier: Path, prepare: Prepare
) -> None:
    rows = [chat("the x please thanks the x please"), chat("you idiot the x you scum")]
    settings = {"toxicity": {"path": str(classifier), **SETTINGS}, "duplicates": {"near": False}}
    ledger = prepare(rows, **settings)
    assert reasons(prepare) == ["toxicity: insult"]
    [source] = ledger["sources"].values()
    assert source["rejected"] == {"toxicity: insult": 1} and source["rows"] == source["prompts"] + 1

    def inputs() -> dict:
        groups = {group: default_settings()[group] for group in GROUPS} | {"toxicity": settings["toxicity"]}
        off = Privacy(policy="off", recognisers={}, model=None, allowed=None)
        return Rules(groups, privacy=off).inputs()

    before = inputs()
    assert inputs() == before
    os.utime(classifier / "model.safetensors", (1, 1))
    assert inputs() != before


def test_it_is_off_by_default(prepare: Prepare) -> None:
    assert default_settings()["toxicity"]["path"] is None
    assert prepare([chat("you idiot the x you scum")])["prompts"] == 1


@pytest.mark.parametrize(
    ("files", "label", "message"),
    [
        ({}, "toxic", r"prompts\.toxicity\.path=.* holds no config\.json with labels \(FileNotFoundError\); give"),
        ({"config.json": "{}"}, "toxic", r"holds no config\.json with labels \(KeyError\)"),
        ({"config.json": '{"id2label": {"0": "LABEL_0"}}'}, "toxic",
         r"prompts\.toxicity\.label=toxic is no label of .*; it has LABEL_0: name one"),
    ],
)  # fmt: skip
def test_a_folder_that_does_not_fit_is_refused_before_any_row(tmp_path, files, label, message) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match=message):
        ToxicityCheck(path=str(tmp_path), **{**SETTINGS, "label": label})
