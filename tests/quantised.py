"""The bundled target in the schemes that quantised checkpoints are published in, laid out as their tools do."""

import shutil
from pathlib import Path
from typing import Any

import torch
from exported_head import edit_json
from safetensors.torch import load_file, save_file
from stores import ASSETS
from torch import Tensor
from transformers import GptOssConfig, GptOssForCausalLM

FP8 = {"num_bits": 8, "type": "float", "symmetric": True}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64, "symmetric": True, "dynamic": False}
TINY = ASSETS / "tiny"


def compressed(name: str, weights: dict[str, Any], **group: Any) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, **group}}
    fixed = {"quant_method": "compressed-tensors", "quantization_status": "compressed", "ignore": ["lm_head"]}
    return {**fixed, "format": name, "config_groups": groups}


CONFIGS: dict[str, dict[str, Any]] = {
    "fp8 in blocks": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    "fp8 by tensor": {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None},
    "compressed-tensors fp8": compressed(
        "float-quantized", FP8 | {"strategy": "channel", "dynamic": False},
        input_activations=FP8 | {"strategy": "token", "dynamic": True},
    ),
    "compressed-tensors int4": compressed("pack-quantized", INT4),
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": False, "sym": True},
}  # fmt: skip


def quantised(scheme: str, folder: Path) -> Path:
    shutil.copytree(TINY, folder)
    weights = load_file(folder / "model.safetensors")
    stored: dict[str, Tensor] = {}
    for name, weight in weights.items():
        parts = _stored(scheme, weight.float()) if name.endswith("_proj.weight") else {"weight": weight}
        stored |= {name.removesuffix("weight") + part: tensor.contiguous() for part, tensor in parts.items()}
    (folder / "model.safetensors").unlink()
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    edit_json(folder / "config.json", quantization_config=CONFIGS[scheme])
    return folder


def in_mxfp4(folder: Path) -> Path:
    """A gpt-oss of random weights, whose experts are in MXFP4."""
    sizes = {"vocab_size": 4096, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 8, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    config = GptOssConfig(**sizes, **heads, eos_token_id=2, pad_token_id=0, sliding_window=16)
    shutil.copytree(TINY, folder, dirs_exist_ok=True)
    GptOssForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    for name in [name for name in weights if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, inputs, outputs = weights.pop(name).shape
        weights[f"{name}_blocks"] = torch.randint(256, (experts, outputs, inputs // 32, 16)).to(torch.uint8)
        weights[f"{name}_scales"] = torch.full((experts, outputs, inputs // 32), 120, dtype=torch.uint8)
    (folder / "model.safetensors").unlink()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    plain = [f"model.layers.*.{part}" for part in ("self_attn", "mlp.router")] + ["model.embed_tokens", "lm_head"]
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": plain}
    edit_json(folder / "config.json", quantization_config=quantization)
    return folder


def _stored(scheme: str, weight: Tensor) -> dict[str, Tensor]:
    rows, columns = weight.shape
    if scheme == "fp8 in blocks":
        padded = torch.nn.functional.pad(weight, (0, -columns % 128, 0, -rows % 128))
        blocks = padded.unflatten(1, (-1, 128)).unflatten(0, (-1, 128))
        scale = blocks.abs().amax((1, 3)) / 448
        scaled = (blocks / scale[:, None, :, None]).flatten(2, 3).flatten(0, 1)[:rows, :columns]
        return {"weight": scaled.to(torch.float8_e4m3fn), "weight_scale_inv": scale}
    if scheme == "fp8 by tensor":
        scale = weight.abs().max() / 448
        return {
            "weight": (weight / scale).to(torch.float8_e4m3fn), "weight_scale_inv": scale,
            "activation_scale": torch.tensor(1.0),
        }  # fmt: skip
    if scheme == "compressed-tensors fp8":
        scale = weight.abs().amax(1, keepdim=True) / 448
        return {"weight": (weight / scale).to(torch.float8_e4m3fn), "weight_scale": scale.bfloat16()}
    groups = weight.unflatten(1, (-1, 64))
    scale = (groups.abs().amax(-1) / 7).clamp(min=1e-6)
    numbers = (groups / scale[..., None]).round().clamp(-8, 7).flatten(1).int() + 8
    if scheme == "compressed-tensors int4":
        packed, shape = _packed(numbers), torch.tensor([rows, columns])
        return {"weight_packed": packed, "weight_scale": scale.bfloat16(), "weight_shape": shape}
    if scheme == "awq":  # these two are never loaded in tests: only their names and dtypes matter
        return {"qweight": _packed(numbers.T), "qzeros": _packed(scale.T.int()), "scales": scale.T.half()}
    return {"qweight": _packed(numbers).T, "qzeros": _packed(scale.T.int()), "scales": scale.T.half()}


def _packed(numbers: Tensor) -> Tensor:
    """Put eight 4-bit numbers into an int32, the first into its lowest bits."""
    places = torch.arange(0, 32, 4)
    whole = (numbers.long().unflatten(-1, (-1, 8)) << places).sum(-1)
    return torch.where(whole < 2**31, whole, whole - 2**32).int()
