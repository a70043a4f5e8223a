"""Each divergence against its definition in float64; its gradient against autograd's."""

from collections.abc import Callable
from typing import Any

import divergences
import pytest
import torch
from divergences import DIVERGENCES, OF_FUNCTION, each_divergence
from torch import Tensor
from torch.distributions import Categorical, kl_divergence

from eagle3.errors import InputError
from eagle3.head.divergence import Divergence, OfLogProbabilities, PlainDivergence, require_consistent
from eagle3.head.fast.chunked_loss import plain_loss_and_gradient


def overlap(q: Categorical, p: Categorical) -> Tensor:
    return torch.minimum(q.probs, p.probs).sum(-1)


def cross_entropy(q: Categorical, p: Categorical) -> Tensor:
    return kl_divergence(p, q) + p.entropy()


DEFINITIONS: list[Callable[[Categorical, Categorical], Tensor]] = [
    cross_entropy,
    lambda q, p: 0.7 * cross_entropy(q, p) + 0.3 * (1 - overlap(q, p)),
    lambda q, p: -overlap(q, p).log(),
    lambda q, p: kl_divergence(q, p),
]


def random_logits(rows: int, columns: int, seed: int = 0, scale: float = 3.0, **options: Any) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(rows, columns, generator=generator, dtype=torch.double)).to(**options)


def value(divergence: Divergence, logits: Tensor, target_logits: Tensor) -> Tensor:
    return divergence.value(logits, logits.logsumexp(-1), divergence.of_target(target_logits))


def gradient(divergence: Divergence, logits: Tensor, target_logits: Tensor) -> Tensor:
    return divergence.gradient(logits.clone(), logits.logsumexp(-1), divergence.of_target(target_logits))


@pytest.mark.parametrize("divergence, definition", list(zip(DIVERGENCES, DEFINITIONS, strict=True)))
def test_value_and_gradient_are_those_of_the_definition(divergence, definition):
    logits, target_logits = random_logits(20, 33).requires_grad_(), random_logits(20, 33, seed=1)
    expected = definition(Categorical(logits=logits), Categorical(logits=target_logits))
    [expected_gradient] = torch.autograd.grad(expected.sum(), logits)
    found = value(divergence, logits, target_logits)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.autograd.grad(found.sum(), logits)[0], expected_gradient)
    with torch.no_grad():
        torch.testing.assert_close(gradient(divergence, logits, target_logits), expected_gradient)


@each_divergence
@pytest.mark.parametrize("dtype", [torch.float32, torch.double], ids=str)
def test_a_draft_that_equals_its_target_is_left_where_it_is(divergence, dtype):
    logits = random_logits(20, 33, dtype=dtype)
    # Equal to the last bit, as total variation has a kink there.
    found = divergence.gradient(logits.log_softmax(-1), torch.zeros(20, dtype=dtype), divergence.of_target(logits))
    assert float(found.abs().max()) < 10 * torch.finfo(dtype).eps
    at_most = value(divergence, logits, logits)
    assert (value(divergence, logits + random_logits(20, 33, seed=1, dtype=dtype), logits) > at_most).all()


@each_divergence
@pytest.mark.parametrize("dtype", [torch.float32, torch.double], ids=str)
def test_a_one_hot_target_has_a_finite_value_and_gradient_even_for_a_draft_that_is_sure_of_another_token(
    divergence, dtype
):
    target_logits, sure = torch.zeros(2, 7, dtype=dtype), torch.zeros(2, 7, dtype=dtype)
    target_logits[:, 3], sure[0, 5], sure[1, 3] = 2000, 1000, 1000
    assert value(divergence, sure, target_logits).isfinite().all()
    found = gradient(divergence, sure, target_logits)
    assert found.isfinite().all()
    assert not found[1].any()  # right already
    unsure = random_logits(2, 7, dtype=dtype)
    downhill = unsure - torch.nn.functional.normalize(gradient(divergence, unsure, target_logits))
    assert (downhill.softmax(-1)[:, 3] > unsure.softmax(-1)[:, 3]).all()


@each_divergence
def test_the_kernel_weighs_each_row_and_gives_none_to_a_row_without_loss(divergence):
    logits, target_logits = random_logits(6, 11), random_logits(2, 11, seed=1)
    weight = torch.tensor([1.0, 0, 2, 0.5, 3, 0])
    of_row, written = torch.tensor([0, 0, 1, 1, 1, 0]), logits.clone()
    losses, best = plain_loss_and_gradient(divergence, written, target_logits, of_row, weight.double())
    torch.testing.assert_close(losses, value(divergence, logits, target_logits[of_row]))
    torch.testing.assert_close(written, weight[:, None] * gradient(divergence, logits, target_logits[of_row]))
    assert not written[weight == 0].any()
    assert torch.equal(best, logits.argmax(-1))


