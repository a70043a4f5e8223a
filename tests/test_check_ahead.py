"""What no later stage could do anything about is said before the first one starts."""

import json
import logging
import os
from pathlib import Path

import pytest
import torch
from exported_head import edit_json
from quantised import quantised
from safetensors.torch import load_file, save_file
from serving_fixtures import sglang_site

from eagle3.commands.precompute import STAGES, check_ahead, choose_engine, precompute
from eagle3.compose import compose_run
from eagle3.errors import InputError
from eagle3.settings.precomputing import STAGES as NAMES
from eagle3.settings.precomputing import PrecomputeRun
from eagle3.storage.lock import hold


def compose_precompute(target: Path, *overrides: str) -> PrecomputeRun:
    return compose_run("precompute", f"target.path={target}", "prompts.path=x", "out_dir=x", *overrides)


@pytest.mark.parametrize(
    ("changes", "overrides", "message"),
    [
        ({"quantization_config": {"quant_method": "modelopt"}}, [], "quant_method=modelopt"),
        ({"num_hidden_layers": 5}, [], r"features\.capture_layers=\[2, 2, 2\] does not fit"),
        ({"model_type": "t5gemma2", "is_encoder_decoder": True}, [], r"is_encoder_decoder=true in its config\.json"),
        ({"model_type": "blt", "num_hidden_layers": None}, [], r"num_hidden_layers=None in its config\.json .*=blt\)"),
        ({}, ["features.capture_layers=[2,4,9]"], r"features\.capture_layers=\[2, 4, 9\] does not fit"),
    ],
)
def test_a_target_that_cannot_be_used_is_refused_without_its_weights(without_weights, changes, overrides, message):
    edit_json(without_weights / "config.json", **changes)
    with pytest.raises(InputError, match=message):
        check_ahead(compose_precompute(without_weights, *overrides), [*STAGES.values()])


@pytest.mark.parametrize("stage", ["answers", "estimate"])
def test_a_target_without_a_chat_template_is_refused_before_the_first_stage(without_weights, stage):
    (without_weights / "chat_template.jinja").unlink()
    run = compose_precompute(without_weights, "answers=huggingface", "features=huggingface")
    with pytest.raises(InputError, match=r"chat\.template=null .* chat\.template=FILE"):
        check_ahead(run, [STAGES["prompts"], STAGES[stage]])
    with pytest.raises(InputError, match=r"holds no \*\.safetensors"):  # features have token ids already
        check_ahead(run, [STAGES["features"]])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["answers=openai", "answers.urls=[]"], r"answers\.urls is empty"),
        (["answers=sglang", "answers.urls=[http://x:1]", "answers.head=x"], r"answers\.head=x is for servers that"),
        (["answers=sglang", "answers.head=/nowhere"], r"/nowhere/config\.json does not exist"),
        (["answers=sglang"], r"launch\.python=.* has no SGLang"),
        (["answers=huggingface", "features=sglang"], r"launch\.python=.* has no SGLang"),
    ],
)
def test_servers_that_cannot_be_started_are_told_before_the_first_stage(tiny_path, overrides, message):
    with pytest.raises(InputError, match=message):
        check_ahead(compose_precompute(tiny_path, "features=huggingface", *overrides), [*STAGES.values()])


@pytest.mark.parametrize("stage", ["answers", "features"])
def test_a_package_that_a_quantised_target_lacks_is_told_before_the_first_stage(tmp_path, stage, monkeypatch):
    monkeypatch.setattr("transformers.quantizers.quantizer_awq.is_gptqmodel_available", lambda: False)
    target, stages = quantised("awq", tmp_path / "target"), [STAGES["prompts"], STAGES[stage]]
    here = ("answers=huggingface", "features=huggingface")
    with pytest.raises(InputError, match=r"quantised \(awq .*cannot load it here \(.*gptqmodel.*; install what"):
        check_ahead(compose_precompute(target, *here), stages)
    check_ahead(compose_precompute(target, *here, "workers=ray"), stages)  # its nodes may have it


