"""Layer ids one off are found by what the head knows of the target's answers, without any record of the training."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from exported_head import (
    IDS,
    LAYERS,
    Editable,
    as_speculators,
    errors,
    in_another_order,
    name_layers,
    random_head,
    tiny_facts,
)

from eagle3.decoding.batched_trees import BatchedTrees
from eagle3.decoding.speculate import Decoded, Speculator, plain_greedy
from eagle3.head_files.files import read_files
from eagle3.serving.check.accept_length import Measurer
from eagle3.serving.check.checks import check_head
from eagle3.serving.check.layer_notation import readings
from eagle3.serving.head.export import TrainedHead, export_head
from eagle3.target.capture import Capture
from eagle3.target.model import Target

QUESTIONS = ["What is a list?", "How do I delete a file?", "Name three uses of a hash table.", "What is 3 times 4?"]
NEW_TOKENS = 24


@pytest.fixture(scope="module")
def measurer(make_measurer: Callable[..., Measurer]) -> Measurer:
    return make_measurer(questions=QUESTIONS, max_new_tokens=NEW_TOKENS)


@pytest.fixture(scope="module")
def taught(target: Target, measurer: Measurer) -> TrainedHead:
    """A head whose lm_head is fitted to the target's answers on LAYERS."""
    prompts = measurer.prompts(None).prompts
    texts = [prompt + plain_greedy(target, prompt, NEW_TOKENS) for prompt in prompts]
    answers = {token for text, prompt in zip(texts, prompts, strict=True) for token in text[len(prompt) :]}
    trained = random_head(tiny_facts(target), target.identity, torch.tensor(sorted(answers)))
    normed: list[torch.Tensor] = []
    wanted = []
    for text, prompt in zip(texts, prompts, strict=True):
        trees = BatchedTrees(Speculator(target, trained.head, LAYERS), Capture(target, LAYERS), text)
        normed.append(trained.head.norm(trees.first_outputs(range(len(prompt), len(text) - 1))).detach())
        wanted += text[len(prompt) + 1 :]
    one_hot = (torch.tensor(wanted)[:, None] == trained.head.draft_ids).float()
    trained.head.lm_head.weight.data = 8 * torch.linalg.lstsq(torch.cat(normed), one_hot).solution.T.contiguous()
    return trained


@pytest.fixture
def foreign(taught: TrainedHead, tmp_path: Path) -> Editable:
    """The head as another trainer would leave it."""
    export_head(taught, tmp_path / "head", versions={})
    head = Editable(tmp_path / "head")
    head.training = None
    return head


def found(head: Editable, measurer: Measurer) -> dict[str, tuple[str, str]]:
    head.save()
    return {item.check: (item.level, item.message) for item in check_head(read_files(head.path), measurer)}


@pytest.mark.shapes
def test_the_layers_of_the_training_are_confirmed_by_one_answer_to_each_prompt(
    foreign: Editable, measurer: Measurer, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[int]] = []
    decode = Speculator.decode

    def counting(speculator: Speculator, prompt_ids: list[int], **settings: Any) -> Decoded:
        asked.append(prompt_ids)
        return decode(speculator, prompt_ids, **settings)

    monkeypatch.setattr(Speculator, "decode", counting)
    ascending = found(foreign, measurer)
    level, message = ascending["layer_notation"]
    assert level == "ok" and "[1, 3, 4]" in message and "[0, 2, 3]" in message and "[2, 4, 5]" in message
    assert asked == measurer.prompts(None).prompts
    assert not ascending["accept_length"][1].startswith("1.000")
    in_another_order(foreign)  # its draft vocabulary
    assert found(foreign, measurer) == ascending


@pytest.mark.parametrize(("shift", "twice"), [(-1, True), (1, False)])
def test_ids_that_are_one_off_are_found_and_the_right_ones_named(
    shift: int, twice: bool, foreign: Editable, measurer: Measurer
) -> None:
    name_layers(foreign.config, [1 + shift, 3 + shift, 4 + shift], twice=twice)
    level, message = found(foreign, measurer)["layer_notation"]
    assert level == "error"
    served = measurer.decoded(foreign.path, measurer.prompts(None), capture_layers=LAYERS).accept_length
    remedy = f"set eagle_config.{IDS} to [1, 3, 4] and {IDS} at the top level to [2, 4, 5], which gives an accept len"
    assert remedy in message and f"{served:.3f}" in message
    assert served > measurer.decoded(foreign.path, measurer.prompts(None)).accept_length


def test_ids_at_the_top_level_are_tried_in_both_notations(
    foreign: Editable, measurer: Measurer, taught: TrainedHead
) -> None:
    del foreign.config["eagle_config"]
    foreign.config[IDS] = [2, 4, 5]
    assert found(foreign, measurer)["layer_notation"][0] == "ok"  # SGLang's default happens to be right
    foreign.save()
    files = replace(read_files(foreign.path), config=foreign.config | {IDS: [2, 4, 6]})
    assert readings(files, 8) == [(2, 4, 5), (1, 3, 4), (3, 5, 6), (2, 4, 6), (3, 5, 7)]


def test_a_head_of_the_speculators_is_decoded_before_its_layout_is_changed(
    foreign: Editable, measurer: Measurer, target: Target
) -> None:
    as_speculators(foreign, target.embedding)
    result = found(foreign, measurer)
    assert {check for check, (level, _) in result.items() if level == "error"} == {"layout"}
    assert result["layer_notation"][0] == result["accept_length"][0] == "ok"


def test_a_head_that_cannot_be_decoded_is_not(foreign: Editable, measurer: Measurer) -> None:
    name_layers(foreign.config, [1, 3, 99])
    result = found(foreign, measurer)
    assert result["accept_length"] == ("skipped", "correct the errors above first")
    assert "layer_notation" not in result


def test_a_head_that_knows_nothing_is_not_accused_of_its_layers(
    target: Target, measurer: Measurer, tmp_path: Path
) -> None:
    export_head(random_head(tiny_facts(target), target.identity), tmp_path / "head", versions={})
    (tmp_path / "head/training.json").unlink()
    assert "layer_notation" not in errors(check_head(read_files(tmp_path / "head"), measurer))
