"""action=publish: the folder has everything, and the card's numbers are those of the results."""

import json
import re
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from exported_head import export_head, make_head_record, tiny_facts, tiny_target, with_origin
from fitted_head import LAYERS, PROMPT, fitted_head
from huggingface_hub import ModelCard
from published import as_dicts, require_numbers_of_results
from serving_fixtures import serve_run
from stores import ASSETS, ROOT

from eagle3.commands.serve import publish_head
from eagle3.engine.command import Draft
from eagle3.errors import InputError
from eagle3.head_files.files import read_files
from eagle3.head_files.format import load_head
from eagle3.provenance import result_facts
from eagle3.serving.check.prompts import PromptSet
from eagle3.serving.compare.run import compare, head_facts
from eagle3.serving.head.card import write_card
from eagle3.serving.head.export import TrainedHead
from eagle3.storage.files import sha256_file
from eagle3.storage.records import write_sealed_json

CHAINS = "[" + ",".join(f"{{steps: {steps}, topk: 1, draft_tokens: null}}" for steps in (1, 2, 8)) + "]"
SOURCES = ["code", "code", "web", "web"]
TINY = ASSETS / "tiny"
SERVED = ROOT / "benchmarks" / "results" / "sglang_bench_smollm2_chain.json"
Publish = Callable[..., Path]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An exported head of the bundled target, fitted to one of its answers, with its card; and compare.json of the head
    in chains of several lengths, on prompts of two sources."""
    folder, target = tmp_path_factory.mktemp("made"), tiny_target()
    fitted = fitted_head(target, PROMPT)
    trained = TrainedHead(fitted, make_head_record(fitted, target.identity, tiny_facts(target).config))
    export_head(with_origin(trained, capture_layers=LAYERS), folder / "head", versions={"torch": "2.9"})
    draft = Draft(head="head", algorithm="EAGLE3", steps=3, topk=1, draft_tokens=None)
    write_card(read_files(folder / "head"), {"optim.lr": 0.003}, draft)
    run = serve_run("compare", f"compare.shapes={CHAINS}", "max_new_tokens=12")
    conversations = [[PROMPT], [PROMPT[9:]], [PROMPT[4:]], [PROMPT[2:]]]
    prompts = PromptSet.of("prompts.path=DIR/heldout.jsonl", "all", conversations, Counter(), SOURCES)
    compare(run, {"head": folder / "head"}, target, prompts, origin=result_facts(["x"]), folder=folder)
    # As a bench of this head on SGLang writes it: one that was measured, of another head.
    served = json.loads(SERVED.read_text()) | {"heads": {"head": head_facts(folder / "head")}}
    write_sealed_json(folder / "results.json", served)
    return folder


@pytest.fixture
def head(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    return tmp_path / "head"


@pytest.fixture
def publish(head: Path, tmp_path: Path) -> Publish:
    def run(*others: str, **changes: Any) -> Path:
        out = tmp_path / "published" / "tiny-EAGLE3"
        keys: dict[str, Any] = {
            "target.path": TINY, "head": head, "out": out,
            "results": f"[{tmp_path}/compare.json,{tmp_path}/results.json]",
            "licenses.head": "Apache-2.0", "licenses.head_file": ROOT / "LICENSE",
            "licenses.target": "mit", "licenses.target_file": tmp_path / "MIT",
        }  # fmt: skip
        (tmp_path / "MIT").write_text("MIT License")
        given = [f"{key}={value}" for key, value in (keys | changes).items()]
        publish_head(serve_run("publish", *given, *others))
        return out

    return run


def test_the_numbers_of_the_card_are_those_of_the_results(publish):
    out = publish()
    require_numbers_of_results(out)
    lines = as_dicts(out)
    assert {line["K"] for line in lines} == {"chain of 1", "chain of 2", "chain of 8", "chain of 3"}  # 3: served
    assert {line["head"] for line in lines} == {"tiny-EAGLE3"}
    one = next(line for line in lines if line["set"] == "heldout: code, 2 prompts, at most 12 tokens")
    assert re.fullmatch(r"eagle3 \S+, PyTorch 2\.\S+, float32", one["engine"]) and "cores" in one["hardware"]
    on_sglang = next(line for line in lines if line["set"].startswith("held_out, 64 requests, 1 at a time"))
    assert (on_sglang["engine"], on_sglang["T"], on_sglang["speed-up"][:5]) == ("SGLang 0.5.17", "greedy", "2.27 ")
    card = (out / "README.md").read_text()
    (out / "README.md").write_text(card.replace(one["accept length"], "3.141 ± 0.001"))
    with pytest.raises(AssertionError):
        require_numbers_of_results(out)


def test_the_folder_has_all_that_is_published_and_is_a_head_still(publish, head, tmp_path):
    (tmp_path / "made.txt").write_text(f"python train.py data.path={Path.home()}/features\n")
    (tmp_path / "notes.md").write_text("Made for questions about Linux.\n")
    out = publish(
        "base_model=owner/tiny", commands_file=tmp_path / "made.txt", notes_file=tmp_path / "notes.md"
    )  # fmt: skip
    files = {"config.json", "model.safetensors", "training.json", "README.md", "results.json", "LICENSE"}
    assert {path.name for path in out.iterdir()} == {*files, "LICENSE-target"}
    load_head(out, num_layers=len(tiny_target().layers))  # also compares the hashes
    assert (out / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()
    card = ModelCard((out / "README.md").read_text())
    assert (card.data.license, card.data.base_model) == ("apache-2.0", "owner/tiny")
    for part in (
        sha256_file(out / "model.safetensors"), sha256_file(TINY / "model.safetensors"), "| tiny/model.safetensors |",
        "python train.py data.path=~/features", "Made for questions about Linux.", "| optim.lr | 0.003 |",
        "[LICENSE-target](LICENSE-target)", "licences are unknown",
        "--model-path owner/tiny ", "vllm serve owner/tiny ",
    ):  # fmt: skip
        assert part in card.text
    assert str(Path.home()) not in card.text and str(Path.home()) not in (out / "results.json").read_text()
    assert publish() == out  # takes the place of the earlier one
    with pytest.raises(InputError, match=r"tiny-EAGLE3 was made by action=publish; give the exported head"):
        publish(head=out)
    (out / "mine.txt").touch()
    with pytest.raises(InputError, match=r"out=.*tiny-EAGLE3 also holds mine\.txt"):
        publish()


def test_results_of_another_head_or_command_are_refused(publish, tmp_path):
    compared = tmp_path / "compare.json"
    other = json.loads(compared.read_text())
    other["heads"]["head"]["sha256"]["model.safetensors"] = "0" * 64
    del other["seal"]
    write_sealed_json(tmp_path / "other.json", other)
    with pytest.raises(InputError, match=r"other\.json names no head with the weights of this one .*; measure this"):
        publish(results=f"[{tmp_path}/other.json]")
    compared.write_text(compared.read_text().replace('"value": 1.0', '"value": 3.0'))
    with pytest.raises(InputError, match="damaged or edited"):
        publish()
    write_sealed_json(tmp_path / "tune.json", {"best": {}})
    with pytest.raises(InputError, match=r"tune\.json is no compare\.json and no results\.json"):
        publish(results=f"[{tmp_path}/tune.json]")
    assert not (tmp_path / "published").exists()


def test_the_target_is_that_of_the_training_and_heads_of_other_trainers_are_refused(publish, head, tmp_path):
    other = tmp_path / "target"
    other.mkdir()
    for file in TINY.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    config = json.loads((TINY / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    with pytest.raises(InputError, match=r"target is not the target of the training, .*tiny: they differ in config"):
        publish(f"target.path={other}")
    (head / "training.json").unlink()
    with pytest.raises(InputError, match=r"has no training\.json, which says where a head comes from"):
        publish()