def test_missing_or_cut_weights_are_told_before_the_first_stage(without_weights, tiny_path):
    weights = without_weights / "model-00002-of-00002.safetensors"
    index = {"weight_map": {"model.embed_tokens.weight": weights.name}}
    (without_weights / "model.safetensors.index.json").write_text(json.dumps(index))
    run = compose_precompute(without_weights, "answers=huggingface", "features=huggingface")
    for content in (None, (tiny_path / "model.safetensors").read_bytes()[:-1]):
        if content:
            weights.write_bytes(content)
        with pytest.raises(InputError, match=rf"target\.path=.*: {weights.name} cannot be read"):
            check_ahead(run, [*STAGES.values()])


def test_weights_that_no_head_can_be_trained_with_are_told_before_the_first_stage(without_weights, tiny_path):
    """In features, after all answers, it would be too late."""
    run = compose_precompute(without_weights, "answers=huggingface", "features=huggingface")
    weights = load_file(tiny_path / "model.safetensors")
    save_file(weights, without_weights / "model.safetensors")
    edit_json(without_weights / "config.json", tie_word_embeddings=False)
    with pytest.raises(InputError, match=r"no tensors lm_head\.weight, .*; get the whole checkpoint"):
        check_ahead(run, [*STAGES.values()])
    lm_head = torch.zeros(4096, 192, dtype=torch.int8)
    save_file(weights | {"lm_head.weight": lm_head}, without_weights / "model.safetensors")
    with pytest.raises(InputError, match=r"lm_head\.weight is I8 \[4096, 192\]"):
        check_ahead(run, [*STAGES.values()])


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "chat_template.jinja"])
def test_a_file_of_a_target_that_is_a_pipe_is_not_waited_for(without_weights, name):
    (without_weights / name).unlink()
    os.mkfifo(without_weights / name)
    with pytest.raises(InputError, match=rf"target\.path=.*: {name} is no regular file"):
        check_ahead(compose_precompute(without_weights), [*STAGES.values()])


def test_auto_names_the_keys_that_hugging_face_does_not_take(tmp_path, caplog):
    run = compose_precompute(
        tmp_path, "answers=auto", "answers.give_up_s=7", "answers.head=DIR", "answers.in_flight=512"
    )
    run = choose_engine(run)
    assert run.answered_by == "huggingface"
    warned = [record.getMessage().partition(" has no effect")[0] for record in caplog.records if record.levelno > 20]
    assert warned == ["answers.give_up_s=7", "answers.head=DIR"]  # in_flight is as it was


@pytest.mark.parametrize("gpus", [None, 0, 2])
def test_auto_takes_the_engine_where_it_and_a_gpu_are(tmp_path, gpus, caplog):
    """`gpus` None: there is no SGLang at all."""
    overrides = ["answers=auto", "features=auto", "stages=[answers]"]
    if gpus is not None:
        site = sglang_site(tmp_path)
        (site / "torch.py").write_text(f"class cuda:\n    device_count = staticmethod(lambda: {gpus})\n")
        overrides.append(f"launch.env={{PYTHONPATH:'{site}'}}")
    run = compose_precompute(tmp_path, *overrides)
    with caplog.at_level(logging.INFO):
        run = choose_engine(run)
    possible = bool(gpus)
    assert run.answered_by == ("sglang" if possible else "huggingface")
    assert (run.features.engine is not None) == possible
    told = ["answers by SGLang" if possible else "answers by Hugging Face"]  # no features: that stage does not run
    assert [record.message.partition(" in this")[0].partition(",")[0] for record in caplog.records] == told


def test_auto_takes_the_running_servers_that_are_named(tmp_path):
    run = compose_precompute(tmp_path, "answers=auto", "answers.urls=[http://node1:30000]")
    run = choose_engine(run)
    assert run.answered_by == "sglang" and run.answers.keys["urls"] == ["http://node1:30000"]


def test_every_stage_that_can_be_chosen_is_there():
    assert set(STAGES) == set(NAMES)


def test_two_out_dirs_do_not_write_one_store_at_a_time(tiny_path, tmp_path):
    store = tmp_path / "store"
    given = (f"out_dir={tmp_path}/second", f"features.path={store}", "features=huggingface", "stages=[features]")
    with hold(store), pytest.raises(InputError, match=rf"{store} is being written by process .*; wait for it"):
        precompute(compose_precompute(tiny_path, *given))
