"""A target that was not loaded as it was trained is refused by what it makes of ordinary text."""

import logging

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from eagle3.errors import InputError
from eagle3.target.model import load_target
from eagle3.target.sanity_check import require_health

OPTIONS = {"dtype": "float32", "device": "cpu"}


def test_a_trained_target_passes_and_the_log_says_by_how_much(tiny_path, caplog):
    with caplog.at_level(logging.INFO, "eagle3.target.sanity_check"):
        load_target(path=str(tiny_path), **OPTIONS, check_health=True)
    assert "4.66 nats per token on ordinary English text (untrained, vocabulary of 4096: 8.32)" in caplog.text


def test_a_loss_that_is_no_number_is_refused(tiny_path):
    model = AutoModelForCausalLM.from_pretrained(tiny_path, dtype=torch.float32)
    model.model.norm.weight.data.fill_(torch.nan)
    with pytest.raises(InputError, match=r"^target\.path=here: nan nats"):
        require_health(model.eval(), AutoTokenizer.from_pretrained(tiny_path), "here")


def test_a_model_that_does_not_compute_next_tokens_is_one_line(tiny_path, monkeypatch):
    def forward(self: object, input_ids: object, decoder_input_ids: object) -> None:
        """As of a diffusion model."""

    monkeypatch.setattr(LlamaForCausalLM, "forward", forward)
    with pytest.raises(InputError, match=r"is a LlamaForCausalLM, which does not compute the next tokens .*choose"):
        load_target(path=str(tiny_path), **OPTIONS, check_health=True)


def test_untrained_weights_are_refused_unless_the_check_is_switched_off(tiny_path, tmp_path):
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(tiny_path, initializer_range=0.3)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(tiny_path).save_pretrained(tmp_path)
    assert load_target(path=str(tmp_path), **OPTIONS, check_health=False)
    with pytest.raises(
        InputError, match=r"^target\.path=\S+: \S+ nats .*not what was trained.*target\.check_health=false"
    ):
        load_target(path=str(tmp_path), **OPTIONS, check_health=True)


def test_a_tokenizer_of_another_model_is_named_before_an_index_is_out_of_range(tiny_path):
    model = AutoModelForCausalLM.from_pretrained(tiny_path)
    model.resize_token_embeddings(1000)
    with pytest.raises(InputError, match=r"target\.path=here: its tokenizer writes id \d{4} .* has 1000 rows; put"):
        require_health(model.eval(), AutoTokenizer.from_pretrained(tiny_path), "here")
