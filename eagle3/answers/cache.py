"""Keys and values of a Hugging Face model in buffers with room: its own cache copies all of them at each token."""

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

CACHE_ROOM = 128  # tokens that the cache grows by at a time


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
