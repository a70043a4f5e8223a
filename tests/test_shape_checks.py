"""Shapes in signatures are checked while the packages' own tests run."""

import pytest
import torch
from heads import make_head
from jaxtyping import TypeCheckError


def test_tensors_of_other_shapes_than_the_signature_states_are_refused():
    head = make_head()
    embed, hidden = (torch.zeros(rows, head.config.hidden_size, dtype=torch.double) for rows in (3, 4))
    with pytest.raises(TypeCheckError, match="attention_input"):
        head.attention_input(embed, hidden)
