"""Targets with recurrent layers are answered one at a time."""

import logging

import defaults
import pytest
import torch
import transformers
from fitted_head import make_target
from generation import GREEDY, answer
from hybrid_families import FAMILIES, SHAPE, hybrid_config
from transformers import PreTrainedConfig, PreTrainedModel

from eagle3.answers.huggingface import HuggingFaceAnswerer
from eagle3.errors import InputError

PROMPTS = [[5, 6, 7, 8], [9, 10, 11, 12, 13, 14, 15, 16, 17], [20, 21]]


@torch.no_grad()
def without_cache(model: PreTrainedModel, prompt: list[int], count: int) -> list[int]:
    ids = [*prompt]
    for _ in range(count):
        ids.append(int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_to_several_prompts_are_those_without_a_cache(family):
    model = make_target(hybrid_config(family)).model
    plain = [without_cache(model, prompt, 8) for prompt in PROMPTS]
    stop_ids = frozenset({plain[0][2], plain[1][5]})
    together = answer(model, PROMPTS, max_new_tokens=8, stop_ids=stop_ids, **GREEDY)
    for ids, ours in zip(plain, together, strict=True):
        assert ours.token_ids == ids[: len(ours.token_ids)]
    lengths = [len(ours.token_ids) for ours in together]
    assert lengths[0] <= 3 and lengths[1] <= 6 and len(set(lengths)) > 1


def test_the_answerer_says_that_prompts_are_answered_one_at_a_time(caplog):
    with caplog.at_level(logging.INFO, "eagle3.answers.huggingface"):
        answerer(hybrid_config("lfm2"))
    assert "prompts are answered one at a time" in caplog.text and "a lfm2 keeps" in caplog.text


def test_a_model_without_such_a_cache_is_refused_before_it_answers():
    with pytest.raises(InputError, match=r"target\.path=random is a RwkvForCausalLM.*answers=imported"):
        answerer(transformers.RwkvConfig(**SHAPE))


def answerer(config: PreTrainedConfig) -> HuggingFaceAnswerer:
    sampling = defaults.sampling(temperature=0.0, max_new_tokens=6)
    return HuggingFaceAnswerer(target=make_target(config), sampling=sampling, batch_size=4, batch_tokens=1000, window=4)
