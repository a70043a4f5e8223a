"""action=compare: heads that cannot be compared are refused by name, and the table says what the files say."""

import copy
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from exported_head import IDS, Editable, export_head, random_head, tiny_facts, tiny_target
from fitted_head import CHAIN, LAYERS, PROMPT, TREE, fitted_head, stopping_at
from serving_fixtures import serve_run

import eagle3.serving.compare.run
from eagle3.decoding.paired import Estimate
from eagle3.errors import InputError
from eagle3.head_files.format import save_head
from eagle3.serving.check.prompts import PromptSet
from eagle3.serving.compare.heads import head_folders, require_comparable
from eagle3.serving.compare.run import compare
from eagle3.settings.serving import CompareSettings
from eagle3.settings.types import validated
from eagle3.storage.records import read_sealed_json

PROMPTS = [PROMPT, PROMPT[9:], PROMPT * 2, PROMPT[4:], PROMPT[2:]]  # ragged, of two sources
SOURCES = ["code", "code", "code", "prose", "prose"]
CONVERSATIONS = [0, 1, 1, 2, 3]  # one has two turns


def settings(**changes):
    shapes = [{"topk": 1, "draft_tokens": None} | CHAIN, TREE]
    samplings = [{"temperature": 0.0}, {"temperature": 1.0}]
    given = {"shapes": shapes, "samplings": samplings, "batch_size": 4, "batch_tokens": 4096}
    return validated(CompareSettings, given | {"positions": None, "draft_window": None} | changes)


@pytest.fixture(scope="module")
def composed():
    return serve_run("compare", "max_new_tokens=16", "seed=1")


@pytest.fixture(scope="module")
def fitted():
    return fitted_head(tiny_target(), PROMPT)


@pytest.fixture
def folders(fitted, tmp_path: Path) -> list[Path]:
    """Two heads of the bundled target: one that was fitted to it, one that was fitted and spoilt, both without a
    training.json."""
    made = []
    for name, noise in (("good", 0.0), ("worse", 0.5)):
        head = copy.deepcopy(fitted)
        head.lm_head.weight.data += noise * torch.randn(head.lm_head.weight.shape, generator=torch.manual_seed(0))
        (tmp_path / name).mkdir()
        save_head(tmp_path / name, head, LAYERS, "float32")
        made.append(tmp_path / name)
    return made


@pytest.fixture
def run(composed, tmp_path):
    def run(folders, target=None, **changes):
        found = PromptSet("here", "all", PROMPTS, CONVERSATIONS, SOURCES, {})
        out = tmp_path / "out"
        out.mkdir(exist_ok=True)
        heads, asked = {folder.name: folder for folder in folders}, replace(composed, compare=settings(**changes))
        compare(asked, heads, target or tiny_target(), found, origin={"commit": "c"}, folder=out)
        return read_sealed_json(out / "compare.json", made_by="")["rows"]

    return run


def test_the_result_has_every_way_source_and_head_and_the_table_says_the_same(run, folders, tmp_path, capsys):
    found = run(folders, draft_window=512)
    assert len(found) == 3 * 4 * 2  # all, code and prose; two temperatures of two shapes; heads
    assert {row["source"]: row["prompts"] for row in found} == {"all": 5, "code": 3, "prose": 2}
    assert {row["source"]: row["conversations"] for row in found} == {"all": 4, "code": 2, "prose": 2}
    for first, other in zip(found[::2], found[1::2], strict=True):
        assert (first["head"], other["head"], first["difference"]) == ("good", "worse", None)
        gained = Estimate(**other["difference"])
        assert gained.value == pytest.approx(other["accept_length"]["value"] - first["accept_length"]["value"])
        assert gained.low <= gained.value <= gained.high
    printed = capsys.readouterr().out
    assert printed == (tmp_path / "out/compare.md").read_text()
    window, _, asked, _, _, _, *lines = printed.splitlines()
    assert window == "compare.draft_window=512"
    assert asked == "5 prompts of 4 conversations (here, prompts.turns=all)"
    for line, row in zip(lines, found, strict=True):
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert cells[:2] + cells[4:5] == [row["source"], str(row["prompts"]), row["head"]]
        assert cells[5].startswith(f"{row['accept_length']['value']:.3f} ± ")
        assert (cells[6] == "") == (row["head"] == "good")


