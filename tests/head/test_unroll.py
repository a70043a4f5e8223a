"""The unroll against decoding with a cache, which tests/decoding/test_speculate.py compares with a plain reference."""

from dataclasses import replace

import pytest
import torch
from heads import EMBEDDING, TEACHER_HEAD, make_head, ragged_samples, ttt_batch
from stores import random_sample
from torch import Tensor

from eagle3.features.sample import Sample
from eagle3.head.anchors import anchors_and_steps
from eagle3.head.draft_head import DraftHead
from eagle3.head.kv_cache import CachedHead
from eagle3.head.loss import UnrollLoss
from eagle3.head.unroll import unroll

STEPS = 4
OPTIONS = [{}, {"fc_norm": True}, {"norm_before_fc": True}, {"norm_output": True}, {"num_heads": 2},
           {"norm_before_residual": True}]  # fmt: skip


def decode_chain(head: DraftHead, sample: Sample, anchor: int, steps: int) -> list[Tensor]:
    """Outputs of the chain that starts at `anchor`: prefill up to it with a cache, then draft with the true tokens."""
    ids, cached = sample.input_ids, CachedHead(head, EMBEDDING, anchor + 1)
    hidden = cached.confirm(sample.aux_hidden_states[: anchor + 1], ids[1 : anchor + 2].tolist())
    outputs, path = [hidden[0]], cached.root()
    for step in range(1, steps):
        hidden, path = cached.step(hidden, ids[anchor + 1 + step, None], path)
        outputs.append(hidden[0])
    return outputs


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_every_step_equals_step_by_step_decoding_with_a_cache(options):
    head = make_head(**options)
    batch = ttt_batch(ragged_samples(), ttt_steps=STEPS)
    outputs = unroll(head, EMBEDDING, batch, STEPS)
    compared = 0
    for number, sample in enumerate(ragged_samples()):
        anchors, steps_of = anchors_and_steps(sample.turns, STEPS)
        for index, (anchor, steps) in enumerate(zip(anchors.tolist(), steps_of.tolist(), strict=True)):
            chain = decode_chain(head, sample, anchor, steps)
            for step in range(steps):
                torch.testing.assert_close(outputs[step][batch.anchor_bounds[number] + index], chain[step])
                compared += 1
    assert compared == int(batch.anchor_steps.sum()) > 40


def test_gradient_reaches_the_last_prompt_token_and_nothing_after_the_end_of_a_turn():
    """Through queries alone: keys and values of the prompt are used by every later anchor, so they are cut off here."""
    turns = [0, 0, 0, 1, 1, 1, 1, 0, 0, 2, 2, 0]
    sample = random_sample(turns)
    head = make_head()
    # Only the anchor's own path is left: with values of zero attention returns nothing.
    head.midlayer.self_attn.v_proj.weight.data.zero_()
    batch = ttt_batch([sample], ttt_steps=STEPS)
    aux = batch.pack.aux_hidden_states.clone().requires_grad_()
    batch = replace(batch, pack=replace(batch.pack, aux_hidden_states=aux))
    batch.pack.teacher_argmax[:] = head.draft_ids[0]  # every anchor counts
    loss, _ = UnrollLoss(decay=1.0, normalize="token")(head, unroll(head, EMBEDDING, batch, STEPS), TEACHER_HEAD, batch)
    loss.backward()
    # Anchors 2 … 4 predict x_4 … x_6 (x_3 is sampled before the first chain starts); anchor 8 predicts x_10.
    assert aux.grad.abs().sum(1).nonzero().squeeze(1).tolist() == [2, 3, 4, 8]
