"""A hand-edited or damaged head is checked, or refused in one line: never a traceback, whatever is wrong with it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from exported_head import (
    FINGERPRINT,
    IDS,
    Editable,
    as_speculators,
    edit_tensors,
    export_head,
    random_head,
    tiny_facts,
    tiny_target,
)
from wrong_json import TEXTS, mutations, one_printable_line

from eagle3.errors import InputError
from eagle3.head_files.files import INDEX, read_files
from eagle3.head_files.finding import TargetFacts
from eagle3.head_files.format import is_exported_head, load_head
from eagle3.serving.check.checks import run_checks

YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 2048, "beta_fast": 32, "beta_slow": 1}
MORE: dict[str, Any] = {
    "rope_scaling": YARN, "quantization_config": {"bits": 4}, "partial_rotary_factor": 1.0, "rope_is_neox_style": True,
    "bias": False, "num_aux_hidden_states": 3, "target_hidden_size": 192, "norm_before_fc": False,
    "norm_output": False, "fc_norm": False, "parallel_drafting": False,
    "speculators_config": {"verifier": {"name_or_path": "x"}},
    "eagle_config": {"use_aux_hidden_state": True, IDS: [1, 3, 4], "norm_before_fc": False, "parallel_draft_step": 1},
}  # fmt: skip


@pytest.fixture(scope="module")
def facts() -> TargetFacts:
    return tiny_facts(tiny_target())


@pytest.fixture
def head(facts: TargetFacts, tmp_path: Path) -> Path:
    export_head(random_head(facts, FINGERPRINT), tmp_path / "head", versions={})
    (tmp_path / "head/training.json").unlink()  # which has the sha256 of the files
    return tmp_path / "head"


def checked(folder: Path, facts: TargetFacts) -> None:
    """Read the head in every way; only InputError may come, in a line that does not steer a terminal."""
    try:
        assert all(finding.message.isprintable() for finding in run_checks(read_files(folder), facts))
        load_head(folder, num_layers=8)
    except InputError as error:
        assert one_printable_line(error), str(error)
    is_exported_head(folder)


@pytest.mark.parametrize("layout", ["every key", "speculators"])
def test_no_value_of_a_wrong_type_in_config_json_is_a_traceback(layout, head, facts):
    edited = Editable(head)
    if layout == "speculators":
        as_speculators(edited, torch.zeros(4096, 192))
        edited.save()
    if layout == "every key":
        edited.config |= MORE
    for name, changed in mutations(edited.config):
        (head / "config.json").write_text(json.dumps(changed))
        try:
            checked(head, facts)
        except Exception as error:
            raise AssertionError(name) from error


@pytest.mark.parametrize("text", TEXTS, ids=[text[:12] for text in TEXTS])
@pytest.mark.parametrize("file", ["config.json", INDEX, "training.json"])
def test_no_content_of_a_file_is_a_traceback(file, text, head, facts):
    (head / file).write_text(text, encoding="latin-1")
    checked(head, facts)


def test_a_damaged_index_names_the_key_and_the_value(head, facts):
    weight_map = {"fc.weight": "model.safetensors", "norm.weight": "model.safetensors"}
    for name, changed in mutations({"metadata": {"total_size": 1}, "weight_map": weight_map}):
        (head / INDEX).write_text(json.dumps(changed))
        checked(head, facts)
        if name.startswith("weight_map="):
            with pytest.raises(InputError, match=INDEX):
                read_files(head)


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        (torch.float32, ()), (torch.float8_e4m3fn, (64,)), (torch.int8, (64, 1)), (torch.int64, (0,)),
        (torch.bool, (2, 2, 2)), (torch.int64, (64,)),
    ],
)  # fmt: skip
def test_no_dtype_or_shape_of_a_tensor_is_a_traceback(dtype, shape, head, facts):
    whole = (head / "model.safetensors").read_bytes()
    for name in ("d2t", "t2d", "fc.weight", "norm.weight", "embed_tokens.weight", "\x1b[31m"):
        edit_tensors(
            head / "model.safetensors", lambda tensors, name=name: tensors.update({name: torch.ones(shape).to(dtype)})
        )
        checked(head, facts)
        (head / "model.safetensors").unlink()
        (head / "model.safetensors").write_bytes(whole)


def test_a_config_with_too_many_levels_is_refused(head):
    config = json.loads((head / "config.json").read_text())
    value: list[Any] = []
    for _ in range(900):  # JSON that can be read, and that fails in whatever walks through it
        value = [value]
    (head / "config.json").write_text(json.dumps({**config, "extra": value}))
    with pytest.raises(InputError, match="objects and lists inside each other"):
        read_files(head)