def test_positions_have_rows_of_their_own(run, folders, capsys):
    found = run(folders, positions=[18, 30])
    whole = [row for row in found if (row["source"], row["head"], row["positions"]) == ("all", "worse", "all")]
    assert len(whole) == 4
    for row in whole:
        ways = "sampling", "steps", "topk", "source", "head"
        parts = [each for each in found if all(each[key] == row[key] for key in ways) and each is not row]
        assert [part["positions"] for part in parts] == ["below 18", "18 to 29", "30 and more"]
        assert sum(part["verifications"] for part in parts) == row["verifications"]
        assert row["prompts"] == 5 > min(part["prompts"] for part in parts)  # not every text was there
        gained = [part["verifications"] * (part["accept_length"]["value"] - 1) for part in parts]
        assert sum(gained) == pytest.approx(row["verifications"] * (row["accept_length"]["value"] - 1))
    assert "| source | text | prompts |" in capsys.readouterr().out


def test_a_head_whose_weights_are_no_numbers_is_refused_before_another_decodes(run, folders, tmp_path, monkeypatch):
    spoilt = Editable(folders[1])
    spoilt.tensors["fc.weight"][0, 0] = torch.nan
    spoilt.save()
    monkeypatch.setattr(eagle3.serving.compare.run, "answers_at", None)
    with pytest.raises(InputError, match=rf"head={folders[1]}: fc\.weight holds 1 non-finite values"):
        run(folders)
    assert not (tmp_path / "out/compare.json").exists()


def test_answers_of_one_token_are_refused(run, folders):
    with pytest.raises(InputError, match="none of 5 answers was longer than one token"):
        run(folders, stopping_at(tiny_target(), *range(4096)))


def test_heads_are_named_by_their_folders_unless_two_are_alike_and_each_is_named_once(folders):
    assert [*head_folders(["a/one", "a/two"])] == ["one", "two"]
    assert [*head_folders(["a/head", "b/head"])] == ["a/head", "b/head"]
    with pytest.raises(InputError, match=r"good/\.\./good is listed twice"):
        head_folders([str(folders[0]), f"{folders[0]}/../good"])


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"hidden_size": 32}, r"worse is for a target with hidden_size=32, target\.path=.*tiny has 192; give"),
        ({"head_kind": "nowhere.Kind"}, r"model\.kind=nowhere\.Kind"),
        ({"draft_vocab_size": 2}, "topk=3: .*worse can draft no more than its 2 tokens; lower topk"),
        ({"eagle_config": {IDS: [1, 2, 70]}, IDS: [2, 3, 71]}, "worse: layer ids"),
        ({IDS: [1, 3, 4]}, "worse: .* name different layers"),
    ],
)
def test_a_head_that_cannot_be_compared_is_refused_by_name(folders, target_files, config, message):
    edited = Editable(folders[1])
    (folders[1] / "config.json").write_text(json.dumps(edited.config | config))
    (folders[1] / "model.safetensors").unlink()  # nothing large is read for that
    with pytest.raises(InputError, match=message):
        require_comparable(folders, target_files, settings())


@pytest.mark.parametrize(("part", "files_tell"), [("config_hash", True), ("weights_hash", False)])
def test_a_head_that_was_trained_on_another_target_is_refused_by_name(run, target_files, part, files_tell, tmp_path):
    identity = replace(tiny_target().identity, name="another", **{part: "other"})
    export_head(random_head(tiny_facts(tiny_target()), identity), tmp_path / "head", versions={})
    if not files_tell:
        require_comparable([tmp_path / "head"], target_files, settings())
    message = f"heads: {tmp_path}/head was trained on another, not on .*tiny: they differ in {part[:-5]};"
    with pytest.raises(InputError, match=message):
        if files_tell:
            require_comparable([tmp_path / "head"], target_files, settings())
        else:
            run([tmp_path / "head"])


def test_what_decoding_does_not_compute_is_said(run, folders, caplog):
    edited = Editable(folders[1])
    edited.tensors["midlayer.self_attn.q_proj.bias"] = torch.ones(1)
    edited.config |= {"mlp_bias": True, "norm_output": False}
    edited.training = None
    edited.save()
    run(folders)
    said = f"head={folders[1]} is decoded by SGLang's rules, but may have been trained by others: "
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [each.removeprefix(said).split(":")[0] for each in warnings] == [
        "mlp_bias=true", "midlayer.self_attn.q_proj.bias is unknown", "norm_output=false",
    ]  # fmt: skip
