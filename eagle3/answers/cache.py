"""Keys and values of a Hugging Face model in buffers with room: its own cache copies all of them at each token."""

import inspect
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionCacheLayerMixin
from transformers.modeling_outputs import CausalLMOutputWithPast

from eagle3.errors import InputError
from eagle3.target.facts import rope_depends_on_length

CACHE_ARGUMENTS = ("cache", "past_key_values")  # of a model's forward: since transformers 5.24, and before
CACHE_ROOM = 128  # tokens that the cache grows by at a time
KEYS_AND_VALUES = (DynamicLayer, DynamicSlidingWindowLayer)  # of every token, for a while at least
WITHOUT_CACHE = "DummyLayer"  # stands for layers that use another layer's cache, or need none
# Families with a state instead of keys and values (linear attention, Mamba, short convolutions) whose padding leaves no
# trace in it: tests/answers/test_hybrid.py runs each in batches.
STATE_WITHOUT_PADDING = frozenset(
    {"qwen3_next", "qwen3_5_text", "nemotron_h", "jamba", "bamba", "lfm2", "falcon_h1", "granitemoehybrid"}
)


class PreallocatedLayer(DynamicLayer):
    """One layer's keys and values."""

    keys: Tensor
    values: Tensor
    used = 0  # tokens in the buffers

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
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


def preallocated_cache(model: PreTrainedModel) -> DynamicCache:
    """The model's own kind of cache, its plain attention layers exchanged (sliding windows and others stay)."""
    cache = DynamicCache(config=model.config)
    cache.layers = [PreallocatedLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


def require_cache(model: PreTrainedModel, path: str) -> None:
    """Raise InputError for a model that decodes in a way of its own, which no cache of transformers could follow."""
    if cache_argument(model) is None or not model._supports_default_dynamic_cache():  # type: ignore[operator]
        raise InputError(
            f"target.path={path} is a {type(model).__name__}, which keeps its past otherwise than in a cache of "
            f"transformers, so it can neither answer nor decode here; import its answers (answers=imported)"
        )


def cache_argument(model: PreTrainedModel) -> str | None:
    """Return the name of the argument of `forward` that takes the cache; None if the model takes none."""
    parameters = inspect.signature(model.forward).parameters
    return next((name for name in CACHE_ARGUMENTS if name in parameters), None)


def forward_with_cache(model: PreTrainedModel, cache: DynamicCache, **inputs: Any) -> CausalLMOutputWithPast:
    """Run the model on `inputs`, the tokens that follow those in `cache`, and add them to it."""
    return model(**{cache_argument(model): cache}, use_cache=True, **inputs)  # type: ignore[misc]


def keeps_keys_and_values(cache: DynamicCache) -> bool:
    """Say whether all of the past is keys and values, and no state that each token changes."""
    return all(type(layer) in KEYS_AND_VALUES or type(layer).__name__ == WITHOUT_CACHE for layer in cache.layers)


def alone_because(model: PreTrainedModel) -> str | None:
    """Say why each prompt must be answered alone, not in a batch; None if it need not."""
    config = model.config.get_text_config(decoder=True)
    if rope_depends_on_length(config):
        return "the longest row of a batch would set the RoPE of all"
    if config.model_type in STATE_WITHOUT_PADDING or keeps_keys_and_values(DynamicCache(config=model.config)):
        return None
    return f"padding could change the state that a {config.model_type} keeps"


def keep_rows(cache: DynamicCache, rows: Int[Tensor, " kept"]) -> None:
    """Drop all other rows of the batch. States of transformers can be reordered, but not selected from by its cache."""
    for layer in cache.layers:
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            LinearAttentionCacheLayerMixin.reorder_cache(layer, rows)  # type: ignore[arg-type]
        if isinstance(layer, DynamicLayer):
            layer.batch_select_indices(rows)
