"""The frozen target, loaded.

Shapes: H hidden size, V target vocabulary."""

import gc
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
)

from eagle3.adapters.transformers import require_quantizer
from eagle3.errors import InputError, first_line
from eagle3.target.checkpoint_files import OTHER_WAYS, PLAIN_CHECKPOINT, WrongWeights, stale_lm_head
from eagle3.target.device import resolve_device
from eagle3.target.facts import TargetConfig, require_sizes, target_config
from eagle3.target.files import GET_AGAIN, TargetFiles, read_target_files
from eagle3.target.sanity_check import require_health


class NotLoadable(InputError):
    """A quantised target that transformers does not load on this machine."""


@dataclass(frozen=True, eq=False)
class Target(TargetFiles):
    """A frozen causal language model with its files. `decoder` is its text part without the `lm_head`.

    `checkpoint_dtype` is what is served, whatever it was loaded in here."""

    model: PreTrainedModel
    decoder: nn.Module

    @property
    def device(self) -> torch.device:
        """Device of token ids and features; a balanced model has its layers on others too."""
        return self.embedding.device

    @property
    def layers(self) -> nn.ModuleList:
        return self.decoder.layers  # type: ignore[return-value]

    @property
    def embedding(self) -> Float[Tensor, "V H"]:
        """The matrix as stored; Gemma scales its rows by √H when it looks them up."""
        return self.model.get_input_embeddings().weight  # type: ignore[return-value]

    @property
    def lm_head(self) -> Float[Tensor, "V H"]:
        return self.model.get_output_embeddings().weight  # type: ignore[return-value]

    @cached_property
    def facts(self) -> TargetConfig:
        return target_config(self.text_config, len(self.lm_head), self.checkpoint_dtype)


# --- loading ---------------------------------------------------------------------------------------------------------


def load_target(
    *,
    path: str | None,
    revision: str | None = None,
    dtype: str = "auto",
    device: str = "auto",
    attention: str | None = None,
    trust_remote_code: bool = False,
    check_health: bool = True,
) -> Target:
    """Load a target from a local folder or the Hugging Face hub, in eval mode, without gradients."""
    place = resolve_device(device)
    precision = resolved_dtype(dtype, on_cpu=place is not None and place.type == "cpu")
    files = read_target_files(path=path, revision=revision, trust_remote_code=trust_remote_code)
    placement = {"device_map": "auto"} if place is None else {}
    loading = {"trust_remote_code": trust_remote_code, "dtype": precision, "attn_implementation": attention}
    model = _load_model(files, {**loading, **placement})
    if place is not None:
        model.to(place)  # type: ignore[arg-type]
    model.eval().requires_grad_(False)
    if check_health:
        try:
            require_health(model, files.tokenizer, files.path)
        except InputError:
            raise
        except (TypeError, ValueError) as error:  # a diffusion model, say
            raise InputError(
                f"target.path={files.path} is a {type(model).__name__}, which does not compute the next tokens of a "
                f"text ({first_line(error)}); choose a causal language model"
            ) from error
        except RuntimeError as error:
            if files.quantization is None:
                raise
            raise NotLoadable(
                f"target.path={files.path} is quantised ({files.quantization}) and cannot compute in "
                f"target.dtype={precision} ({first_line(error)}); try target.dtype=bfloat16, or {OTHER_WAYS}"
            ) from None
    return Target(**files.stated(), model=model, decoder=find_decoder(model, files.path))


@lru_cache(maxsize=1)
def loaded_target(**settings: Any) -> Target:
    """Load a target once for all stages of this process."""
    return load_target(**settings)


def unload() -> None:
    """Give the GPU back what a target that is no longer used held."""
    loaded_target.cache_clear()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def resolved_dtype(dtype: str, *, on_cpu: bool) -> str:
    """Return the name of the dtype that a target is loaded in; "auto" is the checkpoint's."""
    # CPUs are slow in bf16, and fp32 makes greedy decoding repeatable
    return "float32" if dtype == "auto" and on_cpu else dtype


def require_loadable(files: TargetFiles, *, device: str) -> None:
    """Raise InputError for weights in files that transformers does not look for, and NotLoadable for a quantised target
    that needs what this machine lacks; reads no weights."""
    if files.quantization is None:
        return files.tensors.require_known_names()
    try:
        require_quantizer(files.config, "auto" if resolve_device(device) is None else None)
    except Exception as error:
        raise not_loadable(f"target.path={files.path}", files.quantization, error) from error


def not_loadable(keys: str, scheme: str | None, error: Exception) -> NotLoadable:
    return NotLoadable(
        f"{keys} is quantised ({scheme}), and transformers cannot load it here ({first_line(error)}); {OTHER_WAYS}"
    )


