"""A batch and its pack as one thing that moves."""

import torch
from heads import ragged_samples, ttt_batch


def test_nested_tensors_are_listed_and_moved_with_their_batch():
    batch = ttt_batch(ragged_samples(), ttt_steps=3)
    for each, device in ((batch, "cpu"), (batch.to(torch.device("meta")), "meta")):
        nested = [each.pack.input_ids, *(part.query_bounds for part in each.segments)]
        assert len(nested) > 2 and {id(tensor) for tensor in nested} < {id(tensor) for tensor in each.tensors()}
        assert {tensor.device.type for tensor in each.tensors()} == {device}
