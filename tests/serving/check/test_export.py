"""Checks of a fresh export: the files give the trained head's logits, and what was measured is kept for later."""

from dataclasses import replace

import pytest
import torch
from exported_head import (
    FINGERPRINT,
    Editable,
    as_speculators,
    errors,
    export_head,
    name_layers,
    random_head,
    with_origin,
    with_record,
)
from heads import LLAMA3
from safetensors.torch import save_file

from eagle3.errors import InputError
from eagle3.head_files.files import read_files
from eagle3.head_files.finding import Finding
from eagle3.head_files.format import load_head
from eagle3.serving.check.accept_length import Measurer
from eagle3.serving.check.checks import check_export, check_head, check_reload, excused, in_dtype, probe_logits

OPTIONS = {
    "plain": {},
    "fc_norm and norm_output": {"fc_norm": True, "norm_output": True},
    "norm_before_fc": {"norm_before_fc": True},
    "llama3": {"rope_parameters": LLAMA3},
}
TENSORS = ["fc.weight", "norm.weight", "midlayer.hidden_norm.weight", "midlayer.self_attn.k_proj.weight", "d2t"]


@pytest.mark.parametrize("name", OPTIONS)
def test_the_exported_head_gives_the_logits_of_the_trained_one(name, facts, tmp_path):
    trained = random_head(facts, FINGERPRINT, **OPTIONS[name])
    export_head(trained, tmp_path / "head", versions={})
    loaded = load_head(tmp_path / "head", num_layers=8).head
    assert torch.equal(probe_logits(loaded), probe_logits(in_dtype(trained.head, torch.bfloat16)))
    assert check_reload(trained, read_files(tmp_path / "head")).level == "ok"


def test_where_the_weights_begin_in_the_file_makes_no_difference(facts, trained_on_tiny, tmp_path):
    trained = with_origin(trained_on_tiny, target_config=replace(facts.config, dtype="float32"))
    export_head(trained, tmp_path / "head", versions={})
    tensors = {name: tensor.clone() for name, tensor in read_files(tmp_path / "head").tensors.items()}
    (tmp_path / "head/training.json").unlink()  # it has the file's sha256
    for padding in range(0, 64, 8):
        save_file(tensors, tmp_path / "head/model.safetensors", {"format": "pt" + padding * " "})
        assert check_reload(trained, read_files(tmp_path / "head")).level == "ok"


@pytest.mark.parametrize("tensor", TENSORS)
def test_a_changed_tensor_is_found(tensor, trained_on_tiny, exported):
    written = Editable(exported)
    written.tensors[tensor].view(-1)[0] += 1
    written.save()
    finding = check_reload(trained_on_tiny, read_files(exported))
    assert finding.level == "error" and "gives other logits than /nowhere/best.ckpt: export again" in finding.message


def test_a_head_that_accepts_nothing_is_an_error_when_served_and_a_warning_when_its_training_said_so(
    trained_on_tiny, make_measurer, exported
):
    measurer = make_measurer(min_accept_length=3.5)  # more than two steps can give
    at_export, _ = check_export(trained_on_tiny, read_files(exported), measurer)
    assert [(item.check, item.level) for item in at_export if item.level != "ok"] == [
        ("as_trained", "skipped"), ("accept_length", "warning"),
    ]  # fmt: skip
    later = check_head(read_files(exported), measurer)
    assert "min_accept_length is 3.5; if the other checks pass, the head is of another target" in str(errors(later))


def test_what_was_measured_at_export_is_recorded_and_compared_with_later(trained_on_tiny, make_measurer, exported):
    measurer = make_measurer()
    assert errors(check_export(trained_on_tiny, read_files(exported), measurer)[0]) == {}
    files = read_files(exported)
    assert files.record is not None and files.record.accept_length is not None
    recorded = files.record.accept_length
    assert (recorded.lossless, recorded.from_validation, recorded.prompts) == (None, False, 2)
    assert recorded.prompts_from == "check.questions"  # its store is nowhere
    assert recorded.standard_error is not None and recorded.standard_error >= 0
    assert errors(check_head(files, measurer)) == {}
    more = replace(recorded, accept_length=1.1 * recorded.accept_length)
    found = errors(check_head(replace(files, record=replace(files.record, accept_length=more)), measurer))
    assert "a file of the head or the target has changed, export again" in found["accept_length"]


def test_what_an_export_cannot_measure_is_skipped_with_the_reason(
    trained_on_tiny,
    make_measurer,
    exported,
    monkeypatch,
):
    findings, _ = check_export(trained_on_tiny, read_files(exported), "target.path=/gone does not exist")
    assert [item for item in findings if item.level == "skipped"] == [
        Finding("target", "skipped", "no target to compare with"),
        Finding("accept_length", "skipped", "target.path=/gone does not exist"),
    ]

    def fail(*given: object) -> None:
        raise InputError("of that kind of target")

    monkeypatch.setattr(Measurer, "measured", fail)
    findings, _ = check_export(trained_on_tiny, read_files(exported), make_measurer())
    assert findings[-1] == Finding("accept_length", "skipped", "of that kind of target")


@pytest.mark.parametrize(
    ("simulated", "level"), [({3: 1.04, 7: 1.2}, "warning"), ({3: 1.05, 7: 1.2}, "error"), ({}, "error")]
)
def test_an_export_is_excused_where_training_simulated_too_short_an_accept_length(simulated, level, trained_on_tiny):
    trained, finding = with_record(trained_on_tiny, simulated_accept_length=simulated), Finding("x", "error", "short")
    assert excused(finding, trained, 1.05).level == level
    assert excused(replace(finding, level="ok"), trained, 1.05).level == "ok"


def test_a_head_of_the_speculators_is_decoded_before_its_layout_is_changed(exported, make_measurer, target):
    head = Editable(exported)
    as_speculators(head, target.embedding)
    head.save()
    found = {item.check: item.level for item in check_head(read_files(exported), make_measurer())}
    assert found["layout"] == "error" and found["accept_length"] != "skipped"


def test_a_head_that_cannot_be_decoded_is_not(exported, make_measurer):
    head = Editable(exported)
    name_layers(head.config, [1, 3, 99])
    head.save()
    found = check_head(read_files(exported), make_measurer())
    assert found[-1] == Finding("accept_length", "skipped", "correct the errors above first")
