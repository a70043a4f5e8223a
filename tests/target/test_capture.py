"""Capture: every supported family gives the features that its own `output_hidden_states` forward gives."""

import json
from itertools import pairwise

import pytest
import torch
import transformers
from families import (
    FAMILIES,
    GEMMA4,
    LATENT,
    OPTIONS,
    SHAPE,
    TINY,
    VISION,
    WRAPPERS,
    build_model,
    save_with_tokenizer,
    text_config,
)
from fitted_head import make_target
from hybrid_families import FAMILIES as HYBRID
from hybrid_families import hybrid_config
from torch.testing import assert_close

from eagle3.adapters.transformers import text_part
from eagle3.errors import InputError
from eagle3.target.capture import Capture, check_capture_layers, default_capture_layers, read_logit_transform
from eagle3.target.facts import LogitTransform, target_config
from eagle3.target.model import load_target
from eagle3.target.stored import stored_target

LENGTHS = [24, 5, 13]


@pytest.fixture(scope="module")
def family_target(tmp_path_factory):
    """family, number of layers → a loaded target with random weights; each is made once."""
    made = {}

    def target(family, num_layers):
        if (family, num_layers) not in made:
            torch.manual_seed(0)
            folder = save_with_tokenizer(build_model(family, num_layers), tmp_path_factory.mktemp(family))
            made[family, num_layers] = load_target(path=str(folder), **OPTIONS)
        return made[family, num_layers]

    return target


def padded_batch():
    """Ragged samples padded on the right with random ids, not with a pad id that a model could recognise."""
    input_ids = torch.randint(3, 4096, (len(LENGTHS), max(LENGTHS)), generator=torch.Generator().manual_seed(7))
    padding = torch.randint(3, 4096, input_ids.shape, generator=torch.Generator().manual_seed(0))
    real = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    return torch.where(real, input_ids, padding)


def assert_features_are_those_of_unpadded_samples(target, layers, batch):
    for ids, length, features in zip(batch, LENGTHS, Capture(target, layers)(batch, LENGTHS), strict=True):
        with torch.no_grad():
            reference = target.model(input_ids=ids[None, :length], output_hidden_states=True, use_cache=False)
        states = [state[0] for state in reference.hidden_states]
        aux, last = torch.cat([states[layer] for layer in layers], dim=1), states[-1]
        assert_close(features.aux_hidden_states, aux, rtol=1e-4, atol=1e-4)
        assert_close(features.last_hidden_state, last, rtol=1e-4, atol=1e-4)
        assert features.aux_hidden_states.untyped_storage().nbytes() == aux.nbytes  # no padding is kept
        assert features.last_hidden_state.untyped_storage().nbytes() == last.nbytes
        assert min((below - above).abs().max() for below, above in pairwise(states)) > 0.05


@pytest.mark.parametrize(("family", "num_layers"), [*((family, 7) for family in [*FAMILIES, *WRAPPERS]), ("llama", 8)])
def test_a_family_has_the_features_of_unpadded_samples_and_a_plain_frozen_lm_head(family_target, family, num_layers):
    target = family_target(family, num_layers)
    assert_features_are_those_of_unpadded_samples(target, default_capture_layers(num_layers), padded_batch())
    assert read_logit_transform(target) == LogitTransform()
    assert target.lm_head.shape == target.embedding.shape == (4096, 32)
    assert not target.model.training and not any(weight.requires_grad for weight in target.model.parameters())
    assert_the_files_say_the_same(stored_target(path=target.path), target)


def assert_the_files_say_the_same(files, target):
    assert files.identity == target.identity
    assert files.stop_ids == {files.tokenizer.eos_token_id, target.model.generation_config.eos_token_id}
    for ours, theirs in ((files.embedding, target.embedding), (files.lm_head, target.lm_head)):
        assert torch.equal(ours.to(theirs.dtype), theirs)
    assert (files.lm_head is files.embedding) == (target.lm_head.data_ptr() == target.embedding.data_ptr())
    loaded = text_part(target.model.config)
    assert files.facts == target.facts == target_config(loaded, len(target.lm_head), target.checkpoint_dtype)


