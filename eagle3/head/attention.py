"""Attention of the unroll, the plain way: one dense score matrix per sample. The judge of every faster one.

At step k a row attends to the step-0 keys of rows up to itself in its sample, and to its own keys of steps 1 … k.

Shapes: T tokens of the pack, R trained rows, K' own steps so far, Q query heads, G key/value heads, C channels.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from eagle3.features.pack import Pack

KeysValues = tuple[Float[Tensor, "N G C"], Float[Tensor, "N G C"]]


def dense_attention(
    query: Float[Tensor, "R Q C"], context: KeysValues, own: list[KeysValues], pack: Pack
) -> Float[Tensor, "R Q C"]:
    outputs = []
    for sample in range(len(pack.sample_ids)):
        tokens = slice(pack.token_bounds[sample], pack.token_bounds[sample + 1])
        rows = slice(pack.row_bounds[sample], pack.row_bounds[sample + 1])
        outputs.append(
            _sample_attention(
                query[rows],
                (context[0][tokens], context[1][tokens]),
                [(key[rows], value[rows]) for key, value in own],
                pack.rows[rows] - tokens.start,
            )
        )
    return torch.cat(outputs)


def _sample_attention(
    query: Float[Tensor, "R Q C"], context: KeysValues, own: list[KeysValues], rows: Int[Tensor, " R"]
) -> Float[Tensor, "R Q C"]:
    key, value = context
    groups, channels = key.shape[1:]
    query = query.unflatten(1, (groups, -1)) * channels**-0.5  # (R, G, Q/G, C)
    scores = torch.einsum("rgqc,tgc->gqrt", query, key)
    future = torch.arange(len(key), device=rows.device) > rows[:, None]
    scores = scores.masked_fill(future, float("-inf"))
    own_scores = [torch.einsum("rgqc,rgc->gqr", query, own_key)[..., None] for own_key, _ in own]
    weights = torch.cat([scores, *own_scores], dim=-1).softmax(-1, dtype=torch.float32).to(value.dtype)
    output = torch.einsum("gqrt,tgc->rgqc", weights[..., : len(key)], value)
    for step, (_, own_value) in enumerate(own):
        output = output + torch.einsum("gqr,rgc->rgqc", weights[..., len(key) + step], own_value)
    return output.flatten(1, 2)
