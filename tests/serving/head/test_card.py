"""The model card of an exported head: front matter that the Hub reads, and nothing that is not known."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import defaults
import pytest
from exported_head import FINGERPRINT, LAYERS, make_head_record, measured, with_origin
from heads import make_head
from huggingface_hub import ModelCard
from stores import TARGET_CONFIG

from eagle3.engine.command import Draft, launch_command
from eagle3.head_files.files import HeadFiles, read_files
from eagle3.head_files.format import save_head
from eagle3.serving.head import card
from eagle3.serving.head.card import TrainingData, accept_lengths, hub_license, model_card, training_data, write_card
from eagle3.storage.records import write_sealed_json

DRAFT = Draft(head="/disk/of/anna/heads/first", steps=5, topk=4, draft_tokens=16)
SETTINGS = {"optim.lr": 0.003, "loss.decay": 0.8, "data.pack_tokens": 4096}
WRITTEN = {"temperature": 0.9, "top_p": 1.0, "seed": 3, "turns": 2, "system_prompts": ["Our secret plan."]}
LEDGER = {
    "sha256": "abc",
    "prompts": 7,
    "sources": {
        "target": {"prompts": 2, "licenses": {"output of the target": 2}, "origins": {"target": 2}},
        "ours": {"prompts": 5, "licenses": {"MIT": 3, "CC-BY-4.0": 2}, "origins": {"tickets|web": 5}},
    },
    "inputs": {"sources": [{"name": "target", "written_by": WRITTEN}, {"name": "ours"}]},
}


@pytest.fixture
def make_files(tmp_path: Path) -> Callable[..., HeadFiles]:
    """Make the files of an exported head, with the options of its config."""

    def make(**options: Any) -> HeadFiles:
        folder, head = tmp_path / "head", make_head(**options)
        folder.mkdir(exist_ok=True)
        save_head(folder, head, LAYERS, "float32")
        made = make_head_record(head, FINGERPRINT, TARGET_CONFIG)
        record = replace(made, simulated_accept_length={3: 2.01, 7: 2.5}, versions={"torch": "2.9"})
        return replace(read_files(folder), record=record)

    return make


@pytest.fixture
def files(make_files: Callable[..., HeadFiles]) -> HeadFiles:
    return make_files()


def of_target(files: HeadFiles, name: str) -> HeadFiles:
    assert files.record is not None
    return with_origin(files, target=replace(files.record.origin.target, name=name))


def of_hub(files: HeadFiles) -> HeadFiles:
    return of_target(files, "meta-llama/Llama-3.1-8B-Instruct")


def test_what_was_decoded_stands_above_what_was_simulated(files):
    assert files.record is not None
    [*rows] = accept_lengths(replace(files.record, accept_length=measured())).splitlines()[2:]
    assert "decoded" in rows[0] and all("simulated" in row for row in rows[1:]) and len(rows) == 3


def test_the_front_matter_is_what_the_hub_reads(files):
    data = TrainingData(prompts=3, licenses=Counter({"Apache-2.0": 3}), origins=Counter({"web": 3}))
    told = ModelCard(model_card(of_hub(files), SETTINGS, DRAFT, data)).data.to_dict()
    assert told["base_model"] == "meta-llama/Llama-3.1-8B-Instruct"
    assert (told["license"], told["library_name"], told["pipeline_tag"]) == ("apache-2.0", "sglang", "text-generation")
    assert {"eagle3", "speculative-decoding"} <= set(told["tags"])
    for licenses, word in (({"MIT": 2, "CC-BY-4.0": 1}, "other"), ({"public-domain": 1}, "other"), ({}, None)):
        assert hub_license(TrainingData(licenses=Counter(licenses))) == word


def test_the_text_says_what_was_measured_and_set_and_no_place_of_this_machine(files):
    local = of_target(files, "/disk/of/anna/models/tiny")
    text = model_card(local, SETTINGS | {"data.source": "/disk/of/anna/x"}, DRAFT, None)
    assert "| 7 drafts in a row | 2.500 |" in text and "| optim.lr | 0.003 |" in text
    assert "# EAGLE-3 draft head for tiny" in text and "torch 2.9" in text
    assert "licences are unknown" in text and "license:" not in text
    assert "anna" not in text and "base_model" not in text


def test_the_command_has_the_flags_that_launch_gives(files):
    text = model_card(of_hub(files), SETTINGS, DRAFT, None)
    words = launch_command(defaults.launch(), SimpleNamespace(path="T", revision=None), DRAFT)
    flags = dict(pairwise(words))
    for flag in (word for word in words if word.startswith("--speculative")):
        value = "HEAD" if flag.endswith("path") else flags[flag]
        assert f"{flag} {value}" in text


def test_the_card_has_a_command_for_each_server_that_can_serve_the_head(make_files):
    everywhere = model_card(of_hub(make_files()), SETTINGS, DRAFT, None)
    assert "SGLang, vLLM and llama.cpp can serve this head." in everywhere
    for command in ("sglang.launch_server", "vllm serve meta-llama/", "llama-server -m target.gguf -md head.gguf"):
        assert command in everywhere
    with_norms = model_card(of_hub(make_files(fc_norm=True, norm_output=True)), SETTINGS, DRAFT, None)
    assert "SGLang and vLLM can serve this head; llama.cpp cannot: it has no fc_norm and no norm_output" in with_norms
    assert "llama-server" not in with_norms


@pytest.fixture
def answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """DIR with a ledger whose prompts were answered."""
    (tmp_path / "prompts").mkdir()
    write_sealed_json(tmp_path / "prompts" / "ledger.json", LEDGER)
    (tmp_path / "prompts" / "attribution.txt").write_text("tickets: credit to Ours Ltd\n")
    monkeypatch.setattr(card, "read_answers", lambda folder: SimpleNamespace(prompts_sha256="abc"))
    return tmp_path


def test_licences_origins_and_credits_come_from_the_ledger(answered, files):
    assert files.record is not None
    write_card(with_origin(files, path=str(answered / "features")), SETTINGS, DRAFT)
    text = (files.path / "README.md").read_text()
    assert "| MIT | 3 |" in text and "| tickets\\|web | 5 |" in text and "credit to Ours Ltd" in text
    assert "7 prompts." in text and "2 of these prompts the target wrote itself" in text and "temperature 0.9" in text
    assert "steered by 1 system prompts" in text and "secret" not in text
    assert ModelCard(text).data.license == "other"


def test_prompts_that_were_answered_twice_are_counted_once(answered, files):
    write_card(with_origin(files, path=[str(answered / "features"), str(answered / "again")]), SETTINGS, DRAFT)
    text = (files.path / "README.md").read_text()
    assert "7 prompts, answered 14 times in all." in text and "| MIT | 3 |" in text
    assert text.count("credit to Ours Ltd") == text.count("of these prompts the target wrote itself") == 1


def test_a_ledger_of_other_prompts_than_were_answered_is_not_taken(answered):
    assert training_data(str(answered / "features")) is not None
    write_sealed_json(answered / "prompts" / "ledger.json", LEDGER | {"sha256": "later"})
    assert training_data(str(answered / "features")) is None
    assert training_data("s3://bucket/features") is None
