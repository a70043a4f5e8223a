"""Small targets of the supported families."""

import shutil

import transformers
from hybrid_families import SHAPE as HYBRID_SHAPE
from stores import ASSETS

TINY = ASSETS / "tiny"
OPTIONS = {"device": "cpu", "check_health": False}
# Large initial weights, so that each layer changes what it reads by far more than the tolerance.
SHAPE = {**HYBRID_SHAPE, "vocab_size": 4096, "max_position_embeddings": 128}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
GEMMA4 = {"head_dim": 8, "sliding_window": 8, "num_kv_shared_layers": 0, "final_logit_softcapping": None}
ERNIE = {"moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1, "moe_layer_start_index": 1}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "rope_theta": 10000.0}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "patch_size": 14,
}
PROJECTOR = {"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32}
# Family → name of its config class, and what differs from SHAPE. Windows and chunks are shorter than the samples.
FAMILIES = {
    "llama": ("LlamaConfig", {}),
    "llama4_text": (
        "Llama4TextConfig",
        {"head_dim": 8, "intermediate_size_mlp": 64, "num_local_experts": 4, "attention_chunk_size": 8},
    ),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 8}),
    "qwen3_moe": ("Qwen3MoeConfig", {**EXPERTS, "num_experts": 4, "head_dim": 8}),
    "mistral": ("MistralConfig", {"sliding_window": 8}),
    "gemma3_text": ("Gemma3TextConfig", {"head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8}),
    "gemma4_text": (  # heads of two sizes, an embedding for each layer
        "Gemma4TextConfig",
        {**GEMMA4, "global_head_dim": 16, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 4096},
    ),
    "gpt_oss": ("GptOssConfig", {"head_dim": 8, "sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "deepseek_v3": (
        "DeepseekV3Config",
        {**EXPERTS, **LATENT, "num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 1, "topk_group": 1},
    ),
    "phi3": ("Phi3Config", {"sliding_window": 8}),
    "phi3_longrope": ("Phi3Config", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 12}),
    "olmo3": ("Olmo3Config", {"sliding_window": 8}),  # norms after attention and MLP
    "exaone4": ("Exaone4Config", {"head_dim": 8, "sliding_window": 8}),
    "minimax_m2": ("MiniMaxM2Config", {"num_experts_per_tok": 2, "num_local_experts": 4, "head_dim": 8}),
    "ernie4_5_moe": ("Ernie4_5_MoeConfig", {**ERNIE, "moe_intermediate_size": 32}),
    "glm4_moe": ("Glm4MoeConfig", {**EXPERTS, "n_routed_experts": 4, "head_dim": 8}),
}
WRAPPERS = {  # multimodal checkpoints, of which only the text part is used
    "gemma3": ("Gemma3Config", "gemma3_text", VISION),
    "llama4": ("Llama4Config", "llama4_text", {**VISION, **PROJECTOR}),
    "mistral3": ("Mistral3Config", "mistral", {**VISION, "model_type": "pixtral", "head_dim": 16}),
}


def text_config(family, num_layers):
    name, changes = FAMILIES[family]
    return getattr(transformers, name)(**{**SHAPE, **changes, "num_hidden_layers": num_layers})


def build_model(family, num_layers):
    if family not in WRAPPERS:
        return transformers.AutoModelForCausalLM.from_config(text_config(family, num_layers))
    name, text_family, vision = WRAPPERS[family]
    config = getattr(transformers, name)(text_config=text_config(text_family, num_layers), vision_config=vision)
    return transformers.AutoModelForImageTextToText.from_config(config)


def save_with_tokenizer(model, folder):
    model.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(TINY / file, folder)
    return folder
