"""Types of the keys that are read of a head's config.json, in SGLang's layout and in that of vLLM's speculators."""

from typing import Annotated, Any

from pydantic import Field

from eagle3.storage.typed_json import JsonObject, Length, Number, PositiveNumber, Size

Flag = bool | None
Text = str | None
LayerIds = Annotated[list[int], Field(max_length=1024)] | None


class Rope(JsonObject):
    rope_type: Text = None
    type: Text = None
    rope_theta: PositiveNumber = 1  # it may be missing here, and is never null
    factor: PositiveNumber | None = None
    low_freq_factor: PositiveNumber | None = None
    high_freq_factor: PositiveNumber | None = None
    beta_fast: PositiveNumber | None = None
    beta_slow: PositiveNumber | None = None
    mscale: Number | None = None
    mscale_all_dim: Number | None = None
    attention_factor: Number | None = None
    original_max_position_embeddings: Length | None = None
    truncate: Flag = None
    partial_rotary_factor: Number | None = None


class LayerJson(JsonObject):
    """The draft layer."""

    hidden_size: Size | None = None
    intermediate_size: Size | None = None
    num_attention_heads: Size | None = None
    num_key_value_heads: Size | None = None
    head_dim: Size | None = None
    num_hidden_layers: Size | None = None
    vocab_size: Size | None = None
    max_position_embeddings: Length | None = None
    rms_norm_eps: PositiveNumber | None = None
    rope_theta: PositiveNumber | None = None
    rope_scaling: Rope | None = None
    rope_parameters: Rope | None = None
    partial_rotary_factor: Number | None = None
    rope_is_neox_style: Flag = None
    hidden_act: Text = None
    sliding_window: Size | None = None
    layer_types: list[str] | None = None
    dtype: Text = None
    torch_dtype: Text = None
    model_type: Text = None
    tie_word_embeddings: Flag = None
    attention_bias: Flag = None
    mlp_bias: Flag = None
    bias: Flag = None
    quantization_config: dict[str, Any] | None = None


class EagleJson(JsonObject):
    use_aux_hidden_state: Flag = None
    eagle_aux_hidden_state_layer_ids: LayerIds = None
    norm_before_fc: Flag = None
    parallel_draft_step: Size | None = None


class _Verifier(JsonObject):
    name_or_path: Text = None


class _Speculators(JsonObject):
    verifier: _Verifier | None = None


class HeadJson(LayerJson):
    architectures: list[str] | None = None
    head_kind: Text = None
    draft_vocab_size: Size | None = None
    target_hidden_size: Size | None = None
    num_aux_hidden_states: Size | None = None
    eagle_aux_hidden_state_layer_ids: LayerIds = None
    eagle_config: EagleJson | None = None
    norm_before_residual: Flag = None
    norm_before_fc: Flag = None
    norm_output: Flag = None
    fc_norm: Flag = None
    use_aux_norm: Flag = None
    parallel_drafting: Flag = None
    speculators_model_type: Text = None
    speculators_config: _Speculators | None = None
    transformer_layer_config: LayerJson | None = None
