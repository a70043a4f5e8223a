"""Checks of a checkpoint's files, before a weight is read: whether it can be a target."""

from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from eagle3.adapters.transformers import knows_quantization
from eagle3.errors import InputError
from eagle3.storage.typed_json import JsonObject, Length, Size

PLAIN_CHECKPOINT = "give the checkpoint that it was quantised from, or one that transformers can load"
OTHER_WAYS = (
    "install what that names, give a copy without quantisation, or let SGLang answer and capture on a GPU: "
    "answers=sglang features=sglang"
)
# ModelOpt, AutoGPTQ, AutoAWQ
QUANTIZATION_KEYS = ("compression_config", "quantization")  # older compressed-tensors, MLX
QUANTIZATION_FILES = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")


class WrongWeights(InputError):
    """Weights that are not what was trained, or not all of it, whatever computes with them."""


def stale_lm_head(path: str) -> WrongWeights:
    """Return the error of a target that has an lm_head of its own, though its config says that it has none."""
    return WrongWeights(
        f"target.path={path}: tie_word_embeddings=true in its config.json, but its lm_head differs from its embedding: "
        f"transformers computes with the one, servers with the other; set tie_word_embeddings=false if both were "
        f"trained, else remove the lm_head from its weights"
    )


def require_no_adapter(path: str, folder: Path) -> None:
    """Raise InputError for a PEFT adapter, which servers load in addition to a model and transformers may leave out."""
    if (folder / "adapter_config.json").exists():
        raise InputError(
            f"target.path={path} is an adapter (adapter_config.json), a target is one model; merge it into its base "
            f"(PEFT's merge_and_unload, then save_pretrained) and give that folder"
        )


class _Quantization(JsonObject):
    quant_method: str | None = None
    load_in_8bit: bool | None = None
    load_in_4bit: bool | None = None


Sizes = Size | list[Size | None] | None  # a list: of each layer
Layers = Annotated[int, Field(ge=1, le=4096)]


class _TextConfig(JsonObject):
    num_hidden_layers: Layers | None = None
    hidden_size: Size | None = None
    vocab_size: Size | None = None
    intermediate_size: Sizes = None
    moe_intermediate_size: Sizes = None
    num_attention_heads: Sizes = None
    num_key_value_heads: Sizes = None
    head_dim: Sizes = None
    num_experts: Sizes = None
    num_local_experts: Sizes = None
    n_routed_experts: Sizes = None
    max_position_embeddings: Length | None = None
    quantization_config: _Quantization | None = None
    dtype: str | None = None
    torch_dtype: str | None = None


class TargetJson(_TextConfig):
    """config.json of a target, as far as it is read here; transformers reads the rest."""

    text_config: _TextConfig | None = None


TokenId = Annotated[int, Field(ge=0, lt=2**24)]


class GenerationJson(JsonObject):
    eos_token_id: TokenId | list[TokenId] | None


class TokenizerJson(JsonObject):
    model_max_length: float


def read_quantization(config: dict[str, Any]) -> str | None:
    """Return the scheme that config.json says the weights are quantised by, with its bits or its format."""
    stated = (part.get("quantization_config") for part in config_and_text_config(config))
    found = next((each for each in stated if each is not None), None)
    if found is None:
        return None
    loaded_in = 8 if found.get("load_in_8bit") else 4 if found.get("load_in_4bit") else None
    bits = loaded_in or found.get("bits")
    method = found.get("quant_method") or ("bitsandbytes" if loaded_in else None)
    more = f"{bits} bits" if bits else found.get("format") or found.get("quant_type")
    return f"{method} ({more})" if isinstance(more, str) else str(method)


def config_and_text_config(config: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    return config, config.get("text_config") or {}


def require_known_quantization(path: str, folder: Path, config: dict[str, Any]) -> None:
    """Raise InputError for weights that are quantised in a way that transformers would silently skip."""
    quantization = read_quantization(config)
    if quantization is None:
        extra_file = next((name for name in QUANTIZATION_FILES if (folder / name).exists()), None)
        extra_key = next((key for key in QUANTIZATION_KEYS if config.get(key)), None)
        if found := extra_file or extra_key:
            raise InputError(
                f"target.path={path} is quantised ({found}), but its config.json has no "
                f"quantization_config: transformers would load weights without their scales; {PLAIN_CHECKPOINT}"
            )
    elif quantization.startswith("None"):
        raise InputError(
            f"target.path={path}: quantization_config in its config.json names no quant_method, as in a copy for MLX; "
            f"{PLAIN_CHECKPOINT}, or, if its weights are not quantised, remove that key"
        )
    elif not knows_quantization(method := quantization.partition(" ")[0]):
        raise InputError(
            f"target.path={path} is quantised by quant_method={method}, which this version of transformers does not "
            f"know: it would load weights without their scales; {PLAIN_CHECKPOINT}"
        )
