"""Quantised targets: which model one is, what is captured of it, and what is said of those that are not loaded here."""

import json
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import transformers
from exported_head import errors, export_head, random_head, tiny_facts, tiny_target
from quantised import in_mxfp4, quantised
from safetensors.torch import load_file, save_file

from eagle3.errors import InputError
from eagle3.head_files.files import read_files
from eagle3.head_files.finding import target_facts
from eagle3.serving.check.checks import run_checks
from eagle3.target.capture import Capture, read_logit_transform
from eagle3.target.identity import differences, other_precision
from eagle3.target.model import NotLoadable, Target, load_target
from eagle3.target.stored import stored_target

LIBRARIES = {
    "fp8 in blocks": ("accelerate",),
    "fp8 by tensor": ("accelerate",),
    "compressed-tensors fp8": ("accelerate", "compressed_tensors"),
    "compressed-tensors int4": ("accelerate", "compressed_tensors"),
}
IDS = torch.arange(300, 316)[None]


@pytest.mark.parametrize("scheme", LIBRARIES)
def test_a_quantised_target_is_the_same_in_its_files_and_loaded(scheme, tmp_path):
    """transformers computes these in float32 or bfloat16: what is loaded is not what is stored."""
    folder = quantised(scheme, tmp_path / "target")
    files = stored_target(path=str(folder))
    assert torch.equal(files.embedding, stored_target(path=tiny_target().path).embedding)
    if missing := [name for name in LIBRARIES[scheme] if find_spec(name) is None]:
        with pytest.raises(NotLoadable, match=r"is quantised \(.*\).*install"):
            load_target(path=str(folder), device="cpu")
        pytest.skip(f"needs {', '.join(missing)}")
    target = load_target(path=str(folder), device="cpu")
    assert_is_target(target, 0.7 if "int4" in scheme else 0.95)
    export_head(random_head(tiny_facts(target), files.identity), tmp_path / "head", versions={})
    facts = target_facts(target, target.identity.template_hash)
    assert errors(run_checks(read_files(tmp_path / "head"), facts)) == {}


def bits(number: int) -> Any:
    return transformers.BitsAndBytesConfig(**{f"load_in_{number}bit": True})


def torchao_int8() -> Any:
    from torchao.quantization import Int8WeightOnlyConfig

    return transformers.TorchAoConfig(Int8WeightOnlyConfig())


@pytest.mark.parametrize(
    ("library", "config"),
    [("bitsandbytes", partial(bits, 4)), ("bitsandbytes", partial(bits, 8)), ("torchao", torchao_int8)],
    ids=["bitsandbytes 4", "bitsandbytes 8", "torchao int8"],
)
def test_what_transformers_writes_quantised_is_a_target(library, config, tiny_path, tmp_path):
    for name in ("accelerate", library):
        pytest.importorskip(name)
    options = {"quantization_config": config(), "device_map": {"": "cpu"}, "dtype": torch.bfloat16}
    transformers.AutoModelForCausalLM.from_pretrained(tiny_path, **options).save_pretrained(tmp_path)
    transformers.AutoTokenizer.from_pretrained(tiny_path).save_pretrained(tmp_path)
    assert_is_target(load_target(path=str(tmp_path), device="cpu"), 0.85)


def test_experts_in_mxfp4_are_a_target(tmp_path):
    pytest.importorskip("accelerate")
    assert_is_target(load_target(path=str(in_mxfp4(tmp_path)), device="cpu", check_health=False), None)


def assert_is_target(target: Target, similar: float | None) -> None:
    """Compare the target with its files, and what is captured of it with the one that it was made of."""
    files = stored_target(path=target.path)
    assert target.identity == files.identity and target.facts == files.facts
    assert torch.equal(files.embedding.float(), target.embedding.float())
    read_logit_transform(target)
    captured = Capture(target, [2, 4, 5])(IDS, [16])[0].last_hidden_state.float()
    if similar is not None:
        exact = Capture(tiny_target(), [2, 4, 5])(IDS, [16])[0].last_hidden_state
        assert float(torch.nn.functional.cosine_similarity(captured, exact).min()) > similar


@pytest.mark.parametrize("scheme", ["awq", "gptq"])
def test_a_scheme_that_cannot_be_loaded_here_is_named_with_what_to_do(scheme, tmp_path):
    folder = quantised(scheme, tmp_path / "target")
    files = stored_target(path=str(folder))  # what SGLang's answers and features need
    assert files.identity.precision == f"{scheme} (4 bits)" and files.embedding.dtype == torch.bfloat16
    with pytest.raises(NotLoadable, match=rf"quantised \({scheme} \(4 bits\)\).*copy without.*answers=sglang features"):
        load_target(path=str(folder), device="cpu")


@pytest.mark.parametrize("stored", [torch.int32, torch.float8_e4m3fn, None])
def test_an_embedding_that_is_quantised_too_is_said_to_be(stored, tmp_path):
    folder = quantised("compressed-tensors int4", tmp_path / "target")
    weights = load_file(folder / "model.safetensors")
    embedding = weights.pop("model.embed_tokens.weight")
    name = "model.embed_tokens.weight" if stored else "model.embed_tokens.weight_packed"
    (folder / "model.safetensors").unlink()
    save_file({**weights, name: embedding.to(stored or torch.int32)}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match=r"quantised \(compressed-tensors \(pack-quantized\)\), embedding and lm_head"):
        _ = stored_target(path=str(folder)).embedding


def test_a_head_is_measured_on_its_target_in_another_precision_and_a_warning_says_so(tmp_path):
    exact = tiny_target()
    export_head(random_head(tiny_facts(exact), exact.identity), tmp_path / "head", versions={})
    served = stored_target(path=str(quantised("fp8 in blocks", tmp_path / "target"))).identity
    config = json.loads((tmp_path / "target/config.json").read_text())
    facts = target_facts(exact, exact.identity.template_hash)
    for identity, level in ((exact.identity, "ok"), (served, "warning")):
        facts = type(facts)(**{**vars(facts), "identity": identity})
        [found] = [each for each in run_checks(read_files(tmp_path / "head"), facts) if each.check == "target"]
        assert found.level == level
    assert "in bfloat16" in found.message and "in fp8 (config and weights differ)" in found.message
    assert config["quantization_config"]["quant_method"] == "fp8"


def test_a_target_that_an_earlier_version_recorded_is_compared_without_its_weights():
    """Their hash was made of other samples: a store or head of then is not refused for that."""
    now = tiny_target().identity
    then = replace(now, precision=None, weights_hash="of other samples")
    assert differences(then, now) == [] and other_precision(then, now) is None
    assert differences(replace(then, config_hash="other"), now) == ["config"]
    assert differences(replace(then, precision="bfloat16"), now) == ["weights"]
