"""The learning rate over a run."""

from itertools import pairwise

import pytest
import torch

from eagle3.optim import AdamWCosine


def test_it_warms_up_falls_along_a_cosine_and_stays_at_the_end() -> None:
    optim = AdamWCosine(lr=2.0, betas=(0.9, 0.95), weight_decay=0.0, warmup_fraction=0.1, final_lr_fraction=0.25)
    optimizer, schedule = optim.build([torch.nn.Parameter(torch.ones(1))], total_steps=20)
    rates = []
    for _ in range(25):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert rates[0] == pytest.approx(1.0)
    assert rates[1] == rates[2] == pytest.approx(2.0)
    assert rates[11] == pytest.approx(2.0 * (0.25 + 0.75 / 2))
    assert all(later <= earlier for earlier, later in pairwise(rates[2:]))
    assert rates[20:] == pytest.approx([0.5] * 5)
