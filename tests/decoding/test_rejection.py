"""Replayed rejection sampling follows the law of the sampler itself, enumerated on a vocabulary of five tokens."""

from functools import cache

import pytest
import torch
from fitted_head import LAYERS, SMALL, chain_output, make_target
from transformers import LlamaConfig

from eagle3.decoding.replay import answer, replay_rejection
from eagle3.decoding.speculate import Speculator
from eagle3.head.draft_head import DraftHead, HeadConfig
from eagle3.target.capture import Capture

TOKENS, TEMPERATURE, NEW_TOKENS, ANSWERS = 5, 8.0, 4, 3000
PROMPT = [1, 3, 0, 2]


@pytest.fixture(scope="module")
def world():
    """A target and a head of random weights, in float64, and the probabilities of each after any tokens."""
    target = make_target(LlamaConfig(**{**SMALL.to_dict(), "vocab_size": TOKENS, "eos_token_id": 4}))
    target.model.double()
    target.__dict__["stop_ids"] = frozenset([4])
    config = HeadConfig(
        num_captured_layers=3, hidden_size=32, intermediate_size=48, num_heads=4, num_kv_heads=2, head_dim=8,
        vocab_size=TOKENS, draft_vocab_size=TOKENS, rms_norm_eps=1e-5, max_position_embeddings=128, fc_norm=True,
        norm_output=False, rope_parameters={"rope_type": "default", "rope_theta": 100.0},
    )  # fmt: skip
    torch.manual_seed(4)
    order = torch.tensor([3, 0, 4, 1, 2])  # as where a trainer sorts tokens by frequency
    head = DraftHead(config, order).double().requires_grad_(False)
    for parameter in [*head.midlayer.parameters(), head.lm_head.weight]:
        torch.nn.init.normal_(parameter, std=0.3)

    @cache
    def target_law(ids):
        logits = target.model(torch.tensor([ids])).logits[0, -1]
        return (logits / TEMPERATURE).softmax(-1).tolist()

    @cache
    def draft_law(ids, root):
        """Of the token behind `ids`, in a round whose root is the token at that place."""
        aux = Capture(target, LAYERS)(torch.tensor([ids[:root]]), [root])[0].aux_hidden_states
        logits = head.logits(chain_output(head, target, aux, [*ids], root - 1))
        return torch.zeros(TOKENS).double().scatter(0, order, (logits / TEMPERATURE).softmax(-1)).tolist()

    return target, head, target_law, draft_law


def gained(world, steps):
    """The verifications and the accepted drafts to expect of the sampler, and what it says, by enumeration."""
    _, _, target_law, draft_law = world
    said = {}

    def ended(ids):
        return len(ids) - len(PROMPT) >= NEW_TOKENS or 4 in ids[len(PROMPT) :]

    def rounds(ids, chance):
        """Verifications and accepted drafts from here on, each times the chance to come here."""
        if chance == 0:
            return 0.0, 0.0
        if ended(ids):
            answered = cut(ids)
            said[answered] = said.get(answered, 0) + chance
            return 0.0, 0.0
        after = [chance, 0.0]
        step(ids, len(ids) - 1, 0, chance, after)
        return after

    def step(ids, root, depth, chance, after):
        """One draft: it is accepted, or the round ends with a token of the rest of the target's law."""
        p = target_law(ids)
        if depth == steps:
            ends = p
        else:
            q = draft_law(ids, root)
            for token in range(TOKENS):
                accepted = chance * q[token] * min(1, p[token] / q[token])
                after[1] += accepted
                step((*ids, token), root, depth + 1, accepted, after)
            ends = [max(0.0, each - drafted) for each, drafted in zip(p, q, strict=True)]
        for token in range(TOKENS):
            for place, value in enumerate(rounds((*ids, token), chance * ends[token])):
                after[place] += value

    def cut(ids):
        answered = ids[len(PROMPT) :][:NEW_TOKENS]
        return answered[: answered.index(4) + 1] if 4 in answered else answered

    total = [0.0, 0.0]
    for token, probability in enumerate(target_law(tuple(PROMPT))):
        for place, value in enumerate(rounds((*PROMPT, token), probability)):
            total[place] += value
    return total, said


@pytest.fixture(scope="module")
def replayed(world):
    """Rounds of the target's own answers, by steps: one replay gives them all."""
    target, head, _, _ = world
    said = answer(
        target, [PROMPT] * ANSWERS, seeds=[*range(ANSWERS)], max_new_tokens=NEW_TOKENS, temperature=TEMPERATURE,
        beyond=2,
    )  # fmt: skip
    return replay_rejection(Speculator(target, head, LAYERS), said, steps=[1, 2], temperature=TEMPERATURE, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1, 2])
def test_replayed_rejection_sampling_gains_what_the_sampler_gains(world, replayed, steps):
    _, _, target_law, _ = world
    (verifications, accepted), law = gained(world, steps)
    assert sum(law.values()) == pytest.approx(1)
    for answered, chance in law.items():  # lossless: the sampler says what the target alone does
        own = 1.0
        for place, token in enumerate(answered):
            own *= target_law((*PROMPT, *answered[:place]))[token]
        assert chance == pytest.approx(own)
    found = replayed[steps]
    for values, expected in (
        ([each.verifications for each in found], verifications),
        ([sum(each.accepted) for each in found], accepted),
    ):
        measured = torch.tensor(values).double()
        error = float(measured.std()) / ANSWERS**0.5
        assert float(measured.mean()) == pytest.approx(expected, abs=4 * error) and error < 0.05 * expected
    assert 0.2 < accepted / verifications < 0.9 * steps
