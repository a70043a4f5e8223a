"""serve.py: export, check and decode as a user meets them, and its settings."""

import copy
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from exported_head import Editable, edit_json, errors, save_checkpoint, with_origin
from scripts import call_script
from serving_fixtures import serve_run

from eagle3.commands.serve import DO, build_draft
from eagle3.commands.serve import export_head as export_action
from eagle3.errors import InputError
from eagle3.head_files import files
from eagle3.head_files.files import read_files
from eagle3.head_files.finding import Finding
from eagle3.head_files.record import read_record
from eagle3.serving.head import export
from eagle3.serving.head.export import TrainedHead
from eagle3.settings.serving import Decoding
from eagle3.storage.files import write_jsonl


def save_run(folder: Path, trained: TrainedHead, *, target: str) -> None:
    """A finished training, whose features were made from `target`."""
    made_from = replace(trained.record.origin.target, name=target, revision=None)
    save_checkpoint(folder / "checkpoints/best.ckpt", with_origin(trained, target=made_from))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (["prompts.path=/no/such.jsonl"], r"prompts\.path=/no/such\.jsonl"),
        (["chat.template=/no/such.jinja"], r"chat\.template=/no/such\.jinja cannot be read"),
        (["topk=100", "draft_tokens=8"], "topk=100: the head can draft no more than its 64 tokens"),
    ],
)
def test_a_wrong_option_of_an_export_is_an_error_and_no_reason_to_skip_the_measurement(
    wrong, message, trained_on_tiny, tiny_path, tmp_path
):
    save_run(tmp_path / "run", trained_on_tiny, target=str(tiny_path))
    run = serve_run("export", f"run={tmp_path}/run", f"head={tmp_path}/head", *wrong)
    with pytest.raises(InputError, match=message):
        export_action(run)
    assert not (tmp_path / "head").exists()


def test_an_export_reads_and_hashes_the_files_of_its_head_once(trained_on_tiny, tiny_path, tmp_path, monkeypatch):
    calls = []

    def counted(function: Callable[[Path], Any]) -> Callable[[Path], Any]:
        return lambda path: calls.append((function.__name__, path.name)) or function(path)

    for module, name in ((files, "_read_tensors"), (files, "sha256_file"), (export, "sha256_file")):
        monkeypatch.setattr(module, name, counted(getattr(module, name)))
    save_run(tmp_path / "run", trained_on_tiny, target=str(tiny_path))
    export_action(serve_run("export", f"run={tmp_path}/run", f"head={tmp_path}/head"))
    assert sorted(calls) == [
        ("_read_tensors", "model.safetensors"), ("sha256_file", "config.json"), ("sha256_file", "model.safetensors"),
    ]  # fmt: skip
    record = read_record(tmp_path / "head", made_by="")
    assert record is not None and record.accept_length is not None


def test_an_older_head_stays_where_a_new_one_fails_its_checks(trained_on_tiny, exported, tiny_path, tmp_path, capsys):
    broken = replace(trained_on_tiny, head=copy.deepcopy(trained_on_tiny.head))
    broken.head.fc.weight.data[0, 0] = torch.nan
    save_run(tmp_path / "run", broken, target=str(tiny_path))
    before = {path.name: path.read_bytes() for path in exported.iterdir()}
    with pytest.raises(InputError, match="must not be served: reload, tensors"):
        export_action(serve_run("export", f"run={tmp_path}/run", f"head={exported}"))
    assert "skipped  accept_length     correct the errors above first" in capsys.readouterr().out
    assert {path.name: path.read_bytes() for path in exported.iterdir()} == before
    assert [path.name for path in exported.parent.iterdir() if path.name.startswith(".")] == []


def test_the_window_of_the_config_reaches_servers_and_the_decoder():
    assert build_draft(serve_run("launch", "head=HEAD", "draft_window=512"), None).draft_window == 512
    assert serve_run("decode", "draft_window=512").only(Decoding).draft_window == 512


def test_export_writes_the_best_head_of_a_run_without_its_target(trained_on_tiny, tmp_path, capsys):
    save_run(tmp_path / "run", trained_on_tiny, target="./gone/target")
    call_script("serve", "action=export", f"run={tmp_path}/run", f"head={tmp_path}/head", output_dir=tmp_path)
    assert "skipped  accept_length     target.path=./gone/target does not exist" in capsys.readouterr().out
    assert read_files(tmp_path / "head").layer_ids == [1, 3, 4]


