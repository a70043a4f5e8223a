"""A sound export drafts as the trained head does on the same answers; a planted fault shows."""

import json
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
from stores import ASSETS, open_store, write_store
from torch.nn import functional

from eagle3.answers.chat import Chat
from eagle3.answers.generate import generate
from eagle3.data.pack import pack_samples
from eagle3.decoding.paired import Gains
from eagle3.decoding.speculate import Speculator, measure
from eagle3.features.sample import Sample, positions_with_teacher
from eagle3.head.eagle3 import EAGLE3
from eagle3.head.kernels import KernelPlan
from eagle3.head_files.files import read_files
from eagle3.head_files.finding import Finding
from eagle3.serving.check.accept_length import Measurer
from eagle3.serving.check.as_trained import check_as_trained, first_answers, gains, judged, replayed, unrolled
from eagle3.serving.check.checks import check_export, check_head
from eagle3.serving.head.export import TrainedHead
from eagle3.target.capture import Capture
from eagle3.target.model import Target

NEW_TOKENS, STEPS = 24, 3


def answered(target: Target, prompts: list[list[int]], *, temperature: float, layers: list[int]) -> list[Sample]:
    """Prompts with the target's answers of NEW_TOKENS, then a second turn, and their features."""
    sampling = {"temperature": temperature, "top_p": 1.0, "top_k": 0}
    found = generate(
        target.model, prompts, seeds=[*range(len(prompts))], pad_id=0, max_new_tokens=NEW_TOKENS,
        stop_ids=frozenset(), **sampling,
    )  # fmt: skip
    samples = []
    for number, (prompt, answer) in enumerate(zip(prompts, found, strict=True)):
        ids = torch.tensor([*prompt, *answer.token_ids, *prompt[:3], *answer.token_ids[:4]])
        turns = torch.tensor([0] * len(prompt) + [1] * NEW_TOKENS + [0] * 3 + [2] * 4)
        [features] = Capture(target, layers)(ids[None], [len(ids)])
        has_teacher = positions_with_teacher(turns, "answers")
        last = features.last_hidden_state[has_teacher]
        samples.append(
            Sample(
                id=f"p{number}#0",
                input_ids=ids,
                turns=turns,
                aux_hidden_states=features.aux_hidden_states,
                last_hidden_state=last,
                teacher_argmax=(last @ target.lm_head.T).argmax(-1),
                has_teacher=has_teacher,
            )
        )
    return samples


@pytest.fixture(scope="module")
def prompts(chat: Chat) -> list[list[int]]:
    rows = map(json.loads, (ASSETS / "prompts/heldout.jsonl").read_text().splitlines()[:8])
    return [chat.prompt_ids(row["messages"][:1])[-40:] for row in rows]


@pytest.fixture(scope="module")
def samples(target: Target, prompts: list[list[int]]) -> list[Sample]:
    return answered(target, prompts, temperature=1.0, layers=LAYERS)


