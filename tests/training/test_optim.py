"""The learning rate over a run, and the optimizers that take it."""

import math
from copy import deepcopy
from itertools import pairwise
from typing import Any

import pytest
import torch
from heads import make_head
from torch.optim import AdamW, Optimizer

from eagle3.errors import InputError
from eagle3.head.draft_head import DraftHead
from eagle3.training.muon import PortableMuon, divided
from eagle3.training.optim import AdamWCosine, MuonCosine

SETTINGS = {
    "betas": (0.9, 0.95),
    "weight_decay": 0.1,
    "warmup_fraction": 0.1,
    "decay_fraction": 1.0,
    "final_lr_fraction": 0.25,
}
MUON = MuonCosine(lr=3e-3, **SETTINGS)


class Forgetful(AdamWCosine):
    def optimizer(self, *_: Any) -> Any:
        AdamW([torch.nn.Parameter(torch.zeros(1))])


class WithoutRate(AdamWCosine):
    def scale(self, *_: Any) -> Any:
        return None


def test_an_own_class_that_returns_no_optimizer_or_no_rate_is_one_line():
    with pytest.raises(InputError, match=r"optim=WithoutRate: its `scale` returns None at step 0; return a factor"):
        WithoutRate(lr=1.0, **SETTINGS).build(make_head(), total_steps=20)
    with pytest.raises(InputError, match=r"optim=Forgetful: its `optimizer` returns NoneType; return a torch\.optim"):
        Forgetful(lr=1.0, **SETTINGS).build(make_head(), total_steps=20)


@pytest.mark.parametrize("optim", [AdamWCosine(lr=2.0, **SETTINGS), MuonCosine(lr=2.0, **SETTINGS)])
def test_it_warms_up_falls_along_a_cosine_and_stays_at_the_end(optim):
    optimizer, schedule = optim.build(make_head(), total_steps=20)
    rates = []
    for _ in range(25):
        [rate] = {group["lr"] for group in optimizer.param_groups}
        rates.append(rate)
        optimizer.step()
        schedule.step()
    assert rates[0] == pytest.approx(1.0)
    assert rates[1] == rates[2] == pytest.approx(2.0)
    assert rates[11] == pytest.approx(2.0 * (0.25 + 0.75 / 2))
    assert all(later <= earlier for earlier, later in pairwise(rates[2:]))
    assert rates[20:] == pytest.approx([0.5] * 5)


def test_the_rate_stays_constant_between_warm_up_and_decay():
    optim = AdamWCosine(lr=2.0, **SETTINGS | {"decay_fraction": 0.2, "final_lr_fraction": 0.0})
    scales = [optim.scale(step, total_steps=20) for step in range(21)]
    assert scales[1:17] == [1.0] * 16
    assert scales[17:] == pytest.approx([(1 + math.cos(math.pi * each / 4)) / 2 for each in (1, 2, 3, 4)])


def step(head: DraftHead, *optimizers: Optimizer, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in head.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter)
    for optimizer in optimizers:
        optimizer.step()


def test_muon_takes_the_matrices_inside_the_head_and_adamw_the_rest():
    head = make_head(fc_norm=True)
    other = deepcopy(head)
    optimizer = MUON.optimizer(head)
    matrices = [weight for name, weight in other.named_parameters() if weight.ndim == 2 and name != "lm_head.weight"]
    rest = [weight for name, weight in other.named_parameters() if "norm" in name or name == "lm_head.weight"]
    muon = PortableMuon(matrices, lr=3e-3, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    adamw = AdamW(rest, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    for seed in range(3):
        step(head, optimizer, seed=seed)
        step(other, muon, adamw, seed=seed)
    torch.testing.assert_close(head.state_dict(), other.state_dict())


def test_matrices_are_divided_by_their_work():
    shapes = [(8, 8), (64, 64), (8, 64), (64, 64), (64, 8), (32, 32)]
    assert divided([torch.empty(shape) for shape in shapes], 2) == [1, 0, 1, 1, 1, 0]
    assert set(divided([torch.empty(8, 8)] * 4, 4)) == {0, 1, 2, 3}


@pytest.mark.parametrize("shape", [(48, 16), (16, 48)])
def test_muon_multiplies_in_float32_on_a_cpu(shape):
    weight = torch.nn.Parameter(torch.zeros(shape))
    weight.grad = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    PortableMuon([weight], lr=1.0, weight_decay=0.0, adjust_lr_fn="match_rms_adamw").step()
    update = weight.grad.double() / weight.grad.double().norm()
    for _ in range(5):  # the iteration of arXiv:2502.16982, equation 2, in float64
        gram = update @ update.T
        update = 3.4445 * update + (-4.7750 * gram + 2.0315 * gram @ gram) @ update
    expected = -0.2 * math.sqrt(48) * update
    torch.testing.assert_close(weight.detach().double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_recorded_muon_takes_the_steps_of_muon(device):
    head = make_head(fc_norm=True).to(device)
    other = deepcopy(head)
    recorded = MUON.build(head, total_steps=20, by_graph=True)
    plain = MUON.build(other, total_steps=20)
    for seed in range(4):
        if seed == 3:  # as after a resumed training: the state has moved
            recorded[0].load_state_dict(deepcopy(recorded[0].state_dict()))
        for each, (optimizer, schedule) in ((head, recorded), (other, plain)):
            step(each, optimizer, seed=seed)
            schedule.step()
    torch.testing.assert_close(head.state_dict(), other.state_dict(), rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(recorded[0].state_dict()["state"], plain[0].state_dict()["state"], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("by_graph", [False, True])
def test_a_loaded_muon_continues_as_if_it_had_never_stopped(by_graph):
    head = make_head()
    optimizer, schedule = MUON.build(head, total_steps=20, by_graph=by_graph)
    for seed in range(3):
        step(head, optimizer, seed=seed)
        schedule.step()
    resumed = deepcopy(head)
    other, other_schedule = MUON.build(resumed, total_steps=20, by_graph=by_graph)
    other.load_state_dict(deepcopy(optimizer.state_dict()))
    other_schedule.load_state_dict(schedule.state_dict())
    for seed in range(3, 6):
        for each in (schedule, other_schedule):
            each.step()
        step(head, optimizer, seed=seed)
        step(resumed, other, seed=seed)
    torch.testing.assert_close(resumed.state_dict(), head.state_dict(), rtol=0, atol=0)
