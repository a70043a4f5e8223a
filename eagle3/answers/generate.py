"""Batched decoding by the target, a seed per row. Shapes: B rows of the batch, T tokens so far, V vocabulary."""

from collections.abc import Set
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from eagle3.target.capture import rope_depends_on_length

# Finished rows are decoded on, unused, until this share of the batch is done: dropping rows copies the whole cache.
DONE_SHARE = 0.25
CACHE_ROOM = 128  # tokens that the cache grows by at a time


@dataclass(frozen=True)
class Answer:
    """`token_ids` holds the stop token when `finish_reason` is "stop"; otherwise the answer was cut ("length")."""

    token_ids: list[int]
    finish_reason: str


@torch.inference_mode()
def generate(
    model: PreTrainedModel,
    prompts: list[list[int]],
    *,
    seeds: list[int],
    max_new_tokens: int,
    temperature: float,
    top_p: float,
    top_k: int,
    stop_ids: Set[int],
    pad_id: int,
) -> list[Answer]:
    """Answer each prompt. An answer depends on its prompt and its seed, not on the rows that share the batch."""
    if len(prompts) > 1 and rope_depends_on_length(model.config.get_text_config(decoder=True)):
        options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "stop_ids": stop_ids, "pad_id": pad_id}
        options |= {"temperature": temperature, "top_p": top_p, "top_k": top_k}
        alone = zip(prompts, seeds, strict=True)
        return [generate(model, [prompt], seeds=[seed], **options)[0] for prompt, seed in alone]
    tokens, mask = _left_pad(prompts, pad_id, model.device)
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    uniforms = _uniforms(seeds, max_new_tokens).to(model.device)  # (B, max_new_tokens)
    stops = torch.tensor(sorted(stop_ids), device=model.device)
    written = torch.full((len(prompts), max_new_tokens), pad_id, device=model.device)
    rows = torch.arange(len(prompts), device=model.device)  # the prompt that each row of the batch answers
    done = torch.zeros_like(rows, dtype=torch.bool)
    cache = preallocated_cache(model)
    for step in range(max_new_tokens):
        output = model(
            input_ids=tokens,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        chosen = choose_tokens(
            output.logits[:, -1].float(), uniforms[rows, step], temperature=temperature, top_p=top_p, top_k=top_k
        )
        written[rows, step] = chosen
        done |= torch.isin(chosen, stops)
        if done.all():
            break
        positions = positions[:, -1:] + 1
        mask = torch.cat([mask, mask.new_ones(len(rows), 1)], dim=1)
        if done.sum() >= DONE_SHARE * len(rows):
            kept = (~done).nonzero().squeeze(1)
            cache.batch_select_indices(kept)
            chosen, positions, mask, rows, done = chosen[kept], positions[kept], mask[kept], rows[kept], done[kept]
        tokens = chosen.unsqueeze(1)
    return [_cut(row, stop_ids, steps=step + 1) for row in written.tolist()]


class PreallocatedLayer(DynamicLayer):
    """One layer's keys and values in buffers with room: the library's own layer copies all of them at each token."""

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


def choose_tokens(
    logits: Float[Tensor, "B V"], uniforms: Float[Tensor, " B"], *, temperature: float, top_p: float, top_k: int
) -> Int[Tensor, " B"]:
    """The most probable token (temperature 0), or the one where the cumulative probability passes the uniform."""
    if temperature == 0:
        return logits.argmax(dim=-1)
    probabilities = sampling_probabilities(logits, temperature=temperature, top_p=top_p, top_k=top_k)
    # float64, because a uniform in [0, 1) times the total must stay under the total, and V roundings add up.
    cumulative = probabilities.double().cumsum(dim=-1)
    threshold = uniforms.unsqueeze(1) * cumulative[:, -1:]
    return torch.searchsorted(cumulative, threshold, right=True).squeeze(1)


def sampling_probabilities(
    logits: Float[Tensor, "B V"], *, temperature: float, top_p: float, top_k: int
) -> Float[Tensor, "B V"]:
    """Temperature, then the `top_k` most probable tokens, then the fewest that hold `top_p` of what is left."""
    logits = logits / temperature
    if 0 < top_k < logits.shape[-1]:
        smallest_kept = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < smallest_kept, -torch.inf)
    probabilities = logits.softmax(dim=-1)
    if top_p < 1:
        ordered, tokens = probabilities.sort(dim=-1, descending=True)
        beyond = ordered.cumsum(dim=-1) - ordered >= top_p
        probabilities = probabilities.masked_fill(torch.zeros_like(beyond).scatter(1, tokens, beyond), 0.0)
    return probabilities


def _uniforms(seeds: list[int], count: int) -> Float[Tensor, "B N"]:
    """All the randomness of each row, drawn before decoding, on the CPU: the same on every device."""
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    return torch.stack([torch.rand(count, generator=generator, dtype=torch.float64) for generator in generators])


def _left_pad(
    prompts: list[list[int]], pad_id: int, device: torch.device
) -> tuple[Int[Tensor, "B T"], Int[Tensor, "B T"]]:
    longest = max(len(prompt) for prompt in prompts)
    padding = [longest - len(prompt) for prompt in prompts]
    tokens = [[pad_id] * pad + prompt for pad, prompt in zip(padding, prompts, strict=True)]
    mask = [[0] * pad + [1] * len(prompt) for pad, prompt in zip(padding, prompts, strict=True)]
    return torch.tensor(tokens, device=device), torch.tensor(mask, device=device)


def _cut(token_ids: list[int], stop_ids: Set[int], *, steps: int) -> Answer:
    for position, token in enumerate(token_ids[:steps]):
        if token in stop_ids:
            return Answer(token_ids[: position + 1], "stop")
    return Answer(token_ids[:steps], "length")
