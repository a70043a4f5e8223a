"""A checkpoint that cannot be a target is refused from its files, in one line with a fix, before a weight is read."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from exported_head import edit_json

from eagle3.errors import InputError
from eagle3.target.files import read_target_files


def read(path: Path | str) -> object:
    return read_target_files(path=str(path))


def set_config(**changes: object) -> Callable[[Path], None]:
    return lambda folder: edit_json(folder / "config.json", **changes)


def put(name: str, text: str = "{}") -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(text)


def make_adapter(folder: Path) -> None:
    (folder / "config.json").unlink()
    put("adapter_config.json")(folder)


MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8"}
OWN_CODE = {"model_type": "mine", "auto_map": {"AutoConfig": "configuration_mine.MyConfig"}}
OWN_TOKENIZER = {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": ["tokenization_mine.Mine", None]}}
FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "modelopt": (set_config(quantization_config=MODELOPT), r"quant_method=modelopt.*give the checkpoint"),
    "modelopt inside": (set_config(text_config={"quantization_config": MODELOPT}), r"quant_method=modelopt"),
    "unheard of": (set_config(quantization_config={"quant_method": "q9"}), r"quant_method=q9"),
    "modelopt alone": (put("hf_quant_config.json"), r"quantised \(hf_quant_config\.json\).*give the checkpoint"),
    "older compressed-tensors": (set_config(compression_config={"format": "x"}), r"quantised \(compression_config\)"),
    "MLX": (set_config(quantization_config={"bits": 4}), r"quantization_config .* no quant_method, .*remove that key"),
    "an empty scheme": (set_config(quantization_config={}), r"quantization_config .* no quant_method, .*remove"),
    "older MLX": (set_config(quantization={"bits": 4}), r"quantised \(quantization\)"),
    "a wrong value": (set_config(eos_token_id="</s>"), r"'eos_token_id': .*got '?str.*; correct that"),
    "adapter": (put("adapter_config.json"), r"is an adapter .*merge"),
    "adapter without a config": (make_adapter, r"is an adapter"),
    "own code": (set_config(**OWN_CODE), r"neither a model folder.*target\.trust_remote_code=true"),
    "own tokenizer": (put("tokenizer_config.json", json.dumps(OWN_TOKENIZER)), r"tokenizer.*target\.trust_remote_code"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_one_line_with_a_fix(without_weights, fault):
    spoil, message = FAULTS[fault]
    spoil(without_weights)
    with pytest.raises(InputError, match=rf"target\.path={without_weights}.*{message}") as caught:
        read(without_weights)
    assert "\n" not in str(caught.value)


def test_a_file_is_no_target(without_weights):
    with pytest.raises(InputError, match="is a file; give the folder of a Hugging Face model"):
        read(without_weights / "config.json")


@pytest.mark.parametrize("inside", ["checkpoint-500", "snapshots/0123abc"])
def test_the_folder_around_a_model_names_that_of_the_model(without_weights, inside):
    folder = without_weights.rename(without_weights.parent / "model")
    (without_weights / inside).parent.mkdir(parents=True)
    folder.rename(without_weights / inside)
    with pytest.raises(InputError, match=rf"give a folder in it .*e\.g\. target\.path={without_weights / inside}$"):
        read(without_weights)


@pytest.mark.parametrize("known", [{"quant_method": "fp8"}, {"load_in_8bit": True}])
def test_quantisation_that_transformers_knows_passes(without_weights, known):
    set_config(quantization_config=known)(without_weights)
    put("hf_quant_config.json")(without_weights)
    assert read(without_weights)
