"""The verifier: the target's own tokens and features on every kind of cache, whatever was drafted."""

import pytest
import torch
from families import text_config
from fitted_head import CHAIN, LAYERS, NEW_TOKENS, PROMPT, TREE, fitted_head, make_target, small_target
from generation import hugging_face_greedy
from hybrid_families import hybrid_config

from eagle3.decoding.speculate import Speculator, plain_greedy
from eagle3.decoding.verifier import verifier
from eagle3.target.capture import Capture

WINDOWED = ("mistral", "gemma3_text", "gpt_oss", "llama4_text")  # shorter than PROMPT
RECURRENT = ("qwen3_next", "falcon_h1")


@pytest.mark.parametrize("family", ["llama", *WINDOWED, "deepseek_v3", *RECURRENT])
def test_greedy_tokens_equal_hugging_face_generate(family):
    """Targets with a recurrent state are read step by step; the same drafts are accepted."""
    target = make_target(hybrid_config(family) if family in RECURRENT else text_config(family, 5))
    own = hugging_face_greedy(target.model, PROMPT, NEW_TOKENS, pad_token_id=0)
    assert plain_greedy(target, PROMPT, NEW_TOKENS) == own
    speculator = Speculator(target, fitted_head(target, PROMPT), LAYERS)
    for shape in (CHAIN, TREE):
        decoded = speculator.decode(PROMPT, max_new_tokens=NEW_TOKENS, **shape)
        assert decoded.token_ids == own
        # Rejected tails were taken back, and accepted drafts kept.
        assert 0 < sum(decoded.accepted) < decoded.verifications * shape["steps"]


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
def test_features_are_those_of_the_kept_tokens_alone(family):
    target = make_target(hybrid_config(family)) if family in RECURRENT else small_target()
    close = {"rtol": 1e-4, "atol": 1e-4} if family in RECURRENT else {}
    own = plain_greedy(target, PROMPT, NEW_TOKENS)
    ids, length = PROMPT + own, len(PROMPT)
    aux = Capture(target, LAYERS)(torch.tensor([ids]), [len(ids)])[0].aux_hidden_states
    wrong = [(token + 1) % 50 for token in own]
    with verifier(target, LAYERS, temperature=0.0, top_p=1.0, top_k=0, seed=0) as reader:
        assert reader.advance(PROMPT, [[]]) == own[:1]
        torch.testing.assert_close(reader.features(), aux[:length], **close)
        assert reader.advance(own[:1], [wrong[1:3], [own[1], own[2], wrong[3]], [own[1], wrong[2]]]) == own[1:4]
        torch.testing.assert_close(reader.features(), aux[length : length + 3], **close)
        assert reader.advance(own[3:4], [wrong[4:7]]) == own[4:5]
        torch.testing.assert_close(reader.features(), aux[length + 3 : length + 4], **close)
        assert reader.advance(own[4:5], [own[5:8]]) == own[5:9]
        torch.testing.assert_close(reader.features(), aux[length + 4 : length + 8], **close)


def test_no_hook_is_left_behind_even_by_a_failed_decode():
    target = small_target()
    head = fitted_head(target, PROMPT)
    Speculator(target, head, LAYERS).decode(PROMPT, max_new_tokens=4, **CHAIN)
    with pytest.raises(IndexError):
        Speculator(target, head, LAYERS).decode([50], max_new_tokens=4, **CHAIN)  # outside the vocabulary
    assert not any(module._forward_pre_hooks for module in target.model.modules())
