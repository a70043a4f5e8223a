"""Batched decoding by the target: sampling, with a seed for each row.

Shapes: B rows of the batch, T tokens so far, V vocabulary.
"""

from collections.abc import Callable, Set
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from eagle3.adapters.transformers import (
    keep_rows,
    keeps_keys_and_values,
    next_logits,
    preallocated_cache,
    takes_positions,
)
from eagle3.engine.endpoint import Answer
from eagle3.target.facts import rope_depends_on_length

# Finished rows are decoded on, unused, until this share of the batch is done: dropping rows copies the whole cache.
DONE_SHARE = 0.25


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
    drawn: list[int] | None = None,
    count_tokens: Callable[[int], object] = lambda tokens: None,
) -> list[Answer]:
    """Answer each prompt. An answer depends on its prompt and its seed, not on the rows that share the batch.

    `drawn`: how many tokens at the end of each prompt were drawn with its seed before; it continues from there.
    `count_tokens` is called after each step, with the number of answers that it continued."""
    drawn = drawn or [0] * len(prompts)
    if len(prompts) > 1 and alone_because(model):
        options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "stop_ids": stop_ids, "pad_id": pad_id}
        options |= {"temperature": temperature, "top_p": top_p, "top_k": top_k, "count_tokens": count_tokens}
        alone = zip(prompts, seeds, drawn, strict=True)
        return [generate(model, [prompt], seeds=[seed], drawn=[used], **options)[0] for prompt, seed, used in alone]
    tokens, mask = _left_pad(prompts, pad_id, model.device)
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    uniforms = _uniforms(seeds, drawn, max_new_tokens).to(model.device)  # (B, max_new_tokens)
    stops = torch.tensor(sorted(stop_ids), device=model.device)
    written = torch.full((len(prompts), max_new_tokens), pad_id, device=model.device)
    rows = torch.arange(len(prompts), device=model.device)  # the prompt that each row of the batch answers
    done = torch.zeros_like(rows, dtype=torch.bool)
    cache = preallocated_cache(model)
    finished = 0  # rows
    for step in range(max_new_tokens):
        logits = next_logits(model, cache, last=1, input_ids=tokens, attention_mask=mask, position_ids=positions)
        chosen = choose_tokens(
            logits[:, -1].float(), uniforms[rows, step], temperature=temperature, top_p=top_p, top_k=top_k
        )
        written[rows, step] = chosen
        done |= torch.isin(chosen, stops)
        count_tokens(len(rows) - finished)
        finished = int(done.sum())
        if finished == len(rows):
            break
        positions = positions[:, -1:] + 1
        mask = torch.cat([mask, mask.new_ones(len(rows), 1)], dim=1)
        if finished >= DONE_SHARE * len(rows):
            kept = (~done).nonzero().squeeze(1)
            keep_rows(cache, kept)
            chosen, positions, mask, rows, done = chosen[kept], positions[kept], mask[kept], rows[kept], done[kept]
            finished = 0
        tokens = chosen.unsqueeze(1)
    return [Answer(*cut(row, stop_ids, step + 1)) for row in written.tolist()]


def alone_because(model: PreTrainedModel) -> str | None:
    """Return the reason why each prompt must be answered alone, not in a batch; None if there is none."""
    config = model.config.get_text_config(decoder=True)
    if rope_depends_on_length(config):
        return "the longest row of a batch would set the RoPE of all"
    if not takes_positions(model):
        return f"padding would shift the positions of a {config.model_type}"
    if keeps_keys_and_values(model):
        return None
    return f"padding could change the state that a {config.model_type} keeps"


def _uniforms(seeds: list[int], drawn: list[int], count: int) -> Float[Tensor, "B N"]:
    """All the randomness of each row, drawn before decoding, on the CPU: the same on every device."""
    rows = [(torch.Generator().manual_seed(seed), used) for seed, used in zip(seeds, drawn, strict=True)]
    return torch.stack([torch.rand(used + count, generator=each, dtype=torch.float64)[used:] for each, used in rows])


def _left_pad(
    prompts: list[list[int]], pad_id: int, device: torch.device
) -> tuple[Int[Tensor, "B T"], Int[Tensor, "B T"]]:
    ids = [torch.tensor(prompt) for prompt in prompts]
    tokens = pad_sequence(ids, batch_first=True, padding_value=pad_id, padding_side="left")
    mask = pad_sequence([torch.ones_like(each) for each in ids], batch_first=True, padding_side="left")
    return tokens.to(device), mask.to(device)


def cut(token_ids: list[int], stop_ids: Set[int], most: int) -> tuple[list[int], str]:
    """Return the answer up to its end, and the reason for the end: "stop", "length", or "" where there is none yet."""
    for position, token in enumerate(token_ids[:most]):
        if token in stop_ids:
            return token_ids[: position + 1], "stop"
    return token_ids[:most], "length" if len(token_ids) >= most else ""


def choose_tokens(
    logits: Float[Tensor, "B V"], uniforms: Float[Tensor, " B"], *, temperature: float, top_p: float, top_k: int
) -> Int[Tensor, " B"]:
    """The most probable token (temperature 0), or the one where the cumulative probability passes the uniform: uniforms
    drawn before give the same token on every device."""
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
