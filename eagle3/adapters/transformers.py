"""Everything private or unstable that we use of transformers, above all its caches.

Shapes: R rows of a batch, T tokens, V target vocabulary, and of keys and values (R, heads, T, channels).
"""

import copy
import inspect
import json
from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import DynamicCache, GenerationMixin, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from eagle3.adapters.library import Library
from eagle3.errors import InputError

TRANSFORMERS = Library(
    "transformers",
    oldest="5.12",
    newest="5.24",
    parts=(
        "transformers:DynamicCache(config)",
        "transformers.cache_utils:DynamicLayer.update(key_states)",
        "transformers.cache_utils:DynamicLayer.update(value_states)",
        "transformers.cache_utils:DynamicLayer.get_seq_length",
        "transformers.cache_utils:DynamicLayer.batch_select_indices(indices)",
        "transformers.cache_utils:DynamicSlidingWindowLayer",
        "transformers.conversion_mapping:get_model_conversion_mapping(model)",
        "transformers.core_model_loading:WeightRenaming.rename_source_key(source_key)",
        "transformers:GenerationMixin._supports_default_dynamic_cache",
        "transformers.models.llama.modeling_llama:LlamaDecoderLayer.forward(hidden_states)",
        "transformers.models.llama.modeling_llama:LlamaRotaryEmbedding(config)",
        "transformers.quantizers.auto:AUTO_QUANTIZATION_CONFIG_MAPPING",
        "transformers.quantizers.auto:get_hf_quantizer(config)",
        "transformers.quantizers.auto:get_hf_quantizer(weights_only)",
        "transformers.utils.chat_template_utils:render_jinja_template(chat_template)",
        "transformers:PreTrainedTokenizerFast.added_tokens_decoder",
        "transformers:PreTrainedTokenizerFast.backend_tokenizer",
    ),
)

with TRANSFORMERS.uses():
    from transformers import cache_utils
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming
    from transformers.models.llama.modeling_llama import LlamaForCausalLM, LlamaRotaryEmbedding
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, get_hf_quantizer

__all__ = ["LlamaRotaryEmbedding"]
CACHE_ARGUMENTS = ("cache", "past_key_values")  # of `forward`, from transformers 5.24 on and before
CACHE_ROOM = 128  # tokens that a preallocated layer grows by at a time
NO_CACHE = getattr(cache_utils, "DummyLayer", ())  # for layers that keep nothing; older releases have no such class


def require_transformers() -> None:
    """Raise InputError for a transformers that this project cannot work with."""
    TRANSFORMERS.require()
    if cache_argument(LlamaForCausalLM) is None:
        raise TRANSFORMERS.unsupported(f"takes no cache as an argument {' or '.join(CACHE_ARGUMENTS)}")


# --- files and tokenizer ---------------------------------------------------------------------------------------------


def knows_quantization(method: str) -> bool:
    """Say whether transformers loads weights of this `quant_method`."""
    return not {method, f"{method}_4bit"}.isdisjoint(AUTO_QUANTIZATION_CONFIG_MAPPING)


def require_quantizer(config: PreTrainedConfig, device_map: str | None) -> None:
    """Raise transformers' own error for weights whose quantisation needs a package or a GPU that is missing here."""
    get_hf_quantizer(
        config=copy.deepcopy(config), quantization_config=None, device_map=device_map, weights_only=True, user_agent={}
    )


