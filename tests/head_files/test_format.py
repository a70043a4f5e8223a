"""The format of an exported head: what SGLang and transformers read of ours, what we read of other trainers' heads."""

import json
from pathlib import Path

import pytest
import torch
from exported_head import edit_json, edit_tensors
from heads import LLAMA3, SETTINGS, make_head
from safetensors.torch import load_file
from transformers import AutoConfig

from eagle3.errors import InputError
from eagle3.head.draft_head import DraftHead
from eagle3.head.eagle3 import read_rope
from eagle3.head_files.files import read_files
from eagle3.head_files.format import exported_config, head_config, is_exported_head, load_head, save_head
from eagle3.storage.files import write_json

DEFAULT = SETTINGS["rope_parameters"]


@pytest.fixture
def head() -> DraftHead:
    return make_head(fc_norm=True).float()


@pytest.fixture
def saved(head: DraftHead, tmp_path: Path) -> Path:
    save_head(tmp_path / "head", head, [2, 4, 5], "float32")
    return tmp_path / "head"


def test_files_are_in_the_notation_of_sglang(head, tmp_path):
    save_head(tmp_path / "head", head, [2, 4, 5], "bfloat16")
    tensors = load_file(tmp_path / "head/model.safetensors")
    config = json.loads((tmp_path / "head/config.json").read_text())
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4]  # SGLang adds 1
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]  # vLLM and llama.cpp read these as they are
    assert config["dtype"] == config["torch_dtype"] == "bfloat16"
    assert config["draft_vocab_size"] == len(tensors["lm_head.weight"])
    assert torch.equal(tensors["d2t"] + torch.arange(30), head.draft_ids)
    assert tensors["d2t"].dtype == torch.int64
    assert tensors["t2d"].dtype == torch.bool
    assert tensors["t2d"].nonzero().squeeze(1).tolist() == head.draft_ids.tolist()
    assert {tensor.dtype for name, tensor in tensors.items() if name not in ("d2t", "t2d")} == {torch.bfloat16}


@pytest.mark.parametrize("rope", [DEFAULT, LLAMA3], ids=["default", "llama3"])
@pytest.mark.parametrize("reader", ["as written", "rope_theta and rope_scaling alone"])
def test_transformers_reads_the_rope_of_the_head(rope, reader, tmp_path):
    config = exported_config(make_head(rope_parameters=rope).config, [2, 4, 5], "bfloat16")
    if reader != "as written":
        del config["rope_parameters"]
    write_json(tmp_path / "config.json", config)
    assert AutoConfig.from_pretrained(tmp_path).rope_parameters == rope


@pytest.mark.parametrize("prefix", ["layers.0.", "model.layers.0."])
def test_heads_of_other_trainers_are_read(prefix, head, saved):
    theirs = {
        "midlayer.": prefix, "fc_norm.0.": "aux_norm_low.", "fc_norm.1.": "aux_norm_mid.",
        "fc_norm.2.": "aux_norm_high.",
    }  # fmt: skip

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for name in [*tensors]:
            for ours, other in theirs.items():
                if name.startswith(ours):
                    tensors[name.replace(ours, other)] = tensors.pop(name)
        del tensors["t2d"]

    edit_tensors(saved / "model.safetensors", rename)
    edit_json(saved / "config.json", "rope_parameters", "dtype", "fc_norm", use_aux_norm=True)
    loaded = load_head(saved, num_layers=8)
    assert loaded.head.config == head.config
    torch.testing.assert_close(loaded.head.state_dict(), head.state_dict(), rtol=0, atol=0)
    assert loaded.capture_layers == [2, 4, 5]
    assert not any(weight.requires_grad for weight in loaded.head.parameters())


def test_norm_before_residual_adds_to_the_normed_state(head, saved):
    edit_json(saved / "config.json", norm_before_residual=True)
    loaded = load_head(saved, num_layers=8).head
    assert isinstance(loaded, DraftHead)
    config = head.config
    hidden, attended = torch.randn(3, config.hidden_size), torch.randn(3, config.num_heads, config.head_dim)
    assert torch.equal(loaded.output(hidden, attended), head.output(head.midlayer.hidden_norm(hidden), attended))


@pytest.mark.parametrize(("nested", "read"), [({}, True), ({"norm_before_fc": False}, False)], ids=["", "nested"])
def test_norm_before_fc_is_read_where_sglang_reads_it(nested, read, tmp_path):
    save_head(tmp_path, make_head(norm_before_fc=True).float(), [2, 4, 5], "float32")
    stated = read_files(tmp_path).eagle_config
    edit_json(tmp_path / "config.json", eagle_config=stated | nested)
    assert head_config(read_files(tmp_path)).norm_before_fc is read
    edit_json(tmp_path / "config.json", "norm_before_fc", eagle_config=stated | {"norm_before_fc": True})
    assert head_config(read_files(tmp_path)).norm_before_fc


def test_no_values_are_drawn_for_weights_that_are_loaded(saved):
    before = torch.get_rng_state()
    load_head(saved, num_layers=8)
    assert torch.equal(torch.get_rng_state(), before)


def test_without_d2t_the_draft_vocabulary_is_the_whole_one(saved):
    edit_tensors(saved / "model.safetensors", lambda tensors: tensors.pop("d2t"))
    edit_json(saved / "config.json", vocab_size=30)
    assert load_head(saved, num_layers=8).head.draft_ids.tolist() == list(range(30))


def test_weights_that_the_targets_dtype_cannot_hold_are_refused(saved):
    edit_tensors(saved / "model.safetensors", lambda tensors: tensors["norm.weight"][:2].fill_(1e5))
    load_head(saved, dtype=torch.bfloat16, num_layers=8)
    with pytest.raises(InputError, match=r"norm\.weight holds 2 non-finite values in torch\.float16"):
        load_head(saved, dtype=torch.float16, num_layers=8)


def test_what_a_config_leaves_out_is_what_servers_assume(head, saved):
    rope = ("rope_parameters", "rope_theta", "rope_scaling")
    sizes = ("num_hidden_layers", "num_key_value_heads", "head_dim")
    edit_json(saved / "config.json", *rope, *sizes, num_attention_heads=2)
    config = head_config(read_files(saved))
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 10000.0}
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (2, 2, 8)
    assert read_rope({}) is None


def test_only_an_exported_head_may_be_replaced_by_one(saved, tmp_path):
    assert is_exported_head(saved) and not is_exported_head(tmp_path)
    edit_json(saved / "config.json", architectures=["LlamaForCausalLM"])
    assert not is_exported_head(saved)
    (saved / "config.json").write_text("[")
    assert not is_exported_head(saved)
