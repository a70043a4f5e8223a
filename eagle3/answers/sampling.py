"""From logits to tokens, by uniforms drawn before: the same token on every device.

Shapes: B rows of the batch, V vocabulary.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor


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
