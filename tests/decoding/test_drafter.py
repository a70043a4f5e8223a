"""The drafter drafts what a reference without any cache drafts."""

from itertools import pairwise

import pytest
import torch
from fitted_head import CHAIN, LAYERS, NEW_TOKENS, PROMPT, TREE, fitted_head, reference_paths, small_target

from eagle3.decoding.drafter import Drafter
from eagle3.decoding.speculate import plain_greedy
from eagle3.target.capture import Capture

SHAPES = [CHAIN, TREE, {"steps": 1}, {"steps": 1, "topk": 3, "draft_tokens": 4}]
ROUNDS = [0, 20, 21, 24, 28, 29, 32]  # rows confirmed at the end of each


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    "changes", [{}, {"norm_output": True, "fc_norm": False}, {"norm_before_fc": True, "fc_norm": False}], ids=str
)
def test_drafts_equal_those_of_a_reference_without_cache(shape, changes, window):
    target = small_target()
    head = fitted_head(target, PROMPT, **changes)
    ids = PROMPT + plain_greedy(target, PROMPT, NEW_TOKENS)
    aux = Capture(target, LAYERS)(torch.tensor([ids]), [len(ids)])[0].aux_hidden_states
    settings = {"topk": 1, "draft_tokens": shape["steps"] + 1, **shape}
    drafter = Drafter(head, target.embedding, room=len(ids), window=window)
    for start, end in pairwise(ROUNDS):
        hidden = drafter.confirm(aux[start:end], ids[start + 1 : end + 1])
        tree = drafter.tree(
            hidden, steps=settings["steps"], topk=settings["topk"], num_drafts=settings["draft_tokens"] - 1
        )
        expected = reference_paths(head, target, ids[: end + 1], window=window, **settings)
        assert {tuple(path) for path in tree.branches()} == expected


def test_the_largest_tree_of_a_shape_holds_every_candidate():
    target = small_target()
    drafter = Drafter(fitted_head(target, PROMPT), target.embedding, room=len(PROMPT))
    aux = Capture(target, LAYERS)(torch.tensor([PROMPT]), [len(PROMPT)])[0].aux_hidden_states
    tree = drafter.tree(drafter.confirm(aux[:-1], PROMPT[1:]), steps=3, topk=2, num_drafts=10)
    assert len({tuple(path) for path in tree.paths()}) == 10