@pytest.fixture(scope="module")
def trained(target: Target, samples: list[Sample], tmp_path_factory: pytest.TempPathFactory) -> TrainedHead:
    """A head that a few steps on these samples have taught to accept 2.6 to 3.6 in chains of 3."""
    draft_ids = torch.cat([sample.input_ids[sample.turns > 0] for sample in samples]).unique()
    made = random_head(tiny_facts(target), target.identity, draft_ids)
    batch = EAGLE3.prepare(pack_samples(samples, anchors_in_step=1, samples_in_step=1), STEPS)
    step = torch.arange(STEPS)[:, None]
    tokens = batch.pack.input_ids[(batch.anchors + 2 + step).clamp(max=len(batch.pack.input_ids) - 1)]
    wanted = torch.searchsorted(draft_ids, tokens).masked_fill(step >= batch.anchor_steps, -100)
    optimizer = torch.optim.AdamW(made.head.parameters(), lr=3e-3)
    for _ in range(12):
        outputs = EAGLE3.unroll(made.head, target.embedding, batch, STEPS, KernelPlan())
        loss = functional.cross_entropy(made.head.logits(torch.stack(outputs)).flatten(0, 1), wanted.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    made.head.requires_grad_(False)
    return trained_on(made, samples, tmp_path_factory.mktemp("trained_on") / "features")


def trained_on(head: TrainedHead, samples: list[Sample], store: Path) -> TrainedHead:
    """The head with a record of training on these samples, all of them held out."""
    write_store(store, samples, dtype="float32", target_config=head.target_config)
    return with_origin(head, path=str(store), hash=open_store(store).fingerprint, val_fraction=1.0)


@pytest.fixture
def measurer(make_measurer: Callable[..., Measurer]) -> Measurer:
    made = make_measurer(limit=None, max_new_tokens=NEW_TOKENS)
    return replace(made, decoding=replace(made.decoding, steps=STEPS))


@pytest.fixture
def exported(tmp_path: Path, trained: TrainedHead) -> Path:
    export_head(trained, tmp_path / "head", versions={})
    return tmp_path / "head"


# --- what is compared ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 3, 5])
def test_the_unroll_and_the_replay_accept_the_same_drafts_of_the_same_answers(
    steps: int, trained: TrainedHead, target: Target, samples: list[Sample], measurer: Measurer
) -> None:
    cut = [*first_answers(iter(samples), measurer)]
    then = [unrolled(trained.head, target, sample, steps) for sample in cut]
    assert [replayed(Speculator(target, trained.head, LAYERS), sample, steps) for sample in cut] == then
    assert gains(then).accept_length > 1.5
    made = {sum(rounds) + len(rounds) for rounds in then}  # without prefill's token; the last may be past the end
    assert made <= {NEW_TOKENS - 1, NEW_TOKENS}


def test_drafts_past_the_end_of_an_answer_do_not_count(
    target: Target, samples: list[Sample], measurer: Measurer
) -> None:
    """A head that can only draft token 0, and an answer of nothing else."""
    head = random_head(tiny_facts(target), target.identity, torch.tensor([0])).head.requires_grad_(False)
    [cut] = first_answers(iter(samples[:1]), measurer)
    zeros = replace(cut, input_ids=torch.where(cut.turns > 0, 0, cut.input_ids))
    assert unrolled(head, target, zeros, 4) == [4, 4, 4, 4, 3]
    assert replayed(Speculator(target, head, LAYERS), zeros, 4) == [4, 4, 4, 4, 3]


def test_along_greedy_answers_it_is_what_decoding_accepts(
    trained: TrainedHead, target: Target, prompts: list[list[int]], measurer: Measurer
) -> None:
    greedy = answered(target, prompts, temperature=0.0, layers=LAYERS)
    then = [unrolled(trained.head, target, sample, STEPS) for sample in first_answers(iter(greedy), measurer)]
    with_room = {"max_new_tokens": NEW_TOKENS, "temperature": 0.0, "steps": STEPS, "seed": 0, "progress": None}
    unstopped = replace(target, stop_ids=frozenset())
    decoded = measure(unstopped, trained.head, LAYERS, prompts, lossless=False, **with_room).decoded
    assert [answer.verifications for answer in decoded] == [*map(len, then)]


def test_only_first_answers_that_fit_are_followed_up_to_max_new_tokens(
    samples: list[Sample], make_measurer: Callable[..., Measurer]
) -> None:
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
def test_a_damaged_head_drafts_worse_than_the_trained_one(
    name: str, trained: TrainedHead, exported: Path, measurer: Measurer
) -> None:
    assert check_as_trained(read_files(exported), measurer, trained.head).level == "ok"
    damaged = Editable(exported)
    DAMAGES[name](damaged)
    damaged.save()
    finding = check_as_trained(read_files(exported), measurer, trained.head)
    assert finding.level in ("warning", "error") and "the files are not what was trained" in finding.message


@pytest.mark.parametrize(
    ("lost", "spread", "level"),
    [
        (0.04, 0.0, "ok"),  # 2 %
        (0.12, 0.0, "warning"),  # 6 %
        (0.12, 0.2, "ok"),  # within two standard errors
        (0.60, 0.2, "error"),  # more than half of the gain of 1
        (-0.5, 0.0, "ok"),  # it drafts better
    ],
)
def test_a_loss_counts_if_it_is_beyond_5_percent_and_two_standard_errors(
    lost: float, spread: float, level: str, measurer: Measurer
) -> None:
    verifications, signs = np.full(8, 50.0), np.array([-1.0, 1.0] * 4)
    then = Gains(50 * np.ones(8), verifications, np.arange(8))  # an accept length of 2
    now = Gains(50 * (1 - lost + spread * signs), verifications, np.arange(8))
    assert judged(measurer, now, then).level == level


def test_one_answer_alone_has_no_standard_error_and_is_no_ground_for_a_warning(measurer: Measurer) -> None:
    then, now = (
        Gains(np.array([accepted]), np.array([made]), np.arange(1)) for accepted, made in ((50.0, 50.0), (0.0, 100.0))
    )
    finding = judged(measurer, now, then)
    assert (finding.level, finding.message[:5]) == ("ok", "1.000")


# --- in the table of checks ------------------------------------------------------------------------------------------


def rows(findings: list[Finding], *levels: str) -> dict[str, str]:
    return {finding.check: finding.message for finding in findings if finding.level in levels}


def test_a_sound_export_has_neither_a_warning_nor_an_error_at_its_export_and_later(
    trained: TrainedHead, exported: Path, measurer: Measurer
) -> None:
    measurer = replace(measurer, limit=3)
    trained = with_record(trained, simulated_accept_length={3: 9.0})  # on whole answers: not compared
    findings, files = check_export(trained, read_files(exported), measurer)
    assert rows(findings, "warning", "error", "skipped") == {}
    [found] = [finding.message for finding in findings if finding.check == "as_trained"]
    assert "at steps=3 along the first 24 tokens of 3 stored answers" in found
    later = check_head(files, measurer)
    assert rows(later, "warning", "error", "skipped") == {} and rows(later, "ok")["as_trained"] == found
    assert found.partition(" ")[0] == found.split()[-5]  # bit for bit, in float32


def test_features_of_other_layers_than_their_store_says_are_found_by_this_check_alone(
    trained: TrainedHead, measurer: Measurer, tmp_path: Path
) -> None:
    """As where the engine that made the features captures other layers than servers do."""
    elsewhere = with_origin(trained, capture_layers=[5, 6, 7])
    export_head(elsewhere, tmp_path / "head", versions={})
    findings, _ = check_export(elsewhere, read_files(tmp_path / "head"), measurer)
    assert [*rows(findings, "warning", "error", "skipped")] == ["as_trained"]


def test_without_the_answers_of_the_training_nothing_is_compared(
    trained: TrainedHead, samples: list[Sample], measurer: Measurer, tmp_path: Path
) -> None:
    def said(head: TrainedHead, name: str) -> str:
        export_head(head, tmp_path / name, versions={})
        return rows([check_as_trained(read_files(tmp_path / name), measurer)], "skipped")["as_trained"]

    assert "/gone" in said(with_origin(trained, path="/gone/features"), "gone")
    assert "is no longer the store of the training" in said(with_origin(trained, hash="other"), "changed")
    assert said(with_origin(trained, val_fraction=0.0), "all") == (
        "no held-out answer of the training has two tokens and fits"
    )
    edited = read_files(tmp_path / "all")
    assert "which answers the head was trained on" in check_as_trained(replace(edited, record=None), measurer).message
