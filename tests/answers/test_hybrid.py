"""Targets with recurrent layers are answered one at a time."""

import logging
from typing import Any

import pytest
import torch
import transformers
from fitted_head import make_target
from hybrid_families import FAMILIES, SHAPE, hybrid_config
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from eagle3.answers.answerer import Sampling
from eagle3.answers.generate import generate
from eagle3.answers.huggingface import HuggingFaceAnswerer
from eagle3.engine.endpoint import Answer
from eagle3.errors import InputError
from eagle3.target.model import Target
from eagle3.workers.meter import ProgressBuffer
from eagle3.workers.task import take_from

PROMPTS = [[5, 6, 7, 8], [9, 10, 11, 12, 13, 14, 15, 16, 17], [20, 21], [30, 31, 32, 33, 34, 35, 36]]


def random_model(config: PreTrainedConfig) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


def answers(model: PreTrainedModel, prompts: list[list[int]], stop_ids: frozenset[int]) -> list[Answer]:
    greedy: dict[str, Any] = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "pad_id": 0}
    return generate(model, prompts, seeds=[0] * len(prompts), max_new_tokens=12, stop_ids=stop_ids, **greedy)


@torch.no_grad()
def without_cache(model: PreTrainedModel, prompt: list[int], count: int) -> list[int]:
    ids = [*prompt]
    for _ in range(count):
        ids.append(int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_to_several_prompts_are_those_without_a_cache(family: str) -> None:
    model = random_model(hybrid_config(family))
    plain = [without_cache(model, prompt, 12) for prompt in PROMPTS]
    stop_ids = frozenset({plain[0][2], plain[1][6]})
    together = answers(model, PROMPTS, stop_ids)
    for prompt, ids, answer in zip(PROMPTS, plain, together, strict=True):
        assert answer.token_ids == ids[: len(answer.token_ids)]
        assert [answer] == answers(model, [prompt], stop_ids)
    lengths = [len(answer.token_ids) for answer in together]
    assert lengths[0] <= 3 and lengths[1] <= 7 and len(set(lengths)) > 1


class Waiting:
    """A conversation of one turn."""

    seed = 0

    def __init__(self, prompt_ids: list[int]) -> None:
        self.prompt_ids, self.given, self.waiting = prompt_ids, Answer([], ""), True

    def answer(self, answer: Answer) -> None:
        self.given, self.waiting = answer, False

    def fail(self, reason: str) -> None:
        raise AssertionError(reason)


def answerer(target: Target) -> HuggingFaceAnswerer:
    sampling = Sampling(temperature=0.0, top_p=1.0, top_k=0, max_new_tokens=6)
    return HuggingFaceAnswerer(target=target, sampling=sampling, batch_size=4, batch_tokens=1000, window=4)


def test_prompts_are_answered_one_at_a_time_and_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    target = make_target(hybrid_config("lfm2"))
    with caplog.at_level(logging.INFO, "eagle3.answers.huggingface"):
        give = answerer(target)
    assert "prompts are answered one at a time" in caplog.text and "a lfm2 keeps" in caplog.text
    conversations = [Waiting(prompt) for prompt in PROMPTS]
    [done] = give(take_from(conversations), ProgressBuffer())
    assert [each.given.token_ids for each in done] == [without_cache(target.model, prompt, 6) for prompt in PROMPTS]


def test_a_model_without_such_a_cache_is_refused_before_it_answers() -> None:
    target = make_target(transformers.RwkvConfig(**SHAPE))
    with pytest.raises(InputError, match=r"target\.path=random is a RwkvForCausalLM.*answers=imported"):
        answerer(target)
