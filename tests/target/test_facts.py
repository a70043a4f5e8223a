"""What a head must know of its target, read from configs of transformers."""

import pytest
import transformers

from eagle3.head.eagle3 import read_rope
from eagle3.storage.records import parse_record, record_bytes
from eagle3.target.facts import LogitTransform, TargetConfig, plain_rope, target_config

MROPE = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 1, 1]}
WITH_IMAGES = {
    "Qwen2_5_VLConfig": MROPE,
    "Qwen3VLConfig": {**MROPE, "mrope_interleaved": True},
    "Glm4vConfig": {**MROPE, "partial_rotary_factor": 0.5},
}
SIZES = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 6}


@pytest.mark.parametrize("name", WITH_IMAGES)
def test_rope_with_sections_for_images_is_plain_rope_for_a_head_that_drafts_text(name):
    text = {**SIZES, "rope_parameters": WITH_IMAGES[name]}
    config = getattr(transformers, name)(text_config=text).get_text_config(decoder=True)
    assert "mrope_section" in config.rope_parameters
    facts = target_config(config, config.vocab_size, "bfloat16")
    assert facts.rope_parameters == {"rope_type": "default", "rope_theta": 1e6}
    assert read_rope({"rope_parameters": facts.rope_parameters}) == facts.rope_parameters


@pytest.mark.parametrize(
    ("rope", "plain"),
    [
        ({"rope_type": "linear", "factor": 2.0, "new": 1}, {"rope_type": "linear", "factor": 2.0}),
        ({"rope_type": "mrope", "mrope_section": [1, 1]}, {"rope_type": "default"}),
        ({"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.2}, {"rope_type": "yarn", "factor": 4.0}),
    ],
)
def test_of_rope_only_what_servers_compute_is_kept(rope, plain):
    config = transformers.PretrainedConfig()
    config.rope_parameters = {**rope, "rope_theta": 5e5}
    assert plain_rope(config) == {**plain, "rope_theta": 5e5}


@pytest.mark.parametrize("other", ["full_attention", "main"])
@pytest.mark.parametrize("theta", [5e5, None])
def test_of_several_ropes_that_of_full_attention_counts_where_there_is_one(other, theta):
    main = theta and {"rope_type": "default", "rope_theta": theta}
    config = transformers.PretrainedConfig()
    config.rope_parameters = {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}, other: main}
    assert plain_rope(config) == {"rope_type": "default", "rope_theta": theta or 1e4}


def test_the_logit_transform_is_recorded_with_the_target():
    config = transformers.LlamaConfig(**SIZES)
    made = target_config(config, 64, None)
    assert made.logit_transform == LogitTransform()
    capped = TargetConfig(**{**vars(made), "logit_transform": LogitTransform(scale=0.5, soft_cap=30.0)})
    assert parse_record(record_bytes(capped), TargetConfig, source="here", remedy="") == capped


@pytest.mark.parametrize("name", ["OPTConfig", "FalconConfig", "Qwen3_5MoeTextConfig"])
def test_a_target_that_states_no_width_of_its_mlps_gives_heads_four_times_its_hidden_size(name):
    config = getattr(transformers, name)(**SIZES)
    assert not hasattr(config, "intermediate_size")
    assert target_config(config, 64, None).intermediate_size == 4 * SIZES["hidden_size"]
