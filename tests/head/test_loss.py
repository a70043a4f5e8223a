"""The loss and the metrics against direct formulas in float64."""

import pytest
import torch
from heads import EMBEDDING, TEACHER_HEAD, make_head, ragged_samples, ttt_batch
from kernel_cases import chunked
from stores import with_last_in_float32

from eagle3.errors import InputError
from eagle3.head.anchors import anchors_and_steps
from eagle3.head.loss import UnrollLoss, accept_length, plain_loss
from eagle3.head.unroll import unroll
from eagle3.target.facts import LogitTransform

STEPS, DECAY = 3, 0.7


TRANSFORMS = [LogitTransform(), LogitTransform(scale=0.25), LogitTransform(scale=3.0, soft_cap=0.5)]


@pytest.mark.parametrize(
    ("normalize", "transform"), [("sequence", TRANSFORMS[0]), *(("token", transform) for transform in TRANSFORMS)]
)
def test_the_loss_is_the_decayed_cross_entropy_over_anchors(normalize, transform):
    head = make_head().requires_grad_(False)
    samples = ragged_samples()
    batch = ttt_batch(samples, ttt_steps=STEPS)
    outputs = unroll(head, EMBEDDING, batch, STEPS)
    objective = UnrollLoss(decay=DECAY, normalize=normalize)
    loss, metrics = objective(head, outputs, TEACHER_HEAD, batch, transform=transform)

    total, number = 0.0, 0
    correct, alive_sum, trained, divergence = [0] * STEPS, [0] * STEPS, [0] * STEPS, [0.0] * STEPS
    for sample in samples:
        teachers = dict(
            zip(sample.has_teacher.nonzero().squeeze(1).tolist(), range(len(sample.last_hidden_state)), strict=True)
        )
        anchors, steps_of = anchors_and_steps(sample.turns, STEPS)
        for anchor, steps in zip(anchors.tolist(), steps_of.tolist(), strict=True):
            weight = 1 / len(batch.anchors) if normalize == "token" else 1 / (len(anchors) * len(samples))
            alive = True
            for step in range(steps):
                teacher = teachers[anchor + 1 + step]
                logits = head.lm_head(head.norm(outputs[step][number]))
                best = int(head.draft_ids[logits.argmax()])
                right = best == int(sample.teacher_argmax[teacher])
                alive = alive and right
                trained[step] += 1
                correct[step] += right
                alive_sum[step] += alive
                if int(sample.teacher_argmax[teacher]) in head.draft_ids.tolist():
                    z = TEACHER_HEAD @ sample.last_hidden_state[teacher] * transform.scale
                    z = z if transform.soft_cap is None else transform.soft_cap * torch.tanh(z / transform.soft_cap)
                    p = torch.softmax(z, dim=0)
                    cross_entropy = float(-(p * torch.log_softmax(logits, dim=0)).sum())
                    total += weight * DECAY**step * cross_entropy
                    divergence[step] += cross_entropy
            number += 1
    assert float(loss) == pytest.approx(total, rel=1e-12)
    assert metrics.anchors == len(batch.anchors)
    assert metrics.trained.tolist() == trained
    assert metrics.correct.tolist() == correct
    assert metrics.alive.tolist() == alive_sum
    assert metrics.divergence.tolist() == pytest.approx(divergence, rel=1e-12)


@pytest.mark.parametrize("normalize", ["token", "sequence"])
def test_a_pack_weighs_its_share_of_the_optimizer_step(normalize):
    head, objective = make_head().requires_grad_(False), UnrollLoss(decay=DECAY, normalize=normalize)
    alone = ttt_batch(ragged_samples(), ttt_steps=STEPS)
    step = {"anchors_in_step": 4.0 * len(alone.anchors), "samples_in_step": 4.0 * len(ragged_samples())}
    outputs = unroll(head, EMBEDDING, alone, STEPS)
    whole, quarter = (
        objective(head, outputs, TEACHER_HEAD, batch)[0]
        for batch in (alone, ttt_batch(ragged_samples(), ttt_steps=STEPS, **step))
    )
    torch.testing.assert_close(4 * quarter, whole)


@pytest.mark.parametrize("compute", [plain_loss, chunked(7)])
@pytest.mark.parametrize(
    ("part", "shape", "said"), [("weights", (45, 3), r"\[45, 3\]"), ("anchor_weights", 2, r"\[3, 2\]")]
)
def test_weights_of_another_shape_are_one_line(part, shape, said, compute, monkeypatch):
    head, batch = make_head().requires_grad_(False), ttt_batch(ragged_samples(), ttt_steps=STEPS)
    monkeypatch.setattr(UnrollLoss, part, lambda *_: torch.ones(shape))
    objective, outputs = UnrollLoss(decay=DECAY, normalize="token"), unroll(head, EMBEDDING, batch, STEPS)
    with pytest.raises(InputError, match=rf"^loss=UnrollLoss: its weights .* {said}, not \[3, \d+\]; return"):
        objective(head, outputs, TEACHER_HEAD, batch, compute)


@pytest.mark.parametrize(
    ("part", "said"), [("weights", "its weights have the shape NoneType"), ("anchor_weights", "returns NoneType")]
)
def test_weights_that_are_no_tensor_are_one_line(part, said, monkeypatch):
    monkeypatch.setattr(UnrollLoss, part, lambda *_: None)
    with pytest.raises(InputError, match=rf"^loss=UnrollLoss: .*{said}"):
        UnrollLoss(decay=DECAY, normalize="token").checked_weights(
            ttt_batch(ragged_samples(), ttt_steps=STEPS), STEPS, torch.float32
        )


def test_under_autocast_close_teacher_tokens_are_not_blurred():
    head, batch = make_head().requires_grad_(False), ttt_batch(ragged_samples(), ttt_steps=STEPS)
    sharp = 100 * TEACHER_HEAD.float()  # in bfloat16 its logits would be off by ones
    batch = with_last_in_float32(batch)
    outputs, objective = unroll(head, EMBEDDING, batch, STEPS), UnrollLoss(decay=DECAY, normalize="token")
    expected, _ = objective(head, outputs, sharp, batch)
    with torch.autocast("cpu", torch.bfloat16):
        loss, _ = objective(head.float(), [output.float() for output in outputs], sharp, batch)
    assert float(loss) == pytest.approx(float(expected), rel=2e-3)


def test_accept_length_counts_leading_right_steps():
    # Of four chains one is right twice, two once, one never: 1 + (2 + 1 + 1 + 0) / 4.
    assert float(accept_length(torch.tensor([3.0, 1.0]), torch.tensor(4.0))) == 2.0
