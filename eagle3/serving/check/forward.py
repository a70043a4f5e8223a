"""One forward of a draft head over a whole text, without any cache.

Shapes: T tokens, H hidden size.
"""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from eagle3.head.draft_head import DraftHead


def plain_forward(head: DraftHead, hidden: Float[Tensor, "T H"], embed: Float[Tensor, "T H"]) -> Float[Tensor, "T H"]:
    """Return the head's output at every row, from `hidden` and the embeddings beside it; a row reads those before it.

    On the target's own features, `head.fuse(aux)`, these are the outputs before the first draft."""
    positions = torch.arange(len(hidden), device=hidden.device)
    x = head.attention_input(embed, hidden)
    parts = (head.queries(x, positions), *head.keys_values(x, positions))
    query, key, value = (part.transpose(0, 1) for part in parts)  # heads first
    attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    return head.output(hidden, attended.transpose(0, 1))
