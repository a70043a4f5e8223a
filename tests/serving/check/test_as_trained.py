"""A sound export drafts as the trained head does on the same answers; a planted fault shows."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from exported_head import (
    LAYERS,
    Change,
    Editable,
    export_head,
    name_layers,
    random_head,
    tiny_facts,
    with_origin,
    with_record,
)
from taught_head import NEW_TOKENS, STEPS, answered, held_out_prompts, taught_head, taught_samples, with_store

from eagle3.decoding.paired import Gains
from eagle3.decoding.speculate import Speculator, measure
from eagle3.features.sample import Sample
from eagle3.head_files.files import read_files
from eagle3.head_files.finding import Finding, target_facts
from eagle3.serving.check.accept_length import Measurer
from eagle3.serving.check.as_trained import check_as_trained, first_answers, judged, replayed, unrolled
from eagle3.serving.check.checks import check_export, check_head, run_checks
from eagle3.serving.head.export import TrainedHead


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    return taught_samples()


@pytest.fixture(scope="module")
def trained(samples: list[Sample], tmp_path_factory: pytest.TempPathFactory) -> TrainedHead:
    return with_store(taught_head(), samples, tmp_path_factory.mktemp("trained_on") / "features")


@pytest.fixture
def measurer(make_measurer: Callable[..., Measurer]) -> Measurer:
    made = make_measurer(limit=None, max_new_tokens=NEW_TOKENS)
    return replace(made, decoding=replace(made.decoding, steps=STEPS))


@pytest.fixture
def exported(tmp_path: Path, trained: TrainedHead) -> Path:
    export_head(trained, tmp_path / "head", versions={})
    return tmp_path / "head"


# --- what is compared ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 5])
def test_the_unroll_and_the_replay_accept_the_same_drafts_of_the_same_answers(
    steps, trained, target, samples, measurer
):
    cut = [*first_answers(iter(samples), measurer)]
    then = [unrolled(trained.head, target, sample, steps) for sample in cut]
    assert [replayed(Speculator(target, trained.head, LAYERS), sample, steps) for sample in cut] == then
    assert Gains.of_rounds(then, range(len(then))).accept_length > 1.5
    made = {sum(rounds) + len(rounds) for rounds in then}  # without prefill's token; the last may be past the end
    assert made <= {NEW_TOKENS - 1, NEW_TOKENS}


def test_drafts_past_the_end_of_an_answer_do_not_count(target, samples, measurer):
    """A head that can only draft token 0, and an answer of nothing else."""
    head = random_head(tiny_facts(target), target.identity, torch.tensor([0])).head.requires_grad_(False)
    [cut] = first_answers(iter(samples[:1]), measurer)
    zeros = replace(cut, input_ids=torch.where(cut.turns > 0, 0, cut.input_ids))
    assert unrolled(head, target, zeros, 4) == [4, 4, 4, 4, 3]
    assert replayed(Speculator(target, head, LAYERS), zeros, 4) == [4, 4, 4, 4, 3]


def test_along_greedy_answers_it_is_what_decoding_accepts(trained, target, measurer):
    prompts = held_out_prompts()[:3]
    greedy = answered(prompts, temperature=0.0)
    then = [unrolled(trained.head, target, sample, STEPS) for sample in first_answers(iter(greedy), measurer)]
    with_room = {"max_new_tokens": NEW_TOKENS, "temperature": 0.0, "steps": STEPS, "seed": 0, "progress": None}
    unstopped = replace(target, stop_ids=frozenset())
    decoded = measure(unstopped, trained.head, LAYERS, prompts, lossless=False, **with_room).decoded
    assert [answer.verifications for answer in decoded] == [*map(len, then)]


def test_only_first_answers_that_fit_are_followed_up_to_max_new_tokens(samples, make_measurer):
    turns = samples[0].turns
    unfit = [replace(samples[0], turns=torch.full_like(turns, number)) for number in (0, 1)]  # no answer, no prompt
    cut = [*first_answers(iter([*unfit, *samples]), make_measurer(limit=3, max_new_tokens=6))]
    assert [each.id for each in cut] == ["p0#0", "p1#0", "p2#0"]
    for each, whole in zip(cut, samples, strict=False):
        begin = int((whole.turns > 0).int().argmax())
        assert each.turns.nonzero().flatten().tolist() == [*range(begin, begin + 6)]


# --- what is found ---------------------------------------------------------------------------------------------------


def swap_layers(head: Editable) -> None:
    """As where a server joins the captured layers in another order."""
    low, middle, high = head.tensors["fc.weight"].chunk(3, dim=1)
    head.tensors["fc.weight"] = torch.cat([high, middle, low], dim=1).contiguous()


def shift_ids(head: Editable) -> None:
    ids = head.tensors["d2t"] + torch.arange(len(head.tensors["d2t"]))
    head.tensors["d2t"] = ids.roll(1) - torch.arange(len(ids))


def forget_norm(head: Editable) -> None:
    head.tensors["midlayer.hidden_norm.weight"] = torch.full_like(head.tensors["midlayer.hidden_norm.weight"], 0.1)


def change_rope(head: Editable) -> None:
    for place in (head.config, head.config["rope_parameters"]):
        place["rope_theta"] = 2.0


DAMAGES: dict[str, Change] = {
    "layers in another order": swap_layers,
    "other layers": lambda head: name_layers(head.config, [4, 5, 6]),
    "d2t": shift_ids,
    "norm": forget_norm,
    "rope": change_rope,
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_head_drafts_worse_than_the_trained_one(name, trained, exported, measurer):
    damaged = Editable(exported)
    DAMAGES[name](damaged)
    damaged.save()
    finding = check_as_trained(read_files(exported), measurer, trained.head)
    assert finding.level in ("warning", "error") and "the files are not what was trained" in finding.message


@pytest.mark.parametrize(
    ("answers", "lost", "spread", "level"),
    [
        (8, 0.04, 0.0, "ok"),  # 2 %
        (8, 0.12, 0.0, "warning"),  # 6 %
        (8, 0.12, 0.2, "ok"),  # within two standard errors
        (8, 0.60, 0.2, "error"),  # more than half of the gain of 1
        (8, -0.5, 0.0, "ok"),  # it drafts better
        (1, 0.60, 0.0, "ok"),  # one answer has no standard error
    ],
)
def test_a_loss_counts_if_it_is_beyond_5_percent_and_two_standard_errors(answers, lost, spread, level, measurer):
    verifications, signs = np.full(answers, 50.0), np.resize([-1.0, 1.0], answers)
    then = Gains(verifications, verifications, np.arange(answers))  # an accept length of 2
    now = Gains(50 * (1 - lost + spread * signs), verifications, np.arange(answers))
    assert judged(measurer, now, then).level == level


# --- in the table of checks ------------------------------------------------------------------------------------------


def rows(findings: list[Finding], *levels: str) -> dict[str, str]:
    return {finding.check: finding.message for finding in findings if finding.level in levels}


def test_a_sound_export_has_neither_a_warning_nor_an_error_at_its_export_and_later(trained, exported, measurer):
    measurer = replace(measurer, limit=2, turns="first")
    trained = with_record(trained, simulated_accept_length={3: 9.0})  # on whole answers: not compared
    findings, files = check_export(trained, read_files(exported), measurer)
    assert rows(findings, "warning", "error", "skipped") == {}
    [found] = [finding.message for finding in findings if finding.check == "as_trained"]
    assert "at steps=3 along the first 24 tokens of 2 stored answers" in found
    later = check_head(files, measurer)
    assert rows(later, "warning", "error", "skipped") == {} and rows(later, "ok")["as_trained"] == found
    assert found.partition(" ")[0] == found.split()[-5]  # bit for bit, in float32


def test_features_of_other_layers_than_their_store_says_are_found_by_this_check_alone(trained, measurer, tmp_path):
    """As where the engine that made the features captures other layers than servers do."""
    elsewhere = with_origin(trained, capture_layers=[5, 6, 7])
    export_head(elsewhere, tmp_path / "head", versions={})
    files = read_files(tmp_path / "head")
    facts = target_facts(measurer.target, measurer.target.identity.template_hash)
    assert rows(run_checks(files, facts), "warning", "error", "skipped") == {}
    assert check_as_trained(files, measurer, trained.head).level in ("warning", "error")


def test_without_the_answers_of_the_training_nothing_is_compared(trained, samples, measurer, tmp_path):
    def said(head: TrainedHead, name: str) -> str:
        export_head(head, tmp_path / name, versions={})
        return rows([check_as_trained(read_files(tmp_path / name), measurer)], "skipped")["as_trained"]

    assert said(with_origin(trained, path="/gone/features"), "gone").endswith(
        "/gone/features/manifest.json does not exist"
    )
    assert "is no longer the store of the training" in said(with_origin(trained, hash="other"), "changed")
    assert said(with_origin(trained, val_fraction=0.0), "all") == (
        "no held-out answer of the training has two tokens and fits"
    )
    edited = read_files(tmp_path / "all")
    assert "which answers the head was trained on" in check_as_trained(replace(edited, record=None), measurer).message