def _loader(files: TargetFiles) -> Any:
    # Some multimodal models (Mistral 3.1) are not registered as causal models; their text part is one all the same.
    image_model = type(files.config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    causal_model = type(files.config) in MODEL_FOR_CAUSAL_LM_MAPPING or not image_model
    return AutoModelForCausalLM if causal_model else AutoModelForImageTextToText


def empty_model(files: TargetFiles) -> PreTrainedModel:
    """Build the target without memory for its weights, for its names and shapes."""
    try:
        with torch.device("meta"):
            return _loader(files).from_config(files.config, trust_remote_code=files.trust_remote_code)
    except Exception as error:  # of code that comes with the model, too
        raise InputError(
            f"target.path={files.path}: transformers builds no model from its config.json ({first_line(error)}); "
            f"{GET_AGAIN}"
        ) from error


def _load_model(files: TargetFiles, options: dict[str, Any]) -> PreTrainedModel:
    loader = _loader(files)
    if files.quantization is None:  # other schemes have files of their own
        files.tensors.require_known_names()
    files.tensors.require_files()  # transformers' own errors name no file
    # Other shapes are refused below: transformers' own error names no tensor.
    options |= {"use_safetensors": True, "output_loading_info": True, "ignore_mismatched_sizes": True}
    try:  # safetensors only: other weight files are pickles
        model, report = loader.from_pretrained(files.tensors.folder, **options)
    except Exception as error:  # of code that comes with the model, too
        attention = options["attn_implementation"]
        keys = f"target.path={files.path}" + (f" target.attention={attention}" if attention else "")
        if scheme := files.quantization:
            raise not_loadable(keys, scheme, error) from error
        raise InputError(f"{keys} cannot be loaded: {first_line(error)}") from error
    if report["missing_keys"]:  # transformers only warns, and would continue with random numbers
        missing, unknown = sorted(report["missing_keys"]), sorted(report["unexpected_keys"])
        remedy = "get the whole checkpoint"
        if unknown:
            remedy += (
                f", or, if the names of its {len(unknown)} other tensors, e.g. {unknown[0]}, are of a wrapper (PEFT, "
                f"DDP, torch.compile), merge or unwrap the model and save it again"
            )
        raise WrongWeights(f"target.path={files.path} lacks {len(missing)} weights, e.g. {missing[0]}; {remedy}")
    if others := sorted(report["mismatched_keys"]):
        name, stored, expected = others[0]
        raise WrongWeights(
            f"target.path={files.path} holds {len(others)} tensors of another shape than config.json says, e.g. "
            f"{name}: {[*stored]} instead of {[*expected]}; get config.json and weights of one model"
        )
    decoder: Any = find_decoder(model, files.path)
    unexpected = sorted(report["unexpected_keys"])
    if layer := uncounted_layer(model, decoder, unexpected):
        raise WrongWeights(
            f"target.path={files.path}: config.json says that the model has {len(decoder.layers)} layers, and its "
            f"weights also hold {layer}; correct num_hidden_layers, or save the shorter model without it"
        )
    if unused := unused_weights(model, decoder, unexpected):
        raise InputError(
            f"target.path={files.path} holds {len(unused)} tensors in layers that transformers computes without them, "
            f"e.g. {unused[0]}: a scale or a part that would be left out; {PLAIN_CHECKPOINT}"
        )
    if any(parameter.is_meta for parameter in model.parameters()):
        raise InputError(
            "target.device=balanced: the target does not fit the GPUs; use more of them or a smaller dtype"
        )
    # transformers unties what the files hold two of; a quantised lm_head, which is never tied, has no `weight`.
    if is_tied(empty_model(files)) and not is_tied(model):
        raise stale_lm_head(files.path)
    return model


def is_tied(model: PreTrainedModel) -> bool:
    return model.get_output_embeddings().weight is model.get_input_embeddings().weight


def uncounted_layer(model: PreTrainedModel, decoder: nn.Module, unexpected: Iterable[str]) -> str | None:
    """Return the name of a layer like the model's own that a checkpoint holds after the last one that is computed.

    Extra layers that predict several tokens are no such: they have parts that the others lack."""
    layers: Any = decoder.layers
    start = next(f"{name}." for name, part in model.named_modules() if part is layers)
    parts_of_own = {name for layer in layers for name in layer.state_dict()}
    parts_of_more: dict[str, set[str]] = {}
    for key in unexpected:
        if key.startswith(start):
            index, _, part = key.removeprefix(start).partition(".")
            parts_of_more.setdefault(index, set()).add(part)
    return next((f"{start}{index}" for index, parts in parts_of_more.items() if parts <= parts_of_own), None)


def unused_weights(model: PreTrainedModel, decoder: nn.Module, unexpected: Iterable[str]) -> list[str]:
    """Return those keys of a checkpoint that the model does not take though they stand inside a part that it computes.

    Keys elsewhere are no loss: image towers, extra layers that predict several tokens."""
    layers: nn.ModuleList = decoder.layers  # type: ignore[assignment]
    parts = {*layers, *decoder.children(), model.get_output_embeddings()} - {layers}
    names = tuple(f"{name}." for name, part in model.named_modules() if part in parts)
    prefix = f"{model.base_model_prefix}."  # which checkpoints of the model without lm_head leave out
    return [
        key
        for key in unexpected
        if (key.startswith(names) or f"{prefix}{key}".startswith(names))
        and not key.endswith("rotary_emb.inv_freq")  # computed from the config
    ]


def find_decoder(model: PreTrainedModel, path: str) -> nn.Module:
    decoder = model.get_decoder()
    if not hasattr(decoder, "layers"):  # Llama 4 answers with the whole model
        decoder = getattr(decoder, "model", decoder)
    if not isinstance(getattr(decoder, "layers", None), nn.ModuleList) or model.get_output_embeddings() is None:
        kind = type(model).__name__
        raise InputError(f"target.path={path} is a {kind}, which has no list of decoder layers with an lm_head on top")
    ends: list[Any] = [model.get_input_embeddings(), model.get_output_embeddings()]
    text_config = model.config.get_text_config(decoder=True)
    require_sizes(text_config, path)
    hidden_size = text_config.hidden_size
    for width in (end.weight.shape[-1] for end in ends):
        if width != hidden_size:  # OPT-350m projects in between
            raise InputError(
                f"target.path={path} has embeddings of width {width} and a hidden size of {hidden_size}, and draft "
                f"heads need both to be the same; choose another target"
            )
    return decoder