@pytest.mark.parametrize("family", HYBRID)
def test_hybrid_targets_have_the_features_of_unpadded_samples(family):
    target = make_target(hybrid_config(family))
    # In float32 a chain of states rounds to 1e-3 under random weights. Only the eager experts have products in float64.
    target.model.set_experts_implementation("eager")
    target.model.double()
    assert_features_are_those_of_unpadded_samples(target, [2, 4, 5], padded_batch() % 500)


def hook_ids(target):
    return {hook for module in target.model.modules() for hook in (*module._forward_pre_hooks, *module._forward_hooks)}


def test_hooks_are_gone_after_a_capture_and_after_a_failed_one(family_target):
    target = family_target("llama", 8)
    capture = Capture(target, [2, 4, 5])
    before = hook_ids(target)
    capture(padded_batch(), LENGTHS)
    with pytest.raises(IndexError):
        capture(padded_batch() + 4096, LENGTHS)  # ids outside the vocabulary
    read_logit_transform(target)
    assert hook_ids(target) == before


def test_several_residual_streams_are_refused():
    target = make_target(text_config("llama", 5))
    layer = target.layers[2]
    layer.register_forward_pre_hook(lambda module, args: (torch.stack([args[0]] * 2, dim=-2), *args[1:]))
    streams = r"states of 4 dimensions, as with several residual streams"
    with pytest.raises(InputError, match=streams):
        Capture(target, [2, 3])(torch.tensor([[5, 6, 7]]), [3])
    with pytest.raises(InputError, match=rf"target\.path=random: .*{streams}"):
        read_logit_transform(target)


def test_a_target_that_reads_ahead_is_refused_before_it_answers(tmp_path):
    """PaliGemma's tokens attend to all tokens of a prompt."""
    vision = {**VISION, "image_size": 14, "projection_dim": 32}
    text = {**SHAPE, "model_type": "gemma", "num_hidden_layers": 3}
    config = transformers.PaliGemmaConfig(text_config=text, vision_config=vision, projection_dim=32)
    model = transformers.AutoModelForImageTextToText.from_config(config)
    target = load_target(path=str(save_with_tokenizer(model, tmp_path)), **OPTIONS)
    with pytest.raises(InputError, match=r"target\.path=.*: its states at a token change with later tokens"):
        read_logit_transform(target)


