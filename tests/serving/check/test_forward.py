"""A forward over a whole text gives what the head gives at each row alone."""

import torch
from fitted_head import LAYERS, PROMPT, chain_output, fitted_head, small_target

from eagle3.serving.check.forward import plain_forward
from eagle3.target.capture import Capture


def test_outputs_before_the_first_draft_are_those_of_a_plain_reference() -> None:
    target = small_target()
    head = fitted_head(target, PROMPT)
    aux = Capture(target, LAYERS)(torch.tensor([PROMPT]), [len(PROMPT)])[0].aux_hidden_states
    rows = plain_forward(head, head.fuse(aux[:-1]), target.embedding[PROMPT[1:]])
    for row in (0, 7, len(PROMPT) - 2):
        torch.testing.assert_close(rows[row], chain_output(head, target, aux, PROMPT[: row + 2], row))