def test_an_export_whose_findings_could_not_be_kept_does_not_begin(tmp_path):
    with pytest.raises(InputError, match=r"findings=.*/head/found\.json is in head="):
        export_action(serve_run("export", "run=RUN", f"head={tmp_path}/head", f"findings={tmp_path}/head/found.json"))
    assert not (tmp_path / "head").exists()


@pytest.mark.parametrize(
    ("action", "wrong", "message"),
    [
        ("decode", ["head=/no/such"], r"/no/such/config\.json does not exist"),
        ("decode", ["prompts.path=EMPTY"], "gives no prompt to measure on"),
        ("decode", ["topk=100", "draft_tokens=8"], "topk=100: .* can draft no more than its 64 tokens"),
        ("decode", ["target.path=OTHER"], r"head: .* is for a target with hidden_size=192, target\.path=.* has 96"),
        ("check", ["findings=."], r"findings=\. is a folder; give a file"),
        ("check", ["head=/no/such"], r"/no/such/config\.json does not exist"),
        ("show", ["head=/no/such"], r"/no/such/config\.json does not exist"),
        ("show", ["out=."], r"out=\. must be a file"),
    ],
)
def test_what_is_wrong_is_said_before_the_target_is_loaded(action, wrong, message, exported, without_weights, tmp_path):
    """Loading a large one takes minutes; this one has no weights at all."""
    (tmp_path / "empty.jsonl").write_text("")
    write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "Hi"}])
    other = shutil.copytree(without_weights, tmp_path / "other")
    edit_json(other / "config.json", hidden_size=96)
    given = (f"target.path={without_weights}", f"head={exported}", f"prompts.path={tmp_path}/rows.jsonl")
    wrong = [each.replace("EMPTY", f"{tmp_path}/empty.jsonl").replace("OTHER", str(other)) for each in wrong]
    with pytest.raises(InputError, match=message):
        DO[action](serve_run(action, *given, *wrong))


def test_decode_prints_one_json_line_and_warns_of_what_it_does_not_compute(
    exported,
    tiny_path,
    tmp_path,
    capsys,
    caplog,
):
    write_jsonl(tmp_path / "rows.jsonl", [{"turns": ["Hi", "And then?"]}])
    head = Editable(exported)
    head.config["hidden_act"] = "gelu"
    head.save()
    given = (f"target.path={tiny_path}", f"head={exported}", f"prompts.path={tmp_path}/rows.jsonl")
    call_script("serve", "action=decode", *given, "steps=2", "max_new_tokens=4", output_dir=tmp_path)
    [line] = capsys.readouterr().out.splitlines()
    result = json.loads(line)
    assert result["lossless"] == 1.0
    assert (result["prompts"], result["conversations"], result["turns"]) == (2, 1, "all")
    assert result["standard_error"] is None  # of one conversation
    assert result["accept_length"] == pytest.approx(1 + sum(result["per_depth"]))
    assert 1 <= result["accept_length_kept"] <= result["accept_length"]
    assert len(result["per_depth"]) == 2
    assert f"head={exported} is decoded by SGLang's rules, but may have been trained by others: hidden_act=gelu" in (
        caplog.text
    )


def test_check_exits_with_status_1_and_the_reason_and_writes_the_table_as_json(exported, tiny_path, tmp_path, capsys):
    head = Editable(exported)
    head.tensors["d2t"] = head.tensors["d2t"] + torch.arange(64)
    head.save()
    given = (f"target.path={tiny_path}", f"head={exported}", f"findings={tmp_path}/found.json")
    with pytest.raises(SystemExit) as ended:
        call_script("serve", "action=check", *given, output_dir=tmp_path)
    assert ended.value.code == 1
    said = capsys.readouterr()
    assert "error    d2t" in said.out
    assert "d2t holds target ids" in said.out
    assert said.err.splitlines()[-1] == (
        f"error: head={exported} must not be served: d2t, t2d: see the errors in the table above"
    )
    found = [Finding(**row) for row in json.loads((tmp_path / "found.json").read_text())]
    assert errors(found).keys() == {"d2t", "t2d"}
    assert [item.level for item in found if item.check == "accept_length"] == ["skipped"]
