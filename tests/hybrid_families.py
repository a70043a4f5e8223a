"""Tiny configs of the families that keep a state in addition to or instead of keys and values."""

from typing import Any

import transformers

SHAPE = {
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,  # large, so that answers vary
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "num_hidden_layers": 8,
}
DELTA = {f"linear_{part}": size for part, size in (("num_value_heads", 2), ("num_key_heads", 2), ("key_head_dim", 8))}
DELTA |= {"linear_value_head_dim": 8, "head_dim": 8}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
EVERY_SECOND = {"layer_types": ["mamba", "attention"] * 4}
NEMOTRON = {"layers_block_type": ["mamba", "attention", "mamba", "moe"] * 2, "mamba_num_heads": 4, "mamba_head_dim": 8}
NEMOTRON |= {"n_groups": 2, "ssm_state_size": 8, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "head_dim": 8}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_next": ("Qwen3NextConfig", {**DELTA, **EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 16}),
    "qwen3_5_text": ("Qwen3_5TextConfig", DELTA),
    "nemotron_h": ("NemotronHConfig", {**NEMOTRON, **EXPERTS, "moe_shared_expert_intermediate_size": 16}),
    "jamba": (
        "JambaConfig",
        {"attn_layer_period": 4, "attn_layer_offset": 2, "num_experts": 4, "mamba_d_state": 8, "mamba_dt_rank": 4},
    ),
    "bamba": ("BambaConfig", {**MAMBA, "attn_layer_indices": [2, 5]}),
    "lfm2": ("Lfm2Config", {"layer_types": ["conv", "full_attention"] * 4, "block_multiple_of": 8}),
    "falcon_h1": ("FalconH1Config", {**MAMBA, "head_dim": 8, "mamba_d_ssm": 64}),
    "granitemoehybrid": (
        "GraniteMoeHybridConfig",
        {**MAMBA, **EVERY_SECOND, "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 32},
    ),
}


def hybrid_config(family: str, **changes: Any) -> transformers.PreTrainedConfig:
    name, settings = FAMILIES[family]
    return getattr(transformers, name)(**{**SHAPE, **settings, **changes})