def test_layers_that_a_text_does_not_pass_are_not_captured(tmp_path):
    """Nothing would be written into their places."""
    text = {**SHAPE, "cross_attention_layers": [3, 6], "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    image = {"image_size": 28, "vision_output_dim": 64, "intermediate_layers_indices": [0], "attention_heads": 2}
    vision = {**VISION, **image, "num_global_layers": 1, "supported_aspect_ratios": [[1, 1]]}
    config = transformers.MllamaConfig(text_config=text, vision_config=vision)
    model = transformers.AutoModelForImageTextToText.from_config(config)
    target = load_target(path=str(save_with_tokenizer(model, tmp_path)), **OPTIONS)
    read_logit_transform(target)
    Capture(target, [2, 4, 5])(torch.tensor([[5, 6, 7]]), [3])
    with pytest.raises(InputError, match=r"capture_layers=\[2, 3, 5\]: .* without its layers \[3\]"):
        Capture(target, [2, 3, 5])(torch.tensor([[5, 6, 7]]), [3])


def test_layers_with_two_attentions_are_counted_once(tmp_path):
    sizes = {**SHAPE, **LATENT, "num_key_value_heads": 4, "num_layers": 7, "num_hidden_layers": 2 * 7}
    experts = {"head_dim": 8, "expert_ffn_hidden_size": 16, "n_routed_experts": 4, "zero_expert_num": 2, "moe_topk": 2}
    config = transformers.LongcatFlashConfig(**sizes, **experts, ffn_hidden_size=64)
    target = random_target(tmp_path, config)
    assert len(target.layers) == stored_target(path=target.path).facts.num_layers == 7
    assert_features_are_those_of_unpadded_samples(target, [2, 3, 4], padded_batch())


def test_bf16_target_gives_bf16_features():
    target = load_target(path=str(TINY), **{**OPTIONS, "dtype": "bfloat16"})
    read_logit_transform(target)
    features = Capture(target, [2, 4, 5])(torch.tensor([[5, 6, 7]]), [3])[0]
    assert features.aux_hidden_states.dtype == features.last_hidden_state.dtype == torch.bfloat16
    assert features.aux_hidden_states.shape == (3, 3 * 192)


@pytest.mark.parametrize(("num_layers", "layers"), [(7, [2, 3, 4]), (32, [2, 16, 29])])
def test_captured_layers_are_low_middle_high(num_layers, layers):
    assert default_capture_layers(num_layers) == layers


@pytest.mark.parametrize("num_layers", [2, 5])
def test_too_few_layers_name_the_config_key_and_a_choice_that_works(num_layers):
    with pytest.raises(InputError, match=rf"features\.capture_layers=.*{num_layers} layers") as caught:
        default_capture_layers(num_layers)
    choice = str(caught.value).rpartition("features.capture_layers=")[2]
    assert check_capture_layers(json.loads(choice), num_layers) == json.loads(choice)


def test_one_layer_is_too_few_for_any_choice():
    with pytest.raises(InputError, match=r"1 layers: .* choose another target"):
        default_capture_layers(1)


@pytest.mark.parametrize("layers", [[0, 4, 5], [2, 2, 5], [5, 4, 2], [2, 4, 8], []])
def test_impossible_capture_layers_are_refused(layers):
    with pytest.raises(InputError, match=r"features\.capture_layers"):
        check_capture_layers(layers, 8)


GEMMA4_WITH_CAP = {**GEMMA4, "hidden_size_per_layer_input": 0, "final_logit_softcapping": 2.0}
TRANSFORMS = {
    "soft-cap": ("Gemma2Config", {"head_dim": 8, "final_logit_softcapping": 1.5}, LogitTransform(soft_cap=1.5)),
    "cap of Gemma 4": ("Gemma4TextConfig", GEMMA4_WITH_CAP, LogitTransform(soft_cap=2.0)),
    "divided": ("GraniteConfig", {"logits_scaling": 8.0}, LogitTransform(scale=1 / 8)),
    "scaled": ("CohereConfig", {"logit_scale": 0.0625}, LogitTransform(scale=0.0625)),
    "scaled by what others divide by": ("HyperCLOVAXConfig", {"logits_scaling": 8.0}, LogitTransform(scale=8.0)),
    "plain": ("LlamaConfig", {}, LogitTransform()),
}


def random_target(folder, config):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    if (bias := getattr(model.get_output_embeddings(), "bias", None)) is not None:
        torch.nn.init.normal_(bias)
    return load_target(path=str(save_with_tokenizer(model, folder)), **OPTIONS)


@pytest.mark.parametrize("kind", TRANSFORMS)
def test_what_a_target_does_to_its_logits_is_found_and_gives_its_own_logits(tmp_path, kind):
    name, changes, expected = TRANSFORMS[kind]
    target = random_target(tmp_path, getattr(transformers, name)(**{**SHAPE, **changes, "num_hidden_layers": 4}))
    transform = read_logit_transform(target)
    assert transform == expected
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    last = Capture(target, [1, 2])(ids, [5])[0].last_hidden_state
    with torch.no_grad():
        assert_close(transform(last @ target.lm_head.T), target.model(ids).logits[0], rtol=1e-5, atol=1e-5)


def test_embeddings_that_are_projected_to_the_hidden_size_are_refused(tmp_path):
    config = transformers.OPTConfig(**{**SHAPE, "num_hidden_layers": 2, "ffn_dim": 64, "word_embed_proj_dim": 16})
    with pytest.raises(InputError, match=r"target\.path=.*embeddings of width 16 and a hidden size of 32"):
        random_target(tmp_path, config)


def test_logits_with_a_bias_are_refused(tmp_path):
    target = random_target(tmp_path, transformers.PhiConfig(**{**SHAPE, "num_hidden_layers": 2}))
    with pytest.raises(InputError, match=r"target\.path=.*its logits are not lm_head times"):
        read_logit_transform(target)
