"""What validation counts along known answers is what decoding them measures."""

import numpy as np
import torch
from fitted_head import LAYERS, NEW_TOKENS, PROMPT, fitted_head, sample_with_features, small_target
from heads import ttt_batch

from eagle3.decoding.speculate import measure, plain_greedy
from eagle3.features.sample import Sample
from eagle3.head.loss import UnrollLoss
from eagle3.head.simulate_decoding import simulate_rounds
from eagle3.head.unroll import unroll

PROMPTS = [PROMPT, PROMPT[4:], PROMPT[9:]]


def greedy_sample(target, prompt) -> Sample:
    ids = torch.tensor(prompt + plain_greedy(target, prompt, NEW_TOKENS))
    turns = torch.tensor([0] * len(prompt) + [1] * (len(ids) - len(prompt)))
    return sample_with_features(target, LAYERS, ids, turns)


def test_rounds_of_validation_are_those_of_decoding():
    target = small_target()
    head = fitted_head(target, PROMPT)
    batch = ttt_batch([greedy_sample(target, prompt) for prompt in PROMPTS], ttt_steps=3)
    outputs = unroll(head, target.embedding, batch, 3)
    loss = UnrollLoss(decay=1.0, normalize="token")
    _, metrics = loss(head, outputs, target.lm_head[head.draft_ids], batch)
    for steps in (1, 3):
        counts = simulate_rounds(metrics.accepted.numpy(), batch.anchors.numpy(), steps=steps)
        verifications, accepted = sum(counts), sum(drafts * count for drafts, count in enumerate(counts))
        measured = measure(
            target, head, LAYERS, PROMPTS, steps=steps, topk=1, draft_tokens=None, max_new_tokens=NEW_TOKENS,
            temperature=0.0, seed=0, progress=None,
        )  # fmt: skip
        decoded = [answer.accepted for answer in measured.decoded]
        # The last round of an answer may accept drafts behind its end, which no row is trained on.
        assert verifications <= measured.verifications <= verifications + len(PROMPTS)
        assert accepted <= sum(map(sum, decoded)) <= accepted + steps * len(PROMPTS)
        assert 0 < accepted < steps * verifications


def test_a_round_begins_behind_the_token_that_the_target_gives():
    # Rows 4 … 9 of one turn: 2 accepted at row 4, then row 7 with none, row 8 with one. A second turn: row 20.
    accepted = np.array([2, 0, 0, 0, 1, 3, 1])
    rows = np.array([4, 5, 6, 7, 8, 9, 20])
    assert simulate_rounds(accepted, rows, steps=3) == [1, 2, 1, 0]
    assert simulate_rounds(accepted, rows, steps=1) == [2, 3]
    # A turn that begins one row behind the end of another: its first row begins a round, whatever came before.
    assert simulate_rounds(np.array([2, 0]), np.array([4, 6]), steps=3) == [1, 0, 1, 0]