class Jeffreys(OfLogProbabilities):
    """By its value alone."""

    def rows(self, draft: Tensor, target: Tensor) -> Tensor:
        return ((draft.exp() - target.exp()) * (draft - target)).sum(-1)


class Slopes(Jeffreys):
    """With its derivative, times `factor` in rows whose target is sharp."""

    factor = 1.0

    def slopes(self, draft: Tensor, target: Tensor) -> Tensor:
        right = draft.exp() * (draft - target + 1) - target.exp()
        return right * torch.where(target.amax(-1, keepdim=True) > -4, self.factor, 1.0)


class Scaled(Slopes):
    factor = 1.01


class Missing(Jeffreys):
    def slopes(self, draft: Tensor, target: Tensor) -> Tensor:
        raise NotImplementedError


class OnlyValue:
    def of_target(self, logits: Tensor) -> Tensor:
        return logits.softmax(-1)

    def value(self, logits: Tensor, log_sum: Tensor, target: Tensor) -> Tensor:
        return log_sum - (target * logits).sum(-1)


class Overflows(Jeffreys):
    def rows(self, draft: Tensor, target: Tensor) -> Tensor:
        return (100 * (target - draft)).exp().sum(-1)


WRONG = {
    "in_place": (lambda draft, target: -(draft.sub_(1) * target.softmax(-1)).sum(-1), "fails for [4, 200] logits"),
    "summed": (lambda draft, target: -(draft * target.softmax(-1)).sum(), "has a value of shape [] for [4, 200]"),
    "detached": (lambda draft, target: -(draft.detach() * target).sum(-1), "autograd cannot differentiate"),
    "nan": (lambda draft, target: draft.sum(-1) * torch.nan, "is nan for random logits"),
    "of_one": (lambda draft: draft.logsumexp(-1), "fails for [4, 200] logits"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_function_that_is_no_divergence_is_one_line(name, monkeypatch):
    function, rule = WRONG[name]
    monkeypatch.setattr(divergences, name, function, raising=False)
    divergence = PlainDivergence(function=f"divergences.{name}")
    for uses_gradient in (True, False):
        with pytest.raises(InputError) as error:
            require_consistent(divergence, 200, torch.device("cpu"), uses_gradient=uses_gradient)
        assert str(error.value).startswith(f"loss.divergence.function=divergences.{name} ")
        assert rule in str(error.value)


@pytest.mark.parametrize("name", ["nowhere.function", "divergences.nothing", "divergences.BY_NAME"])
def test_a_function_that_cannot_be_called_is_one_line(name):
    with pytest.raises(InputError, match=rf"^loss\.divergence\.function={name} "):
        PlainDivergence(function=name)


@pytest.mark.parametrize("divergence", [Jeffreys(), Slopes(), Overflows(), OF_FUNCTION])
def test_an_own_divergence_with_the_right_gradient_or_none_passes_and_is_differentiated_in_validation_too(divergence):
    require_consistent(divergence, 200, torch.device("cpu"), uses_gradient=True)
    logits, target_logits = random_logits(4, 33), random_logits(4, 33, seed=1)
    with torch.inference_mode():
        found = gradient(divergence, logits, target_logits)
    torch.testing.assert_close(found, gradient(divergence, logits, target_logits), equal_nan=True)
    torch.testing.assert_close(gradient(Jeffreys(), logits, target_logits), gradient(Slopes(), logits, target_logits))


@pytest.mark.parametrize(
    ("divergence", "message"),
    [
        (Scaled(), r"loss\.divergence=Scaled has another gradient .*: in row \d of 4 .* by .*largest component is"),
        (Missing(), "loss.divergence=Missing has no derivative; leave out `slopes`"),
        (OnlyValue(), "loss.divergence=OnlyValue has no method gradient"),
    ],
)
def test_an_own_divergence_with_another_gradient_than_its_value_is_refused(divergence, message):
    random = torch.get_rng_state()
    with pytest.raises(InputError, match=message):
        require_consistent(divergence, 200, torch.device("cpu"), uses_gradient=True)
    assert torch.equal(torch.get_rng_state(), random), "it would change the training"
    require_consistent(divergence, 200, torch.device("cpu"), uses_gradient=False)