def text_part(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the config of the text decoder, for reading only.

    For a value that differs between layers (Gemma 4's head sizes) it gives the common one, where transformers raises.
    """
    text = copy.deepcopy(config.get_text_config(decoder=True))
    text.allow_global_per_layer_attribute_access = True
    return text


def tokenizer_json(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any] | None:
    """Return the content of tokenizer.json; None for a tokenizer that is not a fast one."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return None if backend is None else json.loads(backend.to_str())


def added_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Return the ids of tokens that are no pieces of text: special ones, and others that are found before a text is
    cut into pieces."""
    return {*tokenizer.added_tokens_decoder, *tokenizer.all_special_ids} - {tokenizer.unk_token_id}


def control_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Return the ids of special tokens, also of those that have no role such as eos, without the unknown token's."""
    special = {token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}
    return special.union(tokenizer.all_special_ids) - {tokenizer.unk_token_id}


# --- the model's forward ---------------------------------------------------------------------------------------------


def layer_input(args: tuple, kwargs: dict[str, Any]) -> Float[Tensor, "R T H"]:
    """Return the hidden states that a decoder layer reads, from the arguments of its forward."""
    states = args[0] if args else kwargs["hidden_states"]
    if states.dim() != 3:
        raise InputError(
            f"the layers of this target pass on states of {states.dim()} dimensions, as with several residual streams, "
            f"and a head reads a single one; choose another target"
        )
    return states


def cache_argument(model: PreTrainedModel | type[PreTrainedModel]) -> str | None:
    """Return the name of the argument of `forward` that takes the cache; None if the model takes none."""
    parameters = inspect.signature(model.forward).parameters
    return next((name for name in CACHE_ARGUMENTS if name in parameters), None)


def takes_positions(model: PreTrainedModel) -> bool:
    """Say whether `forward` is told at which positions its tokens are, which padding on the left shifts."""
    return "position_ids" in inspect.signature(model.forward).parameters


def renamings(model: PreTrainedModel) -> Callable[[str], str]:
    """Return what gives a tensor of a checkpoint the name under which transformers loads it."""
    known = [each for each in get_model_conversion_mapping(model) if isinstance(each, WeightRenaming)]
    return lambda key: reduce(lambda name, each: each.rename_source_key(name)[0], known, key)


def require_cache(model: PreTrainedModel, path: str) -> None:
    """Raise InputError for a model that does not decode with a DynamicCache."""
    can_generate = isinstance(model, GenerationMixin) and model._supports_default_dynamic_cache()  # type: ignore[misc]
    if not can_generate or cache_argument(model) is None:
        raise InputError(
            f"target.path={path} is a {type(model).__name__}, which does not decode with a DynamicCache of "
            f"transformers, so it can neither answer nor decode here; import its answers (answers=imported)"
        )


def next_logits(model: PreTrainedModel, cache: DynamicCache, *, last: int, **inputs: Tensor) -> Float[Tensor, "R N V"]:
    """Return the logits of the `last` tokens of `inputs`, which follow the tokens in `cache` and are added to it."""
    arguments: dict[str, Any] = {str(cache_argument(model)): cache, "use_cache": True, "logits_to_keep": last}
    return model(**arguments, **inputs).logits


# --- caches ----------------------------------------------------------------------------------------------------------


class PreallocatedLayer(DynamicLayer):
    """One layer's keys and values, in buffers with room for more: transformers' own cache copies everything at every
    token."""

    keys: Tensor
    values: Tensor
    used = 0  # tokens in the buffers

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.keys, self.values = key_states[..., :0, :], value_states[..., :0, :]
            self.is_initialized = True
        start, self.used = self.used, self.used + key_states.shape[-2]
        if self.used > self.keys.shape[-2]:
            self.keys = self._with_room(self.keys[..., :start, :])
            self.values = self._with_room(self.values[..., :start, :])
        self.keys[..., start : self.used, :] = key_states
        self.values[..., start : self.used, :] = value_states
        return self.keys[..., : self.used, :], self.values[..., : self.used, :]

    def _with_room(self, states: Tensor) -> Tensor:
        room = self.used - states.shape[-2] + CACHE_ROOM
        return torch.cat([states, states.new_empty(*states.shape[:-2], room, states.shape[-1])], dim=-2)

    def get_seq_length(self) -> int:
        return self.used


class BranchingLayer(PreallocatedLayer):
    """One layer's keys and values, after which a forward of several rows tries several continuations.

    It also replaces layers of sliding windows, which would have dropped what a rejected token pushed out.
    """

    branches: tuple[Tensor, Tensor] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if len(key_states) == 1:
            self.branches = None
            return super().update(key_states, value_states, *args, **kwargs)
        self.branches = key_states, value_states
        return self._branched(self.keys, key_states), self._branched(self.values, value_states)

    def keep(self, row: int, count: int, *, read: int) -> None:
        """Keep the first `count` of the `read` tokens of the latest forward, of one row, and forget the rest."""
        if self.branches is None:
            self.used -= read - count
        else:
            keys, values = (states[row : row + 1, :, :count] for states in self.branches)
            super().update(keys, values)

    def _branched(self, kept: Tensor, states: Tensor) -> Tensor:
        return torch.cat([kept[:, :, : self.used].expand(len(states), -1, -1, -1), states], dim=-2)


def keeps_keys_and_values(model: PreTrainedModel) -> bool:
    """Say whether the model's cache is only keys and values, and no state that each token changes."""
    known = (DynamicLayer, DynamicSlidingWindowLayer, NO_CACHE)
    return all(type(layer) in known for layer in DynamicCache(config=model.config).layers)


def preallocated_cache(model: PreTrainedModel) -> DynamicCache:
    """Return the model's own kind of cache with preallocated layers for full attention; other layers stay."""
    return _exchanged(model, lambda layer: PreallocatedLayer() if type(layer) is DynamicLayer else layer)


def branching_cache(model: PreTrainedModel) -> DynamicCache:
    """Return a cache for `keep_branch`, for a model that keeps only keys and values."""
    return _exchanged(model, lambda layer: layer if type(layer) is NO_CACHE else BranchingLayer())


def _exchanged(model: PreTrainedModel, exchange: Callable[[Any], Any]) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    cache.layers = [exchange(layer) for layer in cache.layers]
    return cache


def keep_branch(cache: DynamicCache, row: int, count: int, *, read: int) -> None:
    """Keep the first `count` of the `read` tokens of the latest forward, of one row, and forget the rest."""
    for layer in cache.layers:
        if isinstance(layer, BranchingLayer):
            layer.keep(row, count, read=read)


def keep_rows(cache: DynamicCache, rows: Int[Tensor, " kept"]) -> None:
    """Drop all other rows of the batch."""
    for layer in cache.layers:
        if isinstance(layer, DynamicLayer):
            layer.batch_select_indices(rows)
